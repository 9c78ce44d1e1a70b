"""Time as a parameter: code that waits or measures takes a `Clock`, so that tests need not
sleep."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary zero."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """The monotonic clock of the operating system."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
