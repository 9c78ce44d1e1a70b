"""Time, as it was when a record was made."""

from collections.abc import Callable

from parrot.utils.clock import Clock


class ReplayClock:
    """A clock that shows, while records are replayed, when they were made."""

    now: Callable[[], float]

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now, self.sleep = clock.now, clock.sleep

    def show(self, seconds_ago: float | None) -> None:
        """Stand still at the time `seconds_ago`; for None, show the clock's own again."""
        self.now = self._clock.now
        if seconds_ago is not None:
            then = self._clock.now() - max(0.0, seconds_ago)
            self.now = lambda: then
