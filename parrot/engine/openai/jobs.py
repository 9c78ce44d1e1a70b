"""The openai engine's account of one request, and the gate that bounds how many run."""

import asyncio
import heapq
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Generic, TypeVar

from parrot.engine.openai.contexts import Turn
from parrot.protocol.engine_api import StreamChunk
from parrot.protocol.errors import ParrotError

R = TypeVar("R")


@dataclass(eq=False)
class Job(Generic[R]):
    """One request. `error` is why it was aborted, if it was. The last of `chunks` is None."""

    turns: dict[int, Turn]
    chunks: "asyncio.Queue[StreamChunk | None]"
    task: "asyncio.Task[R]" = field(init=False)
    error: ParrotError | None = None

    async def result(self) -> R:
        try:
            return await self.task
        except asyncio.CancelledError:
            if self.error is not None:
                raise self.error from None
            raise


class PriorityGate:
    """At most `limit` are inside. Who waits enters by priority (lower first), then by arrival. The
    limit may be lowered: who is inside stays."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._arrivals = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.num_inside = 0

    @asynccontextmanager
    async def pass_through(self, priority: int) -> AsyncIterator[None]:
        if self.num_inside < self.limit:
            self.num_inside += 1
        else:
            await self._wait(priority)
        try:
            yield
        finally:
            self._leave()

    async def _wait(self, priority: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        """Give the place to the first who still waits for one, unless there are too many."""
        while self._waiting and self.num_inside <= self.limit:
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                admitted.set_result(None)
                return
        self.num_inside -= 1
