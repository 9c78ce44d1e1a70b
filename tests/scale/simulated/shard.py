"""Simulate a period of one ServeCore with its engines, in virtual time."""

import asyncio
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import TypeVar

from parrot.engine.config import SimConfig
from parrot.journal.replay import restore
from parrot.protocol.engine_api import EngineInfo, RegisterRequest
from parrot.protocol.engine_client import EngineClient
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig, TenantQuota
from parrot.serve.core import ServeCore
from parrot.serve.events import Sink, TaskEnded
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.simulation import PATIENT, LoopClock, run_virtual
from parrot.utils.clock import Clock
from parrot.utils.collector import bounded_collections
from tests.scale.simulated.engine import Counts, ModelledEngine, engine_info
from tests.scale.simulated.journal import MemoryStorage, VirtualJournal
from tests.scale.simulated.programs import Call, Client, Job
from tests.scale.simulated.stages import MODEL, Stages
from tests.scale.simulated.traffic import Start

T = TypeVar("T")

_BEAT_S = 1.0  # Heartbeat interval of engines that know a standby ServeCore.
_LATER_ID = 2**40  # First session ID of a ServeCore that takes over.
SCHEDULER = GlobalSchedulerConfig(max_queue_size=10**6)
CORE: CoreConfig = PATIENT.model_copy(
    update={
        "global_scheduler": SCHEDULER,
        "tenant_quota": TenantQuota(calls=2**40, variables=2**40, text_bytes=2**40),
    }
)


@dataclass(frozen=True, slots=True)
class Window:
    """The measured period, from `warm_up_s` to `end_s`."""

    warm_up_s: float
    end_s: float
    num_killed: int = 0  # engines that die at `warm_up_s`


@dataclass(slots=True)
class State:
    """The state of a shard at one moment."""

    counts: list[Counts]
    busy_s: list[float]
    held: list[float]  # share of each engine's blocks that contexts hold
    sessions: int
    core_s: float  # CPU seconds of ServeCore until now
    journal: tuple[int, int]  # bytes of live sessions' records, and of all records ever written


@dataclass
class Outcome:
    """What happened in a window. With a single window, `calls` and `jobs` are all calls and jobs of
    the run. With several, each window has the calls that ended and the jobs that began in it."""

    window: Window
    calls: list[Call] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)  # of each engine
    busy_s: list[float] = field(default_factory=list)  # of each engine
    most_queued: int = 0
    late: int = 0  # calls that were still running at the end of the window
    core_s: float = 0.0  # CPU seconds of ServeCore
    written: int = 0  # bytes written to the journal
    ends: list[State] = field(default_factory=list)  # of each shard, at the end of the window


class _Ends:
    """Records the end of each call. Ignores calls that ServeCore's death cancels: they continue at
    its successor."""

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard

    @property
    def sink(self) -> Sink:
        return {TaskEnded: self._ended}

    def _ended(self, event: TaskEnded) -> None:
        session, task = event
        if not self._shard.client.serves.is_set():
            return
        call = self._shard.client.calls.get((session.id, task.request_id))
        if call is None or not isinstance(task, Completion):
            return
        stats, times = task.stats, task.times
        call.num_ends += 1
        call.ended = self._shard.clock.now()
        call.is_done = task.state is CompletionState.DONE
        call.attempts, call.cached = stats.attempts, stats.cached_tokens
        call.computed = stats.computed_tokens
        if times.started is not None and times.ready is not None:
            call.waited_s = times.started - times.ready


class Shard:
    """One ServeCore with its engines. Must be created in a running virtual loop. `stages` measure
    the CPU time of ServeCore."""

    def __init__(
        self, config: SimConfig, *, stages: Stages | None = None, has_journal: bool = False
    ) -> None:
        self.clock = LoopClock()
        self.engines: dict[str, ModelledEngine] = {}
        self._config = config
        self._stages = stages
        self._storage = MemoryStorage() if has_journal else None
        self.core = self._new_core(0)
        self.client = Client(self.core)

    def _new_core(self, first_session_id: int) -> ServeCore:
        """Return a ServeCore that restores the sessions in the journal."""
        clock: Clock = self.clock
        if self._storage is not None:
            journal = VirtualJournal(self._storage, clock)
            clock = journal.clock
        core = ServeCore(
            CORE,
            clock=clock,
            dispatcher=Dispatcher(CORE, clock, self._connect),
            sinks=[_Ends(self).sink],
            first_session_id=first_session_id,
        )
        if self._storage is not None:
            restore(core, journal, {})
        return core

    async def add_engines(self, count: int) -> None:
        """Register `count` engines. Existing engines register again."""
        for number in range(count):
            info = engine_info(self._config, f"engine{number}")
            await self.core.register_engine(RegisterRequest(engine_config=info))

    async def take_over(self, down_s: float) -> None:
        """End ServeCore and its running calls. `down_s` seconds later, start another ServeCore that
        restores the sessions from the journal. The engines register one heartbeat later."""
        self.client.serves.clear()
        await self.core.close()
        for engine in self.engines.values():
            engine.forget()
        await asyncio.sleep(down_s)
        self.core = self.client.core = self._new_core(_LATER_ID)
        self.client.serves.set()
        await asyncio.sleep(_BEAT_S)
        await self.add_engines(len(self.engines))

    def kill(self, count: int) -> None:
        for name in list(self.engines)[:count]:
            self.engines[name].kill()

    async def run(
        self,
        starts: Iterable[Start],
        windows: Sequence[Window],
        begin: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Run the sessions and measure consecutive windows. `begin` is called at the beginning of
        the first window."""
        loop, states = asyncio.get_running_loop(), list[State]()
        marks = [windows[0].warm_up_s, *(window.end_s for window in windows)]
        outcomes = [Outcome(window) for window in windows]
        for mark in marks[:-1]:
            loop.call_at(mark, lambda: states.append(self._state()))
        loop.call_at(marks[0], begin)
        feeding = asyncio.ensure_future(self._feed(starts))
        try:
            while (now := loop.time()) < marks[-1]:
                await asyncio.sleep(min(1.0, marks[-1] - now))
                last = outcomes[max(0, bisect_left(marks, loop.time()) - 1)]
                last.most_queued = max(last.most_queued, self.core.num_queued)
                if feeding.done():
                    feeding.result()  # raises the error, if any
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        states.append(self._state())
        return self._counted(outcomes, marks, states)

    async def close(self) -> None:
        await self.core.close()

    def check_integrity(self) -> None:
        self.core.check_integrity()
        for engine in self.engines.values():
            engine.pool.check_integrity()

    async def _feed(self, starts: Iterable[Start]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.TaskGroup() as programs:
            for start in starts:
                if start.at > loop.time():
                    await asyncio.sleep(start.at - loop.time())
                programs.create_task(self.client.run(start))

    def _connect(self, info: EngineInfo) -> EngineClient:
        name = info.engine_name
        if name not in self.engines:
            self.engines[name] = ModelledEngine(self._config)
        return self.engines[name]

    def _state(self) -> State:
        engines, storage = list(self.engines.values()), self._storage
        return State(
            [replace(engine.counts) for engine in engines],
            [engine.device.busy_s for engine in engines],
            [1.0 - engine.pool.num_free / engine.pool.num_blocks for engine in engines],
            len(self.core.sessions),
            0.0 if self._stages is None else time.thread_time() - self._stages.seconds[MODEL],
            (0, 0) if storage is None else (storage.num_bytes, storage.num_written),
        )

    def _counted(
        self, outcomes: list[Outcome], marks: Sequence[float], states: Sequence[State]
    ) -> list[Outcome]:
        def outcome_at(when: float | None) -> Outcome:
            place = len(outcomes) if when is None else bisect_right(marks, when) - 1
            return outcomes[min(max(0, place), len(outcomes) - 1)]

        for call in self.client.calls.values():
            outcome_at(call.ended).calls.append(call)
        for job in self.client.jobs:
            outcome_at(job.began).jobs.append(job)
        for outcome, (old, new) in zip(outcomes, pairwise(states), strict=True):
            outcome.counts = list(map(_difference, old.counts, new.counts))
            outcome.busy_s = [after - s for s, after in zip(old.busy_s, new.busy_s, strict=True)]
            outcome.core_s = new.core_s - old.core_s
            outcome.written = new.journal[1] - old.journal[1]
            outcome.ends = [new]
        submitted = sorted(call.submitted for call in self.client.calls.values())
        ended = sorted(c.ended for c in self.client.calls.values() if c.ended is not None)
        for outcome in outcomes:
            end_s = outcome.window.end_s
            outcome.late = bisect_left(submitted, end_s) - bisect_left(ended, end_s)
        return outcomes


def _difference(old: Counts, new: Counts) -> Counts:
    return Counts(
        new.cached - old.cached,
        new.computed - old.computed,
        new.output - old.output,
        new.requests - old.requests,
    )


def simulate(
    config: SimConfig, num_engines: int, starts: Iterable[Start], window: Window
) -> Outcome:
    """Run one ServeCore for a window, and check its integrity at the end."""

    async def main() -> Outcome:
        shard = Shard(config)
        await shard.add_engines(num_engines)
        kill = partial(shard.kill, window.num_killed)
        (outcome,) = await shard.run(starts, [window], kill)
        return await _ended(shard, outcome)

    return run_virtual(main())


def simulate_on(
    config: SimConfig,
    num_engines: int,
    starts: Iterable[Start],
    marks: Sequence[float],
    down_s: float = 0.0,
) -> list[Outcome]:
    """Run one ServeCore with a journal, and measure its CPU time. Returns the outcome between each
    two consecutive marks. Unless `down_s` is 0, ServeCore dies at the first mark and a successor
    takes over `down_s` seconds later."""
    windows = [Window(begin, end) for begin, end in pairwise(marks)]

    async def main() -> list[Outcome]:
        stages, takeovers = Stages(), list[asyncio.Task[None]]()
        with bounded_collections(), stages.counted():
            shard = Shard(config, stages=stages, has_journal=True)
            await shard.add_engines(num_engines)

            def begin() -> None:
                if down_s:
                    takeovers.append(asyncio.create_task(shard.take_over(down_s)))

            found = await shard.run(starts, windows, begin)
            await asyncio.gather(*takeovers)
            return await _ended(shard, found)

    return run_virtual(main())


async def _ended(shard: Shard, found: T) -> T:
    shard.check_integrity()
    await shard.close()
    return found
