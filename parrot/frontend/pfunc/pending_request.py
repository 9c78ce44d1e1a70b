"""A request that is not sent yet. Other requests may depend on it."""

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
        """Set when the request was sent or dropped."""

    @property
    def is_open(self) -> bool:
        return self._sending is None and self._error is None

    def drop(self, error: ParrotError) -> None:
        """Drop the request if it was not sent. Later `send` calls raise the error."""
        if self.is_open:
            self._error = error
            self.sent.set()

    async def send(self) -> None:
        """Send the request once and wait for it. Each call raises the request's error. Cancelling
        the caller does not cancel the request."""
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
