"""The ServeCores that an engine works for, and whose a request is."""

from collections.abc import Iterator
from contextlib import AbstractAsyncContextManager, nullcontext

from fastapi import Request

from parrot.engine.channels import Channels
from parrot.engine.fence import Fence
from parrot.engine.owners.owned import OwnedService
from parrot.engine.owners.share import Share, shares
from parrot.engine.reorder import ReorderBuffer
from parrot.engine.service import EngineService, Namespace
from parrot.protocol.engine_api import GenerateRequest
from parrot.protocol.engine_client import REGISTRATION_HEADER
from parrot.protocol.errors import StaleCore


class Owner:
    """All that an engine has of one ServeCore: the registration, the requests, the contexts."""

    def __init__(
        self, service: EngineService, reorder: ReorderBuffer, share: Share | None = None
    ) -> None:
        """`share`: its part of an engine that others have, too; None: all."""
        self.service = service
        self.reorder = reorder
        self.share = share
        self.fence = Fence()
        self.channels = Channels()

    def place(self, request: GenerateRequest) -> AbstractAsyncContextManager[None]:
        """See `Share.place`."""
        return nullcontext() if self.share is None else self.share.place(request)


class Owners:
    """They share nothing but the engine: its contexts are numbered by each for itself, channels are
    named by each for itself, and nobody's end, or refusal, is another's."""

    def __init__(self, service: EngineService, reorder: ReorderBuffer, count: int = 1) -> None:
        """`reorder`: that of the first."""
        if count == 1:
            self._owners = [Owner(service, reorder)]
            return
        buffers = [reorder, *(reorder.another() for _ in range(count - 1))]
        self._owners = [
            Owner(OwnedService(service, Namespace(index, count), share), buffers[index], share)
            for index, share in enumerate(shares(count))
        ]

    def __iter__(self) -> Iterator[Owner]:
        return iter(self._owners)

    def check(self, request: Request) -> None:
        """Raise `StaleCore` if it comes from a ServeCore that is not obeyed, or any more."""
        if len(self._owners) == 1 or REGISTRATION_HEADER in request.headers:
            self.owner(request)

    def owner(self, request: Request) -> Owner:
        """Whose it is. Raises `StaleCore` as `check`, and where several share the engine also if it
        does not say."""
        owner = self._owners[0]
        if len(self._owners) > 1:
            owner = self._named(request.headers.get(REGISTRATION_HEADER))
        owner.fence.check(request)
        return owner

    def _named(self, registration: str | None) -> Owner:
        if not registration:
            raise StaleCore("several ServeCores share this engine: name your registration")
        for owner in self._owners:
            if owner.fence.registration == registration:
                return owner
        raise StaleCore("this engine has registered anew since, or is about to")

    @property
    def num_beyond(self) -> int:
        """Calls that were more than their ServeCores' leases allowed."""
        return sum(owner.share.num_waited for owner in self._owners if owner.share is not None)

    def close_channels(self) -> None:
        for owner in self._owners:
            owner.channels.close()
