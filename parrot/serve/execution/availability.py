"""Whether anybody serves a run: engines that are to get no more calls, and how long a run waits
for an engine with its models."""

from collections.abc import Callable

from parrot.protocol.errors import NotFound
from parrot.serve.execution.events import EventKind
from parrot.serve.execution.fleet import Fleet
from parrot.serve.execution.run import Run, RunState
from parrot.serve.scheduling.load_index import Models
from parrot.serve.scheduling.scheduler import Scheduler
from parrot.utils.clock import Clock
from parrot.utils.timers import Timer, TimerQueue


class Grace:
    """Calls `give_up` with every queued run whose models nobody has served for `grace_s` seconds,
    since it was queued and since the last engine with them was seen."""

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
        self._pending: dict[Models, Timer] = {}

    def queued(self, models: Models, now: float) -> None:
        """A run with these models was queued."""
        if not self._scheduler.engines.num_members(models):
            self._give(models, now)

    def engine_joined(self) -> None:
        for models in [m for m in self._pending if self._scheduler.engines.num_members(m)]:
            self._pending.pop(models).cancel()

    def engine_lost(self, last_seen: float) -> None:
        for models in self._scheduler.unserved():
            self._give(models, last_seen)

    def _give(self, models: Models, since: float) -> None:
        """Nobody has served these models since then. No effect if that is known."""
        if models not in self._pending:
            self._pending[models] = self._timers.call_at(
                since + self._grace_s, lambda: self._end(models, since)
            )

    def _end(self, models: Models, since: float) -> None:
        del self._pending[models]
        later: list[float] = []
        for run in self._scheduler.queued(models):
            assert isinstance(run, Run), run
            if run.state is not RunState.QUEUED:
                continue  # withdrawn when one before it failed
            if run.arrived > since:
                later.append(run.arrived)
            else:
                self._give_up(run)
        if later:
            self._give(models, min(later))


class Drains:
    """Takes engines out of service and back. An engine that drains goes on with the calls that it
    has; for others it is as if it were not there."""

    def __init__(
        self,
        clock: Clock,
        fleet: Fleet,
        scheduler: Scheduler,
        grace: Grace,
        wake: Callable[[], None],
    ) -> None:
        self._clock = clock
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
        kind = EventKind.ENGINE_DRAINS if is_wanted else EventKind.ENGINE_RESUMED
        text = f"{load.num_tasks} {'call' if load.num_tasks == 1 else 'calls'} there"
        self._fleet.events.add(kind, text, engine_name=engine.info.engine_name)
        self._wake()
