"""An engine core with a `CheckingRunner`. Its pool is so small that tests can check each block."""

from array import array
from collections.abc import Callable, Sequence
from typing import Any

from parrot.engine.config import SimConfig
from parrot.engine.core.contexts import Context
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.shares import ALONE, TenantShare
from parrot.engine.core.steps import RunnerInfo, StepPlan, WindowInfo
from parrot.engine.sim import VOCAB_SIZE, byte_tokenizer_response
from parrot.protocol.engine_api import NO_PARENT, DraftSources, PoolingKind
from parrot.protocol.sampling import SamplingConfig
from tests.support.answer import Answer
from tests.support.checking_runner import CheckingRunner
from tests.support.manual_clock import ManualClock

LANGUAGE = Language.of(byte_tokenizer_response())


def piece(
    context_id: int,
    text: str = "",
    parent: int = NO_PARENT,
    length: int | None = None,
    public: int = 0,
) -> Piece:
    ids = array("i", list(text.encode()))
    return Piece(context_id, ids, parent, length, public_len=public)


def next_letter(context_ids: Sequence[int]) -> int:
    """The letter after the newest one. It depends on the last token only, so outputs are easy to
    predict."""
    return 97 + (context_ids[-1] - 96) % 26


class Harness:
    """`config` has keys of the engine's configuration, and `faults` has options of
    `CheckingRunner`."""

    def __init__(
        self,
        num_blocks: int = 16,
        block_size: int = 4,
        max_seq_len: int = 64,
        model: Callable[[Sequence[int]], int] = next_letter,
        faults: dict[str, int] | None = None,
        draft_sizes: tuple[int, ...] = (),
        window: WindowInfo | None = None,
        **config: Any,
    ) -> None:
        info = RunnerInfo(
            num_blocks,
            block_size,
            max_seq_len,
            VOCAB_SIZE,
            1.0,
            2.0,
            draft_sizes=draft_sizes,
            window=window,
        )
        self.clock = ManualClock()
        self.runner = CheckingRunner(info, self.tokens_of, model, **(faults or {}))
        self.core = EngineCore(SimConfig(**config), self.runner, LANGUAGE, self.clock)
        self.num_orders = 0

    def tokens_of(self, context_id: int) -> Sequence[int]:
        context = self.context(context_id)
        assert context is not None, f"no context {context_id}"
        return context.token_ids

    def context(self, context_id: int) -> Context | None:
        return self.core._tree.get(context_id)

    def bytes_of(self, context_id: int) -> bytes:
        return bytes(list(self.tokens_of(context_id)))

    def submit(
        self,
        *pieces: Piece,
        sampling: SamplingConfig | None = None,
        priority: int = 0,
        stream: bool = False,
        cache_salt: str = "",
        background_share: float = 1.0,
        drafts: DraftSources | None = None,
        share: TenantShare = ALONE,
    ) -> Answer:
        answer = Answer()
        self.num_orders += 1
        order = EngineRequest(
            self.num_orders,
            pieces,
            priority,
            sampling,
            stream,
            cache_salt,
            background_share,
            drafts=drafts or DraftSources(),
            share=share,
        )
        self.core.requests.submit(order, answer)
        self.deliver()
        return answer

    def fill(self, *pieces: Piece, priority: int = 0, **options: Any) -> Answer:
        return self.submit(*pieces, priority=priority, **options)

    def generate(
        self,
        *pieces: Piece,
        length: int = 4,
        priority: int = 0,
        stream: bool = False,
        drafts: DraftSources | None = None,
        share: TenantShare = ALONE,
        **sampling: Any,
    ) -> Answer:
        wanted = SamplingConfig(max_gen_length=length, **sampling)
        return self.submit(
            *pieces,
            sampling=wanted,
            priority=priority,
            stream=stream,
            drafts=drafts,
            share=share,
        )

    def embed(self, *texts: str, pooling: PoolingKind = "mean", priority: int = 0) -> Answer:
        return self._read(texts, priority=priority, pooling=pooling)

    def score(self, *texts: str, num_top: int = 0, priority: int = 0) -> Answer:
        return self._read(texts, priority=priority, num_scored=num_top)

    def _read(self, texts: Sequence[str], **wanted: Any) -> Answer:
        answer = Answer()
        self.num_orders += 1
        ids = range(-10 * self.num_orders, -10 * self.num_orders - len(texts), -1)
        pieces = tuple(piece(i, text) for i, text in zip(ids, texts, strict=True))
        order = EngineRequest(self.num_orders, pieces, **wanted)
        self.core.requests.submit(order, answer)
        self.deliver()
        return answer

    def free(self, *context_ids: int) -> int:
        num_tokens = self.core.requests.free(context_ids)
        self.deliver()
        return num_tokens

    def step(self) -> bool:
        ran = self.core.step()
        self.deliver()
        self.core.check_integrity()
        return ran

    def run(self, max_steps: int = 500) -> int:
        """Run steps until no work is left. Returns their number."""
        for num_steps in range(max_steps):
            if not self.step():
                assert not self.core.has_work, "work is left, but the core runs no step"
                return num_steps
        raise AssertionError(f"not done after {max_steps} steps")

    def deliver(self) -> None:
        for call, argument in self.core.requests.outbox.take():
            call(argument)

    @property
    def num_free(self) -> int:
        return self.core.runtime_info().num_free_blocks

    @property
    def last_plan(self) -> StepPlan:
        return self.runner.plans[-1]
