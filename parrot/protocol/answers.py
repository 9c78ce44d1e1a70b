"""Answers on their way out: JSON, errors in one form, and server-sent events, which are given up
when the client goes away.

Only servers import this module and those that take requests; they need FastAPI.

The app of a server, and what stands before its routes, from outside in: it answers only under
its own names (`HostGuard`), to bodies that are not too large (`BodyLimit`), and whatever goes wrong
behind is an answer (`ErrorBoundary`). Servers put their own layers before and behind these, where
they are configured.
"""

import asyncio
import logging
import secrets
import socket
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from functools import lru_cache, partial
from math import ceil
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.bodies import BodyBudget
from parrot.protocol.errors import (
    Cancelled,
    InternalError,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    ParrotError,
    PayloadTooLarge,
    QueueFull,
    error_from_payload,
)
from parrot.protocol.server_config import ConnectionLimits
from parrot.utils.addresses import MAX_HOST_NAME, is_address
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

JSON = "application/json"
KEEP_ALIVE_S = 15.0
_REFUSAL_S = 10.0
_KEEP_ALIVE = b": keep-alive\n\n"
_TURN_BYTES = 2**16
_TURN_ITEMS = 4096  # of a list in an answer
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass it on

_JSON_HEADER = b"content-type", JSON.encode()
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
}

R = TypeVar("R")


class JsonResponse(Response):
    """The fast way out, for JSON that is encoded already."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), _JSON_HEADER]


def json_response(model: BaseModel) -> Response:
    return JsonResponse(json_bytes(model))


def json_bytes(model: BaseModel) -> bytes:
    """The bytes of what `model_dump_json` gives, without making a text of it first."""
    return bytes(model.__pydantic_serializer__.to_json(model))


def has_long_list(model: BaseModel) -> bool:
    for value in model.__dict__.values():
        if isinstance(value, list) and len(value) > _TURN_ITEMS:
            return True
    return False


async def json_in_turns(model: BaseModel) -> bytes:
    """The same for a model without aliases; others may go on while its long lists are encoded."""
    fields: list[bytes] = []
    for name, value in model:
        if not isinstance(value, list) or len(value) <= _TURN_ITEMS:
            # The model's own serializer, which knows how the fields of its classes are written.
            field = model.__pydantic_serializer__.to_json(model, include={name})
            fields.append(field[1:-1])
            continue
        items: list[bytes] = []
        for start in range(0, len(value), _TURN_ITEMS):
            items.append(to_json(value[start : start + _TURN_ITEMS], inf_nan_mode="null")[1:-1])
            await asyncio.sleep(0)
        fields.append(b"%b:[%b]" % (to_json(name), b",".join(items)))
    return b"{%b}" % b",".join(fields)


ErrorForm = Callable[[Request, ParrotError], tuple[int, Mapping[str, Any]]]
"""The status and the JSON of an error that a request gets."""


def own_form(request: Request, error: ParrotError) -> tuple[int, Mapping[str, Any]]:
    """Parrot's own: see errors.py."""
    return error.status, error.to_payload()


def error_headers(error: ParrotError, status: int) -> Mapping[str, str] | None:
    if isinstance(error, QueueFull) and error.retry_after_s is not None:
        return {"Retry-After": str(max(1, ceil(error.retry_after_s)))}
    return _HEADERS.get(status)


def error_response(
    request: Request, error: ParrotError, error_form: ErrorForm = own_form
) -> Response:
    status, payload = error_form(request, error)
    return Response(
        orjson.dumps(payload, option=orjson.OPT_NON_STR_KEYS, default=str),
        status_code=status,
        media_type=JSON,
        headers=error_headers(error, status),
    )


async def run_until_disconnect(request: Request, work: Awaitable[R]) -> R:
    """Await `work`, but cancel it and raise `Cancelled` as soon as the client has gone. Work that
    does not suspend costs no more than itself: nobody watches it."""
    this = asyncio.current_task()
    assert this is not None
    watcher: asyncio.Future[None] | None = None
    is_over = False

    def interrupt(watcher: asyncio.Future[None]) -> None:
        if not is_over:  # the work may have ended in the turn in which the client has gone
            this.cancel()

    def watch() -> None:
        nonlocal watcher
        watcher = asyncio.ensure_future(_disconnected(request))
        watcher.add_done_callback(interrupt)

    suspended = asyncio.get_running_loop().call_soon(watch)
    try:
        return await work
    except asyncio.CancelledError:
        if watcher is not None and watcher.done() and this.uncancel() == 0:
            raise Cancelled("the client disconnected") from None
        raise
    finally:
        is_over = True
        suspended.cancel()
        if watcher is not None:
            watcher.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


Event = tuple[str | None, BaseModel | Mapping[str, Any] | str]
"""The name of a server-sent event, if it has one, and its data: JSON, or a line as it is."""


Events = Event | list[Event] | bytes
"""Events that are sent at once; bytes are encoded already."""


class EventStream(Response):
    """Server-sent events, with keep-alive comments while there are none. An exception of the
    iterator becomes a final `error` event: the stream never just stops. A client that leaves
    cancels the iterator.

    `refuse` makes the answer for an error. If it is given, the stream begins with its first event,
    or after 10 s: an error before that is answered so, and the data of a later one is what would
    have been the answer's body."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Events],
        refuse: Callable[[ParrotError], Response] | None = None,
    ) -> None:
        self.background = None
        self.status_code = 200
        self.init_headers(_STREAM_HEADERS)
        self._events = events
        self._refuse = refuse
        self._has_begun = False
        self._sent_at = 0.0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = self._answer(scope, receive, send)
        with suppress(Cancelled):
            await run_until_disconnect(Request(scope, receive), work)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._send_all(send)
        except ParrotError as error:
            if self._refuse is None:
                raise
            await self._refuse(error)(scope, receive, send)

    async def _send_all(self, send: Send) -> None:
        """Raises the error of a stream that has not begun."""
        loop, tasks = asyncio.get_running_loop(), TaskSet()
        if self._refuse is None:
            await self._begin(send)
        idle = loop.call_later(  # most streams are over before
            KEEP_ALIVE_S if self._has_begun else _REFUSAL_S,
            lambda: tasks.spawn(self._keep_alive(send), name="keep-alive"),
        )
        size = 0  # of what was sent in this turn of the loop
        try:
            async with aclosing(self._encoded()) as chunks:
                async for chunk in chunks:
                    await self._begin(send)
                    self._sent_at = loop.time()
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    if (size := size + len(chunk)) > _TURN_BYTES:
                        size = 0
                        await asyncio.sleep(0)  # events that never wait leave nobody else a turn
        finally:
            idle.cancel()
            if tasks:
                await tasks.close()
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        """No effect if it has begun."""
        if not self._has_begun:
            self._has_begun = True
            self._sent_at = asyncio.get_running_loop().time()
            headers = self.raw_headers
            await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def _keep_alive(self, send: Send) -> None:
        await self._begin(send)
        loop = asyncio.get_running_loop()
        while True:
            due = self._sent_at + KEEP_ALIVE_S - loop.time()
            if due > 0:
                await asyncio.sleep(due)
                continue
            self._sent_at = loop.time()
            await send({"type": "http.response.body", "body": _KEEP_ALIVE, "more_body": True})

    async def _encoded(self) -> AsyncGenerator[bytes]:
        events = self._events
        try:
            async for given in events:
                if isinstance(given, bytes):
                    yield given
                elif isinstance(given, tuple):
                    yield _event_bytes(*given)
                elif given:
                    yield b"".join([_event_bytes(*event) for event in given])
        except ParrotError as error:
            yield self._failed(error)
        except Exception:
            logger.exception("a stream failed")
            yield self._failed(InternalError("internal error"))
        finally:
            if (aclose := getattr(events, "aclose", None)) is not None:
                await aclose()

    def _failed(self, error: ParrotError) -> bytes:
        """The last event. Raises the error if the stream has not begun."""
        if not self._has_begun:
            raise error
        if self._refuse is None:
            return _event_bytes("error", error.to_payload())
        return _event_bytes("error", bytes(self._refuse(error).body).decode())


def _event_bytes(name: str | None, payload: BaseModel | Mapping[str, Any] | str) -> bytes:
    """JSON has no line breaks, so each event is one line of data."""
    if isinstance(payload, BaseModel):
        data = json_bytes(payload)
    else:
        data = payload.encode() if isinstance(payload, str) else orjson.dumps(payload)
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


Check = Callable[[Request], object]
"""Raises `AuthenticationFailed` or `PermissionDenied` for a request that may not be made."""

ANY_HOST = "*"
_MAX_REQUEST_ID = 128  # characters
_REMEMBERED = 256  # names, each with its port


Layer = Callable[[ASGIApp], ASGIApp]
"""Makes of an app one that does something more."""


def create_base_app(
    title: str,
    layers: Sequence[Layer],
    *,
    max_body_memory: int = ConnectionLimits().max_body_memory,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """A FastAPI app with these layers before its routes, from outside in: `own_layers` at least."""
    app = _App(
        title=title,
        lifespan=lifespan,
        openapi_url=None,  # ours have rules; and FastAPI's pages load scripts from elsewhere
        # Else it looks for a provider of each in the environment, with every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.body_budget = BodyBudget(max_body_memory)
    app.layers = layers
    return app


class _App(FastAPI):
    """An app with our layers in the place of FastAPI's six, which cost a tenth of all of
    ServeCore's work on a call and do nothing for plain routes."""

    layers: Sequence[Layer]

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self.router
        for layer in reversed(self.layers):
            app = layer(app)
        return app


def own_layers(
    *, max_body_size: int, names: Sequence[str] = (ANY_HOST,), error_form: ErrorForm = own_form
) -> list[Layer]:
    """The layers before the routes of every server: it answers under `names` and its own only (see
    `HostGuard`), bodies have a limit, and every error, also of unknown paths and defects, is the
    JSON of errors, in the form that `error_form` gives it."""
    layers: list[Layer] = [
        partial(BodyLimit, max_body_size=max_body_size, error_form=error_form),
        partial(ErrorBoundary, error_form=error_form),
    ]
    if ANY_HOST not in names:
        layers.insert(0, partial(HostGuard, names=names, error_form=error_form))
    return layers


class RequestIds:
    """Gives each request an id, unless its client has, and says it with every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        value = b""
        for name, given in scope["headers"]:
            if name == b"x-request-id":
                value = given[:_MAX_REQUEST_ID]
                break
        value = value or b"req_%b" % secrets.token_hex(12).encode()
        scope["request_id"] = value.decode("latin-1")

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                # The first is OpenAI's name, the other Anthropic's.
                message["headers"] += [(b"x-request-id", value), (b"request-id", value)]
            await send(message)

        await self._app(scope, receive, answer)


def request_id_of(request: Request) -> str:
    """The id of a request, for which `RequestIds` must have been asked."""
    return str(request.scope["request_id"])


class HostGuard:
    """Refuses requests for names that are not the server's: a web page may give a name of its own
    any address, also this machine's (DNS rebinding), and its browser then takes it for the same
    site, but tells which name the request is made for. The server's names are `names`, the
    machine's, and `localhost`; an address is no name, so nobody can have given it away."""

    def __init__(self, app: ASGIApp, names: Iterable[str], error_form: ErrorForm) -> None:
        self._app = app
        self._error_form = error_form
        own = (socket.gethostname(), "localhost", *names)
        self._names = frozenset(name.lower() for name in own)
        self._is_own = lru_cache(_REMEMBERED)(self._names_us)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            for key, value in scope["headers"]:
                if key == b"host" and not self._is_own(value):
                    response = error_response(Request(scope), _refusal(value), self._error_form)
                    await response(scope, receive, send)
                    return
        await self._app(scope, receive, send)

    def _names_us(self, header: bytes) -> bool:
        name = _without_port(header.decode("latin-1")).lower().removesuffix(".")
        return name in self._names or is_address(name)


def _without_port(host: str) -> str:
    if host.startswith("["):
        address, end, port = host[1:].partition("]")
        is_whole = end and (not port or (port[0] == ":" and port[1:].isdigit()))
        return address if is_whole else host
    name, _, port = host.rpartition(":")
    return name if name and port.isdigit() else host


def _refusal(header: bytes) -> MisdirectedRequest:
    name = _without_port(header.decode("latin-1"))[:MAX_HOST_NAME]
    return MisdirectedRequest(
        f"this server is not `{name}`: its `allowed_hosts` do not name it", param="host"
    )


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
        declared = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = value
                break
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


class Guard:
    """Refuses, unless `check` lets it pass, every request that is not for an open path, also for
    paths that there are not."""

    def __init__(self, app: ASGIApp, check: Check, open_paths: Collection[str]) -> None:
        self._app = app
        self._check = check
        self._open_paths = open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in self._open_paths:
            try:
                self._check(request := Request(scope))
            except ParrotError as error:
                await error_response(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class ErrorBoundary:
    """Answers with an error whatever `app` raises before it answers."""

    def __init__(self, app: ASGIApp, error_form: ErrorForm) -> None:
        self._app = app
        self._error_form = error_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        async def noting(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception as error:
            response = self._answer(Request(scope), error)
            if has_begun:
                raise
            await response(scope, receive, send)

    def _answer(self, request: Request, error: Exception) -> Response:
        if isinstance(error, ParrotError):
            return self._respond(request, error)
        if not isinstance(error, HTTPException):
            path = request.url.path
            logger.error("unhandled error on %s %s", request.method, path, exc_info=error)
            return self._respond(request, InternalError("internal error"))
        if error.status_code == 404:
            return self._respond(request, NotFound(_no_path(request)))
        if error.status_code == 405:
            refusal = MethodNotAllowed(f"{request.method} is not allowed here")
            response = self._respond(request, refusal)
            response.headers["Allow"] = ", ".join(_allowed_methods(request))
            return response
        return self._respond(request, error_from_payload(None, error.status_code))

    def _respond(self, request: Request, error: ParrotError) -> Response:
        return error_response(request, error, self._error_form)


def _no_path(request: Request) -> str:
    """The message for a path that does not exist, with a hint for a wrong base URL."""
    path, base = request.url.path, f"{request.url.scheme}://{request.url.netloc}"
    if path.startswith("/v1/v1/") and _exists(request, path.removeprefix("/v1")):
        return f'Not found: {path}. This client adds /v1 itself: use base_url="{base}"'
    if _exists(request, f"/v1{path}"):
        return f'Not found: {path}. Did you mean base_url="{base}/v1"?'
    return f"Not found: {path}"


def _exists(request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path}
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    return any(route.matches(scope)[0] is not Match.NONE for route in routes)


def _allowed_methods(request: Request) -> list[str]:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})
