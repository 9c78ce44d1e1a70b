"""Limits of the bodies that are read."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.errors import AuthenticationFailed, Cancelled, PayloadTooLarge, Unavailable
from parrot.protocol.gate.answer import ErrorForm, error_response
from parrot.protocol.gate.json_size import JsonMeter

LARGE = 2**20
_SMALL = 2**16  # bytes of a body that are not counted: the server has as many in its buffers


class BodyBudget:
    """The memory for bodies that are being read or handed on."""

    def __init__(self, num_bytes: int) -> None:
        self._num_free = num_bytes

    @contextmanager
    def lease(self) -> "Iterator[BodyLease]":
        """A part of the budget, which is given back at the end."""
        lease = BodyLease(self)
        try:
            yield lease
        finally:
            self._num_free += lease.num_bytes

    def take(self, num_bytes: int) -> None:
        """Raises `Unavailable` if there is not so much."""
        if num_bytes > self._num_free:
            raise Unavailable("the server is reading too many large requests: try again")
        self._num_free -= num_bytes


class BodyLease:
    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self.num_bytes = 0

    def hold(self, size: int) -> None:
        """Let it be for a body of which there are so many bytes."""
        num_bytes = max(0, size - _SMALL)
        self._budget.take(num_bytes - self.num_bytes)
        self.num_bytes = num_bytes


class BodyRules(NamedTuple):
    """The bodies that a route takes. `max_size`: bytes of a body, if less than the server's limit.
    `admits`: whether a body of more than 1 MiB is read, as the request's head tells. `is_metered`:
    what its JSON is made of is bounded (see json_size.py)."""

    max_size: int | None = None
    admits: Callable[[Request], bool] | None = None
    is_metered: bool = True

    def check(self, request: Request, size: int) -> None:
        """Raise `PayloadTooLarge` or `AuthenticationFailed` if a body of this size is not read."""
        if self.max_size is not None and size > self.max_size:
            raise PayloadTooLarge(f"the request body exceeds {self.max_size} bytes")
        if size > LARGE and self.admits is not None and not self.admits(request):
            raise AuthenticationFailed(
                f"a body of more than {LARGE} bytes needs the key or `session_auth` as a header, "
                "`Authorization: Bearer`"
            )


ANY_BODY = BodyRules()
PEER_BODY = BodyRules(is_metered=False)
SMALL_BODY = BodyRules(_SMALL)


def declared_size(request: Request) -> int:
    """Bytes of the body; 0 if nothing is said."""
    declared = request.headers.get("content-length", "")
    return int(declared) if declared.isdecimal() else 0


async def read_body(request: Request, rules: BodyRules = ANY_BODY) -> bytes:
    """The whole body, which the request does not keep. Raises what the rules and the meter raise,
    `Unavailable` when the bodies of all requests become too large, and `Cancelled` if the client
    leaves or is too slow."""
    rules.check(request, declared_size(request))
    budget: BodyBudget = request.app.state.body_budget
    with budget.lease() as lease:
        chunks, size = [], 0
        meter: JsonMeter | None = None
        try:
            async for chunk in request.stream():
                chunks.append(chunk)
                size += len(chunk)
                rules.check(request, size)
                if size <= _SMALL:
                    continue
                lease.hold(size)
                if rules.is_metered:
                    for piece in chunks if meter is None else (chunk,):
                        meter = meter or JsonMeter()
                        meter.feed(piece)
        except ClientDisconnect:
            raise Cancelled("the client disconnected") from None
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


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
        return PayloadTooLarge(
            f"the request body exceeds {self._max_body_size} bytes, the server's `max_body_size`"
        )

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
