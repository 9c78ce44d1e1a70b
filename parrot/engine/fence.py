"""The requests that an engine lets in: of the ServeCore that it obeys, in the order in which they
were sent."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from fastapi import Request

from parrot.protocol.engine_api import NO_PARENT, FillPiece, GenerateRequest, JobRequest
from parrot.protocol.engine_client import CORE_HEADER, REGISTRATION_HEADER, CoreIdentity
from parrot.protocol.errors import Cancelled, StaleCore
from parrot.utils.clock import Clock
from parrot.utils.ids import new_token

_MAX_CALLS = 65_536  # that were tried again, whose attempts are known


GRACE_S = 5.0  # that a request waits for the one that names its parent
_Wanted = Sequence[FillPiece | GenerateRequest]


class Fence:
    """Knows whom the engine obeys: the ServeCore that it registered with last. While it registers,
    the next one may be sooner with a request than with its answer, so a later one is let in, too.
    What was sent under an earlier registration is refused, since nobody frees what it would make.
    Requests that name no ServeCore and no registration are let in always.

    `era` counts registrations: what came before one and is handed in after it is refused, too.
    `registration`: the name of the one that has begun; empty: none."""

    def __init__(self) -> None:
        self.era = 0
        self._attempts: OrderedDict[tuple[int, int], int] = (
            OrderedDict()
        )  # the latest, if not the first
        self._owner: CoreIdentity | None = None
        self._is_registered = False
        self.registration = ""

    def registering(self) -> str:
        """Name the registration that begins now."""
        self.registration = new_token()
        return self.registration

    def registered(self, owner: CoreIdentity) -> None:
        self._owner, self._is_registered = owner, True

    def released(self) -> None:
        """It registers again."""
        self._is_registered, self.registration = False, ""
        self.era += 1
        self._attempts.clear()

    def check(self, request: Request) -> None:
        """Raise `StaleCore` if it comes from a ServeCore that is not obeyed, or any more."""
        if named := request.headers.get(CORE_HEADER):
            self.admit(CoreIdentity.parse(named))
        if request.headers.get(REGISTRATION_HEADER, self.registration) != self.registration:
            raise StaleCore("this engine has registered anew since, or is about to")

    def admit(self, asking: CoreIdentity) -> None:
        """Raise `StaleCore` if it is not obeyed."""
        owner = self._owner
        if owner is None or asking == owner:
            return
        if self._is_registered or asking.epoch <= owner.epoch:
            raise StaleCore("this engine belongs to another ServeCore, or a later start of it")

    def hand_in(self, request: JobRequest, era: int) -> None:
        """Raise `StaleCore` if the engine has begun to register again since that `era`, and
        `Cancelled` if a later attempt of the call has come."""
        if era != self.era:
            raise StaleCore("this engine has registered anew since the request came")
        if not request.attempt:
            return
        call = request.session_id, request.task_id
        latest = self._attempts.get(call, 0)
        if request.attempt < latest:
            raise Cancelled(f"attempt {request.attempt} comes after attempt {latest} of the call")
        if request.attempt == 1:
            return  # no earlier one can come
        self._attempts[call] = request.attempt
        self._attempts.move_to_end(call)
        if len(self._attempts) > _MAX_CALLS:
            self._attempts.popitem(last=False)


class ReorderBuffer:
    """Puts requests back in the order in which they were sent, as far as it matters. Requests on
    different connections overtake each other, and in two cases that would do harm: a fork that
    comes before the request that creates its parent would be refused, and a free that comes before
    the request that creates what it frees would leave a context that nobody frees again.

    It knows which contexts requests have named so far. Only a hint: what a context really is, the
    engine knows."""

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
