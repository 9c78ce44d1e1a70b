"""Runs whose models nobody serves wait for an engine, but not for ever."""

from collections.abc import Callable

from parrot.serve.execution.run import Run, RunState
from parrot.serve.scheduling.load_index import Models
from parrot.serve.scheduling.scheduler import Scheduler
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
