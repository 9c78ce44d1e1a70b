"""Whether anybody serves a run: engines that are to get no more calls, how long a run waits for an
engine with its models, and for those that come back."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from parrot.protocol.engine_api import LeaveRequest, LeaveResponse
from parrot.protocol.errors import NotFound
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.events import EngineDrained, Events
from parrot.serve.execution.fleet import Engine, Fleet
from parrot.serve.execution.run import Run, RunState
from parrot.serve.graph.nodes import Completion
from parrot.serve.scheduling.load import Models
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.tasks import Backlog
from parrot.utils.timers import Timer, TimerQueue

_GATHER_S = 3.0  # a heartbeat
_MAX_KEYS = 8192  # of an engine: some milliseconds
_MAX_LEFT = 65_536  # of all


class Grace:
    """Calls `give_up` with every queued run whose models nobody has served for `grace_s` seconds,
    since it was queued and since the last engine with them was lost, which may be back soon."""

    def __init__(
        self,
        timers: TimerQueue,
        grace_s: float,
        scheduler: Scheduler,
        give_up: Callable[[Run], None],
    ) -> None:
        self._timers = timers
        self._grace_s = grace_s
        self._scheduler = scheduler
        self._give_up = give_up
        self._backlog = Backlog()
        self._pending: dict[Models, Timer] = {}

    def queued(self, models: Models, now: float) -> None:
        """A run with these models was queued."""
        if not self._scheduler.engines.num_members(models):
            self._give(models, now)

    def engine_joined(self) -> None:
        for models in [m for m in self._pending if self._scheduler.engines.num_members(m)]:
            self._pending.pop(models).cancel()

    def engine_lost(self, now: float) -> None:
        for models in self._scheduler.queues:
            if not self._scheduler.engines.num_members(models):
                self._give(models, now)

    def _give(self, models: Models, since: float) -> None:
        """Nobody has served these models since then. No effect if that is known."""
        if models not in self._pending:
            self._pending[models] = self._timers.call_at(
                since + self._grace_s, lambda: self._end(models, since)
            )

    def _end(self, models: Models, since: float) -> None:
        del self._pending[models]
        self._backlog.add(models, self._ending(models, since))

    def _ending(self, models: Models, since: float) -> Iterator[int]:
        later: list[float] = []
        for run in self._scheduler.queued(models):
            assert isinstance(run, Run), run
            if self._scheduler.engines.num_members(models):
                return  # an engine has joined meanwhile
            if run.state is not RunState.QUEUED:
                continue  # withdrawn when one before it failed
            if run.arrived > since:
                later.append(run.arrived)
            else:
                size = len(run.waiters)
                self._give_up(run)
                yield size
        if later:
            self._give(models, min(later))


class Returns:
    """Engines that come back: they have freed their contexts, but are believed to have cached what
    was in them. So calls are placed there.

    After a restart of ServeCore, calls wait for the engines that they ran on, since all would go to
    the first that joins; but not for long after that."""

    def __init__(self, clock: Clock, index: PrefixIndex) -> None:
        self._clock = clock
        self._index = index
        self._engines: dict[str, Engine] = {}  # by name
        self._live: set[int] = set()  # the ids of all
        self._left: LruDict[str, list[bytes]] = LruDict(_MAX_LEFT, weigh=len)  # by incarnation
        self._awaited: dict[str, list[bytes]] = {}  # prompts, by the names of absent engines
        self._end: float | None = None  # of waiting
        self._begin = clock.now()

    def lost(self, engine: Engine, keys: Sequence[bytes]) -> None:
        """An engine is gone whose contexts had the prompts of these keys, the latest last."""
        self._live.discard(engine.id)
        name, incarnation = engine.info.engine_name, engine.info.incarnation
        before = self._left.peek(incarnation) or []
        self._left.put(incarnation, list(dict.fromkeys([*before, *keys]))[-_MAX_KEYS:])
        if self._engines.get(name) is engine:
            del self._engines[name]

    def joined(self, engine: Engine) -> None:
        if self._end is None:
            self._end = self._clock.now() + _GATHER_S
        self._engines[engine.info.engine_name] = engine
        self._live.add(engine.id)
        had = self._left.get(engine.info.incarnation) or []
        had = had + self._awaited.pop(engine.info.engine_name, [])
        self._index.remember(engine.id, had, self._live)

    def queued(self, run: Run) -> None:
        """A run is queued. Before a restart its call may have been placed, or the one that it goes
        on from: so an agent that thought meanwhile finds its KV."""
        name = run.stats.engine_name or self._placed_before(run.completion)
        if name is None:
            return
        if (engine := self._engines.get(name)) is not None:
            self._index.remember(engine.id, run.keys, self._live)
        elif self._end is None or self._clock.now() < self._end:
            awaited = self._awaited.setdefault(name, [])
            awaited += run.keys[: _MAX_KEYS - len(awaited)]

    def _placed_before(self, completion: Completion) -> str | None:
        """The engine of the last call whose output is in the prompt, if it was before a restart:
        what has run since is in the ledger."""
        for variable in reversed(completion.inputs):
            if isinstance(made_by := variable.producer, Completion):
                started = made_by.times.started
                is_before = started is not None and started <= self._begin
                return made_by.stats.engine_name if is_before else None
        return None

    def awaited_until(self) -> float | None:
        """When the calls will wait no longer; None: they do not wait now."""
        if self._end is None or not self._awaited:
            return None
        if self._clock.now() < self._end:
            return self._end
        self._awaited.clear()
        return None


class Drains:
    """Takes engines out of service and back. An engine that drains goes on with the calls that it
    has; for others it is as if it were not there. One that leaves drains, and is lost when it has
    no call left: who has taken one from it tells `review`."""

    def __init__(
        self,
        clock: Clock,
        timers: TimerQueue,
        fleet: Fleet,
        scheduler: Scheduler,
        grace: Grace,
        wake: Callable[[], None],
        events: Events,
    ) -> None:
        self._clock = clock
        self._events = events
        self._timers = timers
        self._leaving: dict[int, asyncio.Future[None]] = {}
        self._fleet = fleet
        self._scheduler = scheduler
        self._grace = grace
        self._wake = wake

    def drain(self, engine_id: int, *, is_wanted: bool) -> None:
        """Not `is_wanted`: give it calls again. Raises `NotFound`."""
        engine, load = self._fleet.get(engine_id), self._scheduler.engines.get(engine_id)
        if engine is None or load is None:
            raise NotFound(f"no live engine {engine_id}")
        if load.is_draining == is_wanted:
            return
        self._scheduler.engines.set_draining(load, is_wanted)
        if is_wanted:
            self._grace.engine_lost(self._clock.now())
        else:
            self._grace.engine_joined()
        self._events.emit(EngineDrained, engine.info, is_wanted, load.num_tasks)
        self._wake()

    async def engine_leaves(self, request: LeaveRequest) -> LeaveResponse:
        """Drain an engine that is about to end, and give it up when its last call has ended, or
        after the timeout: then those that it has run elsewhere. Raises `NotFound`."""
        engine_id = request.engine_id
        if request.core != self._fleet.identity.id:  # ids are another's
            raise NotFound(f"no live engine {engine_id}")
        self.drain(engine_id, is_wanted=True)
        engine = self._fleet.get(engine_id)
        assert engine is not None, request
        loop = asyncio.get_running_loop()
        over, left = loop.create_future(), self._leaving.setdefault(engine_id, loop.create_future())
        when = self._clock.now() + request.timeout_s
        timer = self._timers.call_at(when, partial(_settle, over))
        self.review()
        try:
            await asyncio.wait((left, over), return_when=asyncio.FIRST_COMPLETED)
            while engine.direct and not over.done():
                await asyncio.wait((*engine.direct, over), return_when=asyncio.FIRST_COMPLETED)
        finally:
            timer.cancel()
        num_calls = self._fleet.load(engine) if engine.is_alive else 0
        engine.is_unharmed = True
        self._fleet.lose(engine, "it ends")
        return LeaveResponse(num_calls=num_calls)

    def review(self) -> None:
        """Calls may have ended."""
        for engine_id in list(self._leaving):
            if not self._scheduler.engines.num_placed(engine_id):
                _settle(self._leaving.pop(engine_id))


def _settle(left: asyncio.Future[None]) -> None:
    if not left.done():
        left.set_result(None)
