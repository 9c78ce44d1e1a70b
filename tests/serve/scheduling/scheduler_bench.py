"""A scheduler on virtual time, with tasks for tests."""

from itertools import count

from parrot.protocol.engine_api import StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    Objective,
    SemanticVariable,
    TokenizedText,
)
from parrot.serve.prompts.encode import PieceKind
from parrot.serve.prompts.segments import PrefixHasher, Segment
from parrot.serve.scheduling.load import Weigh
from parrot.serve.scheduling.scheduler import MakeOrder, MakePlacer, Scheduler
from parrot.serve.scheduling.task import CompletionTask
from tests.support.manual_clock import ManualClock
from tests.support.prompts import prefix_keys

HASHER = PrefixHasher(b"x" * 32)
LATENCY, THROUGHPUT = PerformanceCriteria.LATENCY, PerformanceCriteria.THROUGHPUT


class Bench:
    """A scheduler on virtual time."""

    def __init__(
        self,
        order: MakeOrder | None = None,
        placer: MakePlacer | None = None,
        weigh: Weigh = lambda tenant: 1.0,
        began: float = 0.0,
        **config: object,
    ) -> None:
        self.clock = ManualClock(began)
        self.index = PrefixIndex()
        self.scheduler = Scheduler(
            GlobalSchedulerConfig.model_validate(config),
            self.clock,
            self.index,
            order,
            placer,
            weigh,
        )
        self._ids = count()

    def engines(
        self,
        number: int,
        *,
        slots: int = 100,
        tokens: int = 1_000_000,
        model: str = "m",
        max_len: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        for _ in range(number):
            self.scheduler.engines.add(next(self._ids), model, slots, tokens, max_len, costs)

    def task(
        self,
        text: str | None = None,
        *,
        session: int = 1,
        criteria: PerformanceCriteria = LATENCY,
        path: float = 0.0,
        group: str | None = None,
        output: int = 100,
        models: tuple[str, ...] = (),
        prefix_len: int = 10,
        own_len: int = 1,
        tenant: str = "",
        depth: int = 0,
    ) -> CompletionTask:
        """A task whose prompt has `prefix_len` tokens of the constant `text` and `own_len` own
        tokens."""
        number = next(self._ids)
        text = f"own {number}" if text is None else text
        completion = Completion(
            id=number,
            request_id=number,
            session_id=session,
            options=CallOptions("f", models=models, tenant=tenant),
            fill=(),
            output=SemanticVariable(str(number), "v", session),
            sampling=SamplingConfig(max_gen_length=output),
            objective=Objective(criteria, depth, path, group),
        )
        tokens = TokenizedText("t", tuple(range(prefix_len)))
        segments = [
            Segment(PieceKind.CONSTANT, text, tokens),
            Segment(PieceKind.VALUE, str(number), TokenizedText("t", (1,) * own_len), True),
        ]
        keys = prefix_keys(HASHER, "tenant", False, segments)
        return CompletionTask(
            completion,
            segments,
            keys,
            self.clock.now(),
            expected_output=completion.sampling.max_gen_length // 2 + 1,
        )

    def add(self, *tasks: CompletionTask) -> None:
        for task in tasks:
            self.scheduler.add(task)

    def run(self) -> dict[CompletionTask, int]:
        placements = self.scheduler.schedule()
        self.scheduler.check_integrity()
        return {placement.task: placement.engine_id for placement in placements}

    def order(self) -> list[CompletionTask]:
        """Let tasks run one at a time until none is queued."""
        done: list[CompletionTask] = []
        while self.scheduler.num_queued:
            for task, engine_id in self.run().items():
                done.append(task)
                self.scheduler.finished(task, engine_id)
        return done

    def later(self, seconds: float) -> None:
        self.clock._now += seconds
