"""Refuses requests of a ServeCore that this engine does not obey any more."""

from collections import OrderedDict

from fastapi import Request

from parrot.protocol.engine_api import JobRequest
from parrot.protocol.engine_client import CORE_HEADER, REGISTRATION_HEADER, CoreIdentity
from parrot.protocol.errors import Cancelled, StaleCore
from parrot.utils.ids import new_token

_MAX_CALLS = 65_536  # that were tried again, whose attempts are known


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
