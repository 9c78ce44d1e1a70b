"""Slots that owners take in turn. No owner can hold all of them."""

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager


class FairSlots:
    """A semaphore of `num_slots` slots that is fair to owners. An owner holds at most `num_slots`
    - 1 slots (or the only one), so other owners can always make progress. Waiting owners get slots
    in round-robin order. The requests of one owner are served in order."""

    def __init__(self, num_slots: int) -> None:
        self._num_free = num_slots
        self._share = max(1, num_slots - 1)
        self._held: Counter[Hashable] = Counter()
        self._waiting: OrderedDict[Hashable, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def slot(self, owner: Hashable) -> AsyncIterator[None]:
        """Wait for a slot and hold it during the block."""
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(granted)
        self._grant()
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():
                self._free(owner)
            else:
                self._forget(owner, granted)
            raise
        try:
            yield
        finally:
            self._free(owner)

    def _grant(self) -> None:
        """Give free slots to the next owners. An owner that gets a slot moves to the end."""
        while self._num_free and (owner := self._next_owner()) is not None:
            granted = self._waiting[owner].popleft()
            self._waiting.move_to_end(owner)
            if not self._waiting[owner]:
                del self._waiting[owner]
            if not granted.done():  # A done future was cancelled.
                self._num_free -= 1
                self._held[owner] += 1
                granted.set_result(None)

    def _next_owner(self) -> Hashable | None:
        owners = (owner for owner in self._waiting if self._held[owner] < self._share)
        return next(owners, None)

    def _free(self, owner: Hashable) -> None:
        self._num_free += 1
        self._held[owner] -= 1
        if not self._held[owner]:
            del self._held[owner]
        self._grant()

    def _forget(self, owner: Hashable, granted: "asyncio.Future[None]") -> None:
        queue = self._waiting.get(owner)
        if queue is not None and granted in queue:
            queue.remove(granted)
            if not queue:
                del self._waiting[owner]
