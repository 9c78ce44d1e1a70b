"""How much of a request's body is read."""

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.errors import PayloadTooLarge
from parrot.protocol.gate.answer import ErrorForm, error_response


class BodyLimit:
    """Refuses bodies over the limit with our own error (FastAPI's `max_body_size` answers in plain
    text). A body of declared length is read and dropped first, within bounds: a client that is
    still sending would see a reset, not the answer. A body of undeclared length is counted."""

    _MAX_DISCARDED = 256 * 2**20

    def __init__(self, app: ASGIApp, max_body_size: int, error_form: ErrorForm) -> None:
        self._app = app
        self._max_body_size = max_body_size
        self._error_form = error_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        declared = next((v for k, v in scope["headers"] if k == b"content-length"), None)
        if declared is None:
            await self._app(scope, self._counting(receive), send)
        elif declared.isdigit() and int(declared) <= self._max_body_size:
            await self._app(scope, receive, send)
        else:
            await self._discard_body(receive)
            response = error_response(Request(scope), self._error(), self._error_form)
            await response(scope, receive, send)

    def _error(self) -> PayloadTooLarge:
        return PayloadTooLarge(f"the request body exceeds {self._max_body_size} bytes")

    def _counting(self, receive: Receive) -> Receive:
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._max_body_size:
                raise self._error()
            return message

        return counted

    async def _discard_body(self, receive: Receive) -> None:
        discarded = 0
        while discarded < self._MAX_DISCARDED:
            message = await receive()
            discarded += len(message.get("body", b""))
            if not message.get("more_body", False):
                return
