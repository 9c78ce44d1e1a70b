"""One ServeCore with its engines, in virtual time: a window of its day."""

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

_BEAT_S = 1.0  # of engines that know of a standby
_LATER_ID = 2**40  # of the first session of a ServeCore that takes over
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


@dataclass(slots=True)
class State:
    """What there is at a moment. `held`: the part of each engine's blocks that contexts have;
    `core_s`: CPU seconds of ServeCore until now; `journal`: bytes of live sessions' records, and of
    all that were ever written."""

    counts: list[Counts]
    busy_s: list[float]
    held: list[float]
    sessions: int
    core_s: float
    journal: tuple[int, int]


@dataclass
class Outcome:
    """`calls` and `jobs`: all of them, or those that ended within one of several windows. `counts`,
    `busy_s`: of each engine, in what is counted; `core_s`, `written`: CPU seconds of ServeCore and
    bytes of its journal there. `late`: calls that had not ended when the window did. `ends`: what
    there was then, of each shard."""

    window: Window
    calls: list[Call] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    counts: list[Counts] = field(default_factory=list)
    busy_s: list[float] = field(default_factory=list)
    most_queued: int = 0
    late: int = 0
    core_s: float = 0.0
    written: int = 0
    ends: list[State] = field(default_factory=list)


class _Ends:
    """Notes the end of each call, unless it goes on elsewhere."""

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
    """Make it where a virtual loop runs. `stages` count its time, if they are given."""

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
        """One that goes on where the journal ends."""
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
        """Engines that are there register again."""
        for number in range(count):
            info = engine_info(self._config, f"engine{number}")
            await self.core.register_engine(RegisterRequest(engine_config=info))

    async def take_over(self, down_s: float) -> None:
        """ServeCore dies, and with it what runs. After so many seconds another one has its sessions
        from the journal, and a heartbeat later all engines."""
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
        """Some engines die."""
        for name in list(self.engines)[:count]:
            self.engines[name].kill()

    async def run(
        self,
        starts: Iterable[Start],
        windows: Sequence[Window],
        begin: Callable[[], None] = lambda: None,
    ) -> list[Outcome]:
        """Count windows that follow each other; `begin` is called when the first one begins."""
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
                    feeding.result()  # raises what failed
        finally:
            feeding.cancel()
            await asyncio.gather(feeding, return_exceptions=True)
        states.append(self._state())
        return self._counted(outcomes, marks, states)

    async def close(self) -> None:
        await self.core.close()

    def check_integrity(self) -> None:
        """Recount ServeCore's books, and the engines'."""
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
    """Run a window of one ServeCore, and recount everything at its end."""

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
    """Run one ServeCore with a journal, whose time is counted. Returns what became of it between
    each two marks. Unless `down_s` is 0, it dies at the first one, and another one serves so many
    seconds later."""
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
