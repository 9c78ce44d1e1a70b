"""A clock that tests control."""

import asyncio

from parrot.utils.heaps import LazyHeap


class ManualClock:
    """Virtual time that moves only when `advance` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start
        self._sleepers: LazyHeap[asyncio.Future[None], float] = LazyHeap()

    def now(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        wake: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._sleepers.set(wake, self._now + seconds)
        try:
            await wake
        finally:
            self._sleepers.discard(wake)

    def pass_time(self, seconds: float) -> None:
        """Move the time without waking sleepers."""
        assert not self._sleepers
        self._now += seconds

    async def advance(self, seconds: float) -> None:
        """Move the time by `seconds`, and wake sleepers in the order of their wake-up times."""
        end = self._now + seconds
        await self._settle()
        while (first := self._sleepers.top()) is not None and first[0] <= end:
            self._now, wake = first
            self._sleepers.discard(wake)
            if not wake.done():
                wake.set_result(None)
            await self._settle()
        self._now = end

    async def stand_still(self, seconds: float) -> None:
        """Move the time as for a process that was suspended: all sleepers wake up late."""
        self._now += seconds
        for wake in list(self._sleepers.pop_until(self._now)):
            if not wake.done():
                wake.set_result(None)
        await self._settle()

    async def _settle(self) -> None:
        """Run all tasks that are ready before the time moves."""
        for _ in range(20):
            await asyncio.sleep(0)
