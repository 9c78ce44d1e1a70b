"""Time, as it was when a record was made."""

from parrot.utils.clock import Clock


class ReplayClock:
    """A clock that shows, while records are replayed, when they were made."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._then: float | None = None

    def now(self) -> float:
        return self._clock.now() if self._then is None else self._then

    async def sleep(self, seconds: float) -> None:
        await self._clock.sleep(seconds)

    def show(self, seconds_ago: float | None) -> None:
        """None: the time that it is."""
        self._then = None
        if seconds_ago is not None:
            self._then = self._clock.now() - max(0.0, seconds_ago)
