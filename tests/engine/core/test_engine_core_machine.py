"""Random programs against the core. There must be no deadlock, no leak, no read of foreign KV, and
one answer for each request."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import BACKGROUND, EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.steps import RunnerInfo, WindowInfo
from parrot.engine.sim import EOS_ID, VOCAB_SIZE, byte_tokenizer_response
from parrot.protocol.engine_api import NO_PARENT, DraftSources
from parrot.protocol.sampling import SamplingConfig
from tests.engine.core.oracle import Oracle, TrackedRequest
from tests.support.checking_runner import CheckingRunner, LaunchingRunner
from tests.support.examples import examples
from tests.support.manual_clock import ManualClock

LANGUAGE = Language.of(byte_tokenizer_response())
MAX_IDLE_STEPS = 3000

# Hypothesis checks each new strategy, so draws use these.
FIRST_IDS = st.sampled_from([None, 1])
KINDS = st.sampled_from(["root", "fork", "fork", "append"])
LENGTHS = st.sampled_from([None, None, 0, 1, 2, 3, 5, 8, 13])
PIECES = [st.lists(st.integers(97, 99), min_size=size, max_size=9) for size in (0, 1)]
ADDED = st.lists(st.sampled_from([97, 98, 120, 121]), max_size=2)


def next_token(context_ids) -> int:
    """A printable byte, or in 1 of 23 cases EOS."""
    value = hash(tuple(context_ids))
    return EOS_ID if value % 23 == 0 else 97 + value % 26


def after_last_token(context_ids) -> int:
    """A model in which the next token depends only on the last token, so that outputs repeat
    soon."""
    value = hash((context_ids[-1], 7))
    return EOS_ID if value % 23 == 0 else 97 + value % 26


def one_of(data, values):
    return values[data.draw(st.integers(0, len(values) - 1))]


class EngineMachine(RuleBasedStateMachine):
    faults: ClassVar[dict[str, int]] = {}
    runner_type: ClassVar[type[CheckingRunner]] = CheckingRunner
    model: ClassVar[Callable[[Sequence[int]], int]] = staticmethod(next_token)
    takes_drafts: ClassVar[bool] = False
    num_host_blocks: ClassVar[int] = 0
    has_windows: ClassVar[bool] = False

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 14),
        chunk=st.sampled_from([None, 1, 3, 7]),
        max_batch=st.sampled_from([1, 2, 8]),
        max_batched=st.sampled_from([2, 5, 64]),
        max_total=st.sampled_from([None, 6, 20]),
        prefix_caching=st.sampled_from([True, True, False]),
        window=st.integers(1, 9),
        more_slots=st.integers(0, 12),
    )
    def start(
        self,
        block_size,
        num_blocks,
        chunk,
        max_batch,
        max_batched,
        max_total,
        prefix_caching,
        window,
        more_slots,
    ):
        if self.takes_drafts:
            num_blocks, max_batch = num_blocks + 14, 3 * max_batch + 5
        config = SimConfig(
            fill_chunk_size=chunk,
            scheduler={
                "max_batch_size": max_batch,
                "max_num_batched_tokens": max_batched,
                "max_total_tokens": max_total,
                "prefix_caching": prefix_caching,
            },
        )
        info = RunnerInfo(
            num_blocks,
            block_size,
            max_seq_len=40,
            vocab_size=VOCAB_SIZE,
            model_mem=0.0,
            cache_mem=0.0,
            draft_sizes=(2, 4, 8, 64) if self.takes_drafts else (),
            num_host_blocks=self.num_host_blocks,
            window=WindowInfo(
                -(-window // block_size) + 5 + more_slots,
                window,
                num_host_slots=self.num_host_blocks,
            )
            if self.has_windows
            else None,
        )
        self.limits = (max_batch, max_batched)
        self.runner = self.runner_type(info, self.tokens_of, self.model, **self.faults)
        self.core = EngineCore(config, self.runner, LANGUAGE, ManualClock())
        max_len = self.core.max_context_len
        bad_tokens = tuple(self.faults.values())
        self.oracle = Oracle(self.core._tree.get, self.model, max_len, bad_tokens)
        self.requests: list[TrackedRequest] = []
        self.next_context = 0
        self.live: list[int] = []
        self.salts: dict[int, str] = {}

    def tokens_of(self, context_id: int):
        return self.core._tree.get(context_id).token_ids

    def submit(self, pieces, sampling=None, priority=0, stream=False, drafts=()) -> None:
        request = self.oracle.record(pieces, sampling, priority)
        salt = self.salt
        self.requests.append(request)
        number = len(self.requests)
        self.core.requests.submit(
            EngineRequest(
                number,
                tuple(pieces),
                priority,
                sampling,
                stream,
                salt,
                drafts=DraftSources(texts=drafts),
            ),
            request,
        )
        self.deliver()
        self.oracle.confirm(request)

    def deliver(self) -> None:
        for call, argument in self.core.requests.outbox.take():
            call(argument)

    def new_context(self) -> int:
        self.next_context += 1
        self.live.append(self.next_context)
        self.salts[self.next_context] = self.salt
        return self.next_context

    @property
    def salt(self) -> str:
        """The salt of the next request."""
        return "other" if len(self.requests) % 4 == 3 else ""

    @property
    def usable(self) -> list[int]:
        return [c for c in self.live if self.salts[c] == self.salt]

    def draw_piece(self, data) -> Piece:
        first_id = data.draw(FIRST_IDS)
        tokens = array("i", data.draw(PIECES[first_id is not None]))
        kind = data.draw(KINDS)
        if kind != "root" and (usable := self.usable):
            parent = one_of(data, usable)
            if kind == "append":
                return Piece(parent, tokens, first_id=first_id)
            length = data.draw(LENGTHS)
            return Piece(self.new_context(), tokens, parent, length, first_id)
        public = 0 if first_id is not None else data.draw(st.integers(0, len(tokens)))
        return Piece(self.new_context(), tokens, NO_PARENT, None, first_id, public)

    @rule(data=st.data(), num=st.integers(1, 3), priority=st.sampled_from([-1, 0, 1, BACKGROUND]))
    def fill(self, data, num, priority):
        num = 1 if priority == BACKGROUND else num  # A background fill has one piece, as over HTTP.
        self.submit([self.draw_piece(data) for _ in range(num)], priority=priority)

    @rule(
        data=st.data(),
        num=st.integers(1, 3),
        priority=st.integers(-1, 1),
        length=st.integers(1, 12),
        stop=st.sampled_from([None, "ab", ("zz", "c")]),
        stream=st.booleans(),
    )
    def generate(self, data, num, priority, length, stop, stream):
        pieces = [self.draw_piece(data) for _ in range(num)]
        length *= 1 + self.takes_drafts
        sampling = SamplingConfig(max_gen_length=length, stop_str=stop)
        drafts = self.draw_drafts(data, list(pieces[-1].token_ids)) if self.takes_drafts else ()
        self.submit(pieces, sampling, priority, stream, drafts)

    def draw_drafts(self, data, text) -> tuple[list[int], ...]:
        """A possible output of the model, with inserted tokens in the middle."""
        text = text[-4:] or [97]
        for _ in range(16):
            text.append(self.model(text))
        at = data.draw(st.integers(0, len(text)))
        added = data.draw(ADDED)
        return ([*text[:at], *added, *text[at:]],)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 3))
    def free(self, data, num):
        ids = data.draw(st.lists(st.sampled_from(self.live), max_size=num, unique=True))
        self.oracle.record_free(ids)
        self.core.requests.free(ids)
        self.live = [context_id for context_id in self.live if context_id not in ids]
        self.deliver()

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.integers(1, len(self.requests)))
        self.oracle.record_abort(self.requests[request_id - 1])
        self.core.requests.abort(request_id)
        self.deliver()
        assert self.requests[request_id - 1].answer is not None

    @rule(num=st.integers(1, 6))
    def steps(self, num):
        for _ in range(num):
            self.step()

    def step(self) -> bool:
        num_plans = len(self.runner.plans)
        self.core.wait_until_due()
        ran = self.core.step()
        self.deliver()
        for plan in self.runner.plans[num_plans:]:
            assert sum(1 + s.num_drafts for s in plan.sequences) <= self.limits[0]
            assert plan.num_tokens <= self.limits[1]
        assert not self.runner.violations, self.runner.violations[0]
        can_differ = self.faults or self.runner_type is not CheckingRunner
        assert can_differ or len(self.runner.plans) == num_plans + ran
        self.core.check_integrity()
        return ran

    @invariant()
    def holds(self):
        if hasattr(self, "core"):
            self.core.check_integrity()

    def teardown(self):
        if not hasattr(self, "core"):
            return
        for _ in range(MAX_IDLE_STEPS):
            if not self.step():
                break
        assert not self.core.has_work, "requests are left, but the core runs no step"
        assert all(request.answer is not None for request in self.requests)
        self.core.requests.free(self.live)
        self.deliver()
        assert not self.runner.violations, self.runner.violations[0]
        info = self.core.runtime_info()
        assert info.num_free_blocks == info.num_max_blocks
        assert info.num_total_jobs == 0


class FaultyEngineMachine(EngineMachine):
    """Uses a model that crashes at one letter and returns NaN at another."""

    faults: ClassVar = {"crash_token": 99, "nan_token": 98}


class OverlappingEngineMachine(EngineMachine):
    """Steps are launched before the tokens of the previous step are known."""

    runner_type: ClassVar = LaunchingRunner


class FaultyOverlappingEngineMachine(FaultyEngineMachine):
    runner_type: ClassVar = LaunchingRunner


class DraftingEngineMachine(EngineMachine):
    """Steps verify drafts."""

    model: ClassVar = staticmethod(after_last_token)
    takes_drafts: ClassVar = True


class FaultyDraftingEngineMachine(DraftingEngineMachine):
    """The bad letters are rare in outputs. In drafts they must have no effect."""

    faults: ClassVar = {"crash_token": 120, "nan_token": 121}


class OverlappingDraftingEngineMachine(DraftingEngineMachine):
    runner_type: ClassVar = LaunchingRunner


class FaultyOverlappingDraftingEngineMachine(FaultyDraftingEngineMachine):
    runner_type: ClassVar = LaunchingRunner


class WindowedEngineMachine(EngineMachine):
    """The model has windows, and often too few slots for them."""

    has_windows: ClassVar = True


class FaultyOverlappingWindowedEngineMachine(FaultyOverlappingEngineMachine):
    has_windows: ClassVar = True


class OverlappingDraftingWindowedEngineMachine(OverlappingDraftingEngineMachine):
    has_windows: ClassVar = True


def as_test(machine: type[EngineMachine], num_rules: int = 30) -> Any:
    """The test case that runs the machine, `num_rules` rules at a time."""
    case = machine.TestCase
    case.settings = settings(
        max_examples=examples(16),
        stateful_step_count=num_rules,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # Shrinking takes minutes.
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    return case


TestEngineMachine = as_test(EngineMachine)
TestFaultyEngineMachine = as_test(FaultyEngineMachine)
TestOverlappingEngineMachine = as_test(OverlappingEngineMachine)
TestFaultyOverlappingEngineMachine = as_test(FaultyOverlappingEngineMachine)
TestDraftingEngineMachine = as_test(DraftingEngineMachine)
TestFaultyDraftingEngineMachine = as_test(FaultyDraftingEngineMachine)
TestOverlappingDraftingEngineMachine = as_test(OverlappingDraftingEngineMachine)
TestFaultyOverlappingDraftingEngineMachine = as_test(FaultyOverlappingDraftingEngineMachine)
TestWindowedEngineMachine = as_test(WindowedEngineMachine)
TestFaultyOverlappingWindowedEngineMachine = as_test(FaultyOverlappingWindowedEngineMachine)
TestOverlappingDraftingWindowedEngineMachine = as_test(OverlappingDraftingWindowedEngineMachine)
