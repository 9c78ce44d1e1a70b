"""Tasks whose models nobody serves wait for an engine, but not for ever."""

from collections.abc import Callable

from parrot.serve.scheduling.load_index import Models
from parrot.utils.timers import Timer, TimerQueue


class Grace:
    """`on_end` is called with models that nobody came to serve for `grace_s` seconds, and since
    when. It fails the tasks that wait since then; it returns since when the others do, if any."""

    def __init__(
        self, timers: TimerQueue, grace_s: float, on_end: Callable[[Models, float], float | None]
    ) -> None:
        self._timers = timers
        self._grace_s = grace_s
        self._on_end = on_end
        self._pending: dict[Models, Timer] = {}

    def give(self, models: Models, since: float) -> None:
        """Nobody serves these models. No effect if that is known."""
        if models not in self._pending:
            self._pending[models] = self._timers.call_at(
                since + self._grace_s, lambda: self._end(models, since)
            )

    def end(self, is_served: Callable[[Models], bool]) -> None:
        """An engine has come: forget what is served now."""
        for models in [models for models in self._pending if is_served(models)]:
            self._pending.pop(models).cancel()

    def _end(self, models: Models, since: float) -> None:
        del self._pending[models]
        later = self._on_end(models, since)
        if later is not None:
            self.give(models, later)
