"""A request that has not been sent yet, and that other requests may need."""

import asyncio
from collections.abc import Awaitable, Callable

from parrot.protocol.errors import ParrotError


class PendingRequest:
    """Sends a request once. If it fails or is dropped, each `send` raises its error."""

    def __init__(self, post: Callable[[], Awaitable[None]]) -> None:
        self._post = post
        self._sending: asyncio.Task[None] | None = None
        self._error: ParrotError | None = None
        self.sent = asyncio.Event()
        """It is sent, or will not be."""

    @property
    def is_open(self) -> bool:
        return self._sending is None and self._error is None

    def drop(self, error: ParrotError) -> None:
        """It will not be sent any more: whoever wants its variables gets the error."""
        if self.is_open:
            self._error = error
            self.sent.set()

    async def send(self) -> None:
        """Raises what the request raises, every time. Cancelling it leaves the request alone."""
        if self.is_open:
            self._sending = asyncio.ensure_future(self._send())
        if self._sending is not None:
            await asyncio.shield(self._sending)
        if self._error is not None:
            raise self._error

    async def _send(self) -> None:
        try:
            await self._post()
        except ParrotError as error:
            self._error = error
        finally:
            self.sent.set()
