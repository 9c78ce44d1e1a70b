"""Random programs against the engine core: no deadlock, no foreign KV, no leak, one answer each."""

from array import array
from typing import ClassVar

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import BACKGROUND, EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.plan import RunnerInfo
from parrot.engine.sim.tokenizer import EOS_ID, VOCAB_SIZE, byte_tokenizer_response
from parrot.protocol.engine_api import NO_PARENT, FillResponse, GenerateResponse
from parrot.protocol.errors import (
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NotFound,
    OutOfMemory,
    ParrotError,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.testing.checking_runner import CheckingRunner, LaunchingRunner
from parrot.utils.clock import ManualClock

LANGUAGE = Language.of(byte_tokenizer_response())
MAX_IDLE_STEPS = 3000


class RecordingSink:
    def __init__(self) -> None:
        self.chunks = []
        self.response = None
        self.error = None

    @property
    def num_ends(self) -> int:
        return (self.response is not None) + (self.error is not None)

    def chunk(self, chunk) -> None:
        assert self.num_ends == 0
        self.chunks.append(chunk)

    def done(self, response) -> None:
        assert self.num_ends == 0
        self.response = response

    def fail(self, error: ParrotError) -> None:
        assert self.num_ends == 0
        self.error = error


def next_token(context_ids) -> int:
    """A printable byte; now and then the end of the text."""
    value = hash(tuple(context_ids))
    return EOS_ID if value % 23 == 0 else 97 + value % 26


class EngineMachine(RuleBasedStateMachine):
    faults: ClassVar[dict[str, int]] = {}
    runner_type: ClassVar[type[CheckingRunner]] = CheckingRunner
    errors: ClassVar = InvalidRequest | NotFound | Cancelled | OutOfMemory

    @initialize(
        block_size=st.sampled_from([1, 2, 4]),
        num_blocks=st.integers(3, 14),
        chunk=st.sampled_from([None, 1, 3, 7]),
        max_batch=st.sampled_from([1, 2, 8]),
        max_batched=st.sampled_from([2, 5, 64]),
        max_total=st.sampled_from([None, 6, 20]),
        prefix_caching=st.sampled_from([True, True, False]),
    )
    def start(
        self, block_size, num_blocks, chunk, max_batch, max_batched, max_total, prefix_caching
    ):
        config = SimConfig(
            fill_chunk_size=chunk,
            scheduler={
                "max_batch_size": max_batch,
                "max_num_batched_tokens": max_batched,
                "max_total_tokens": max_total,
                "prefix_caching": prefix_caching,
            },
        )
        info = RunnerInfo(num_blocks, block_size, 40, VOCAB_SIZE, 0.0, 0.0)
        self.limits = (max_batch, max_batched)
        self.runner = self.runner_type(info, self.tokens_of, next_token, **self.faults)
        self.core = EngineCore(config, self.runner, LANGUAGE, ManualClock())
        self.sinks: list[RecordingSink] = []
        self.next_context = 0
        self.live: list[int] = []

    def tokens_of(self, context_id: int):
        return self.core._tree.get(context_id).token_ids

    def submit(self, pieces, sampling=None, priority=0, stream=False) -> None:
        sink = RecordingSink()
        self.sinks.append(sink)
        salt = "" if len(self.sinks) % 4 else "other"
        order = EngineRequest(
            len(self.sinks), tuple(pieces), sink, priority, sampling, stream, salt
        )
        self.core.submit(order)
        self.deliver()

    def deliver(self) -> None:
        for call, argument in self.core.take_outcomes():
            call(argument)

    def new_context(self) -> int:
        self.next_context += 1
        self.live.append(self.next_context)
        return self.next_context

    def pick(self, data) -> int:
        return data.draw(st.sampled_from(self.live)) if self.live else 999

    def draw_piece(self, data) -> Piece:
        tokens = array("i", data.draw(st.lists(st.integers(97, 99), max_size=9)))
        first_id = data.draw(st.sampled_from([None, 1]))
        kind = data.draw(st.sampled_from(["root", "fork", "fork", "append"]))
        if kind == "append" and self.live:
            return Piece(self.pick(data), tokens, first_id=first_id)
        if kind == "fork" and self.live:
            parent = self.pick(data)
            length = data.draw(st.sampled_from([None, None, 0, 1, 2, 3, 5, 8, 13]))
            return Piece(self.new_context(), tokens, parent, length, first_id)
        return Piece(self.new_context(), tokens, NO_PARENT, None, first_id)

    @rule(data=st.data(), num=st.integers(1, 3), priority=st.sampled_from([-1, 0, 1, BACKGROUND]))
    def fill(self, data, num, priority):
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
        sampling = SamplingConfig(max_gen_length=length, stop_str=stop)
        self.submit(pieces, sampling, priority, stream)

    @precondition(lambda self: self.live)
    @rule(data=st.data(), num=st.integers(1, 3))
    def free(self, data, num):
        ids = data.draw(st.lists(st.sampled_from(self.live), max_size=num, unique=True))
        self.core.free(ids)
        self.live = [context_id for context_id in self.live if context_id not in ids]
        self.deliver()

    @precondition(lambda self: self.sinks)
    @rule(data=st.data())
    def abort(self, data):
        request_id = data.draw(st.integers(1, len(self.sinks)))
        self.core.abort(request_id)
        self.deliver()
        assert self.sinks[request_id - 1].num_ends == 1

    @rule(num=st.integers(1, 6))
    def steps(self, num):
        for _ in range(num):
            self.step()

    def step(self) -> bool:
        num_plans = len(self.runner.plans)
        ran = self.core.step()
        self.deliver()
        for plan in self.runner.plans[num_plans:]:
            assert len(plan.sequences) <= self.limits[0]
            assert plan.num_tokens <= self.limits[1]
        assert not self.runner.violations, self.runner.violations[0]
        can_differ = self.faults or self.runner_type is LaunchingRunner
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
        assert not self.core.has_work, "requests are left but no step can be made"
        for sink in self.sinks:
            assert sink.num_ends == 1
            self.check_answer(sink)
        self.core.free(self.live)
        self.deliver()
        assert not self.runner.violations, self.runner.violations[0]
        info = self.core.runtime_info()
        assert info.num_free_blocks == info.num_max_blocks
        assert info.num_total_jobs == 0

    def check_answer(self, sink: RecordingSink) -> None:
        if sink.error is not None:
            assert isinstance(sink.error, self.errors), sink.error
        elif isinstance(sink.response, FillResponse):
            assert sink.response.filled_len >= 0
        else:
            assert isinstance(sink.response, GenerateResponse)
            assert sink.response.usage.output_tokens == len(sink.response.generated_ids) > 0
            if sink.chunks:
                ids = [i for chunk in sink.chunks for i in chunk.ids]
                assert ids == sink.response.generated_ids
                assert "".join(c.text for c in sink.chunks) == sink.response.generated_text


class FaultyEngineMachine(EngineMachine):
    """The same with a model that crashes at one letter and gives NaN at another."""

    faults: ClassVar = {"crash_token": 99, "nan_token": 98}
    errors: ClassVar = InvalidRequest | NotFound | Cancelled | OutOfMemory | EngineFailed


class OverlappingEngineMachine(EngineMachine):
    """Steps are launched before the tokens of those before them are known."""

    runner_type: ClassVar = LaunchingRunner


class FaultyOverlappingEngineMachine(FaultyEngineMachine):
    runner_type: ClassVar = LaunchingRunner


SETTINGS = settings(
    max_examples=100,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = SETTINGS
TestFaultyEngineMachine = FaultyEngineMachine.TestCase
TestFaultyEngineMachine.settings = SETTINGS
TestOverlappingEngineMachine = OverlappingEngineMachine.TestCase
TestOverlappingEngineMachine.settings = SETTINGS
TestFaultyOverlappingEngineMachine = FaultyOverlappingEngineMachine.TestCase
TestFaultyOverlappingEngineMachine.settings = SETTINGS
