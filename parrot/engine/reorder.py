"""Puts requests back in the order in which they were sent, as far as it matters.

Requests on different connections overtake each other. Two cases would do harm: a fork that comes
before the request that creates its parent would be refused, and a free that comes before the
request that creates what it frees would leave a context that nobody frees again."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from parrot.protocol.engine_api import NO_PARENT, FillPiece, GenerateRequest
from parrot.protocol.errors import Cancelled
from parrot.utils.clock import Clock

GRACE_S = 5.0

_Wanted = Sequence[FillPiece | GenerateRequest]


class ReorderBuffer:
    """Which contexts requests have named so far. Only a hint: what a context really is, the engine
    knows."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: set[int] = set()
        self._awaited: dict[int, list[asyncio.Future[None]]] = {}
        self._freed_early: OrderedDict[int, float] = OrderedDict()

    async def enter(self, wanted: _Wanted) -> None:
        """Return when the parents have been named, at once if they have, or after `GRACE_S`. The
        caller must hand its request to the engine before it awaits anything else. Raises
        `Cancelled` for a context that was freed before it was named."""
        own = {piece.context_id for piece in wanted}
        for piece in wanted:
            parent = piece.parent_context_id
            if piece.context_id not in self._known and parent != NO_PARENT and parent not in own:
                await self._named(parent)
        new = own - self._known
        if self._freed_early:
            self._forget_old()
            if early := new & self._freed_early.keys():
                raise Cancelled(f"context {min(early)} was freed before this request arrived")
        self._known |= new
        for context_id in new & self._awaited.keys():
            for waiter in self._awaited[context_id]:
                if not waiter.done():
                    waiter.set_result(None)

    def free(self, context_ids: Sequence[int]) -> None:
        now = self._clock.now()
        for context_id in context_ids:
            if context_id in self._known:
                self._known.discard(context_id)
            else:
                self._freed_early[context_id] = now
        self._forget_old()

    def reset(self) -> None:
        """The next sender's ids have nothing to do with the last one's, whose requests wait no
        more."""
        self._known.clear()
        self._freed_early.clear()
        for waiters in self._awaited.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _named(self, context_id: int) -> None:
        if context_id in self._known:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._awaited.setdefault(context_id, [])
        waiters.append(waiter)
        grace = asyncio.ensure_future(self._clock.sleep(GRACE_S))
        try:
            await asyncio.wait((waiter, grace), return_when=asyncio.FIRST_COMPLETED)
        finally:
            grace.cancel()
            waiters.remove(waiter)
            if not waiters:
                self._awaited.pop(context_id, None)

    def _forget_old(self) -> None:
        oldest = self._clock.now() - GRACE_S
        while self._freed_early and next(iter(self._freed_early.values())) < oldest:
            self._freed_early.popitem(last=False)
