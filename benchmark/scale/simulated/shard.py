"""One ServeCore with its engines, in virtual time: a window of its day."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from benchmark.scale.simulated.engine import Counts, ModelledEngine, engine_info
from benchmark.scale.simulated.programs import Call, Client, Job
from benchmark.scale.simulated.traffic import Start
from parrot.engine.config import SimConfig
from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.registration.payloads import RegisterRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig, TenantQuota
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import Completion, CompletionState, Task
from parrot.serve.observers import Observer
from parrot.serve.sessions import Session
from parrot.simulation import PATIENT, LoopClock, run_virtual

SCHEDULER = GlobalSchedulerConfig(max_queue_size=10**6)
CORE: CoreConfig = PATIENT.model_copy(
    update={
        "global_scheduler": SCHEDULER,
        "tenant_quota": TenantQuota(calls=2**40, variables=2**40, text_bytes=2**40),
    }
)


@dataclass(frozen=True, slots=True)
class Window:
    """Counted from `warm_up_s` to `end_s`. When it begins to count, `num_killed` engines die."""

    warm_up_s: float
    end_s: float
    num_killed: int = 0


@dataclass
class Outcome:
    """`calls` and `jobs`: all of them. `counts`, `busy_s`: of each engine, in what is counted.
    `late`: calls that had not ended when the window did."""

    window: Window
    calls: list[Call] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    most_queued: int = 0
    late: int = 0


class _Ends(Observer):
    """Notes the end of each call."""

    def __init__(self, find: Callable[[int, int], Call | None], clock: LoopClock) -> None:
        self._find = find
        self._clock = clock

    def task_finished(self, session: Session, task: Task) -> None:
        call = self._find(session.id, task.request_id)
        if call is None or not isinstance(task, Completion):
            return
        stats, times = task.stats, task.times
        call.num_ends += 1
        call.ended = self._clock.now()
        call.is_done = task.state is CompletionState.DONE
        call.attempts, call.cached = stats.attempts, stats.cached_tokens
        call.computed = stats.computed_tokens
        if times.started is not None and times.ready is not None:
            call.waited_s = times.started - times.ready


class Shard:
    """Make it where a virtual loop runs."""

    def __init__(self, config: SimConfig) -> None:
        self.clock = LoopClock()
        self.engines: dict[str, ModelledEngine] = {}
        self._config = config
        self._client: Client | None = None
        self.core = ServeCore(
            CORE,
            clock=self.clock,
            dispatcher=Dispatcher(CORE, self.clock, self._connect),
            observers=[_Ends(self._find, self.clock)],
        )
        self.client = self._client = Client(self.core)

    async def add_engines(self, count: int) -> None:
        for number in range(count):
            info = engine_info(self._config, f"engine{number}")
            await self.core.register_engine(RegisterRequest(engine_config=info))

    async def run(self, starts: Sequence[Start], window: Window) -> Outcome:
        loop, outcome = asyncio.get_running_loop(), Outcome(window)
        before: list[tuple[Counts, float]] = []
        loop.call_at(window.warm_up_s, lambda: before.extend(self._totals()))
        if window.num_killed:
            loop.call_at(window.warm_up_s, partial(self._kill, window.num_killed))
        programs = [asyncio.ensure_future(self.client.run(start)) for start in starts]
        try:
            while loop.time() < window.end_s:
                await asyncio.sleep(min(1.0, window.end_s - loop.time()))
                outcome.most_queued = max(outcome.most_queued, self.core.num_queued)
                for program in programs:
                    if program.done():
                        program.result()  # raises what failed
        finally:
            for program in programs:
                program.cancel()
            await asyncio.gather(*programs, return_exceptions=True)
        for (old, old_s), (new, new_s) in zip(before, self._totals(), strict=True):
            outcome.counts.append(_difference(old, new))
            outcome.busy_s.append(new_s - old_s)
        outcome.calls = list(self.client.calls.values())
        outcome.jobs = self.client.jobs
        outcome.late = sum(call.ended is None for call in outcome.calls)
        return outcome

    async def close(self) -> None:
        await self.core.close()

    def check_integrity(self) -> None:
        """Recount ServeCore's books, and the engines'."""
        self.core.check_integrity()
        for engine in self.engines.values():
            engine.pool.check_integrity()

    def _connect(self, info: EngineInfo) -> EngineClient:
        engine = ModelledEngine(self._config)
        self.engines[info.engine_name] = engine
        return engine

    def _find(self, session_id: int, request_id: int) -> Call | None:
        return None if self._client is None else self._client.calls.get((session_id, request_id))

    def _kill(self, count: int) -> None:
        for name in list(self.engines)[:count]:
            self.engines[name].kill()

    def _totals(self) -> list[tuple[Counts, float]]:
        return [
            (Counts(c.cached, c.computed, c.output, c.requests), engine.device.busy_s)
            for engine in self.engines.values()
            for c in [engine.counts]
        ]


def _difference(old: Counts, new: Counts) -> Counts:
    return Counts(
        new.cached - old.cached,
        new.computed - old.computed,
        new.output - old.output,
        new.requests - old.requests,
    )


def simulate(
    config: SimConfig, num_engines: int, starts: Sequence[Start], window: Window
) -> Outcome:
    """Run a window of one ServeCore, and recount everything at its end."""

    async def main() -> Outcome:
        shard = Shard(config)
        await shard.add_engines(num_engines)
        outcome = await shard.run(starts, window)
        shard.check_integrity()
        await shard.close()
        return outcome

    return run_virtual(main())
