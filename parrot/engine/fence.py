"""Refuses requests of a ServeCore that this engine does not obey any more."""

from fastapi import Request

from parrot.protocol.engine_client import CORE_HEADER, CoreIdentity
from parrot.protocol.errors import StaleCore


class Fence:
    """Knows whom the engine obeys: the ServeCore that it registered with last. While it registers,
    the next one may be sooner with a request than with its answer, so a later one is let in, too.
    Requests that name no ServeCore are let in always."""

    def __init__(self) -> None:
        self._owner: CoreIdentity | None = None
        self._is_registered = False

    def registered(self, owner: CoreIdentity) -> None:
        self._owner, self._is_registered = owner, True

    def released(self) -> None:
        """It registers again."""
        self._is_registered = False

    def check(self, request: Request) -> None:
        """Raise `StaleCore` if it comes from a ServeCore that is not obeyed."""
        if named := request.headers.get(CORE_HEADER):
            self.admit(CoreIdentity.parse(named))

    def admit(self, asking: CoreIdentity) -> None:
        """Raise `StaleCore` if it is not obeyed."""
        owner = self._owner
        if owner is None or asking == owner:
            return
        if self._is_registered or asking.epoch <= owner.epoch:
            raise StaleCore("this engine belongs to another ServeCore, or a later start of it")
