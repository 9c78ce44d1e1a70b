"""Time as a parameter: code that waits or measures takes a `Clock`, so that tests need not
sleep."""

import asyncio
import time
from math import ceil
from typing import Protocol


class Clock(Protocol):
    def now(self) -> float:
        """Seconds on a monotonic scale with an arbitrary zero."""
        ...

    async def sleep(self, seconds: float) -> None: ...


class MonotonicClock:
    """The monotonic clock of the operating system."""

    now = staticmethod(time.monotonic)

    async def sleep(self, seconds: float) -> None:
        # Timers of uvloop round to whole milliseconds. A sleep that ended early would be repeated
        # up to 20 times.
        await asyncio.sleep(ceil(1e3 * seconds) / 1e3)
