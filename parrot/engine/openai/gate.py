"""Bounded concurrency with priorities."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import count


class PriorityGate:
    """At most `limit` are inside. Who waits enters by priority (lower first), then by arrival."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._arrivals = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.num_inside = 0

    @asynccontextmanager
    async def pass_through(self, priority: int) -> AsyncIterator[None]:
        await self._enter(priority)
        try:
            yield
        finally:
            self._leave()

    async def _enter(self, priority: int) -> None:
        if self.num_inside < self._limit:
            self.num_inside += 1
            return
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        """Give the place to the first who still waits for one."""
        while self._waiting:
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                admitted.set_result(None)
                return
        self.num_inside -= 1
