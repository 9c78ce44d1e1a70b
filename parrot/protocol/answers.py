"""Responses of servers: JSON, errors in one format, and server-sent events. Work for a client that
disconnects is cancelled.

Only servers import this module, because it needs FastAPI.

It also creates the app of a server with layers around its routes, from outside in: `HostGuard`
rejects foreign host names, `BodyLimit` rejects large bodies, and `ErrorBoundary` turns exceptions
into error responses. Servers add their own layers before and after these.
"""

import asyncio
import logging
import os
import socket
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, suppress
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
    InvalidRequest,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    ParrotError,
    PayloadTooLarge,
    QuotaExceeded,
    error_from_payload,
)
from parrot.protocol.server_config import ConnectionLimits
from parrot.utils.addresses import MAX_HOST_NAME, is_address
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

JSON = "application/json"
KEEP_ALIVE_S = 15.0  # Seconds without events after which a stream sends a comment.
_REFUSAL_S = 10.0  # Seconds after which a stream begins without an event. See `EventStream`.
_KEEP_ALIVE = b": keep-alive\n\n"
_TURN_BYTES = 2**16  # Bytes that a stream sends before it yields to other tasks.
_TURN_ITEMS = 4096  # Items of a list that are encoded before other tasks may run.
# Proxies must forward events immediately.
_STREAM_HEADERS = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
    (b"content-type", b"text/event-stream; charset=utf-8"),
)

_JSON_HEADER = b"content-type", JSON.encode()
_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "1"},
    507: {"Retry-After": "1"},
}

_ERROR_HEADERS = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}

R = TypeVar("R")


class JsonResponse(Response):
    """A fast response with encoded JSON and status 200."""

    def __init__(self, body: bytes) -> None:
        self.status_code = 200
        self.background = None
        self.body = body
        self.raw_headers = [(b"content-length", b"%d" % len(body)), _JSON_HEADER]


def json_response(model: BaseModel) -> Response:
    return JsonResponse(json_bytes(model))


def json_bytes(model: BaseModel) -> bytes:
    """As `model_dump_json`, but directly as bytes."""
    return bytes(model.__pydantic_serializer__.to_json(model))


def has_long_list(model: BaseModel) -> bool:
    for value in model.__dict__.values():
        if isinstance(value, list) and len(value) > _TURN_ITEMS:
            return True
    return False


async def json_in_turns(model: BaseModel) -> bytes:
    """As `json_bytes`, for a model without aliases. Other tasks may run while long lists are
    encoded."""
    fields: list[bytes] = []
    for name, value in model:
        if not isinstance(value, list) or len(value) <= _TURN_ITEMS:
            # Use the model's own serializer, which knows the serializers of its fields.
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
"""Returns the status and the JSON payload for an error of a request."""


def own_form(request: Request, error: ParrotError) -> tuple[int, Mapping[str, Any]]:
    """Parrot's own error format, see errors.py."""
    return error.status, error.to_payload()


def error_headers(
    error: ParrotError, status: int, *, is_new_call: bool = False
) -> Mapping[str, str] | None:
    """`is_new_call`: a repeated request makes a new call, so no error is final for the client."""
    if error.is_final and not is_new_call:
        return None
    if isinstance(error, QuotaExceeded) and error.retry_after_s is not None:
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
        headers={**_ERROR_HEADERS, **(error_headers(error, status) or {})},
    )


async def run_until_disconnect(request: Request, work: Awaitable[R]) -> R:
    """Await `work`. When the client disconnects, cancel it and raise `Cancelled`. Work that never
    suspends has no overhead, because the connection is watched only from the first suspension."""
    this = asyncio.current_task()
    assert this is not None
    watcher: asyncio.Future[None] | None = None
    is_over = False

    def interrupt(watcher: asyncio.Future[None]) -> None:
        # The work may finish in the iteration in which the client disconnects.
        if not is_over:
            this.cancel()

    def watch() -> None:
        nonlocal watcher
        watcher = asyncio.get_running_loop().create_task(_disconnected(request))
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
"""The optional name of a server-sent event, and its data: JSON, or one line of text."""


Events = Event | list[Event] | bytes
"""Events that are sent together. Bytes are already encoded."""


class EventStream(Response):
    """Server-sent events, with keep-alive comments. An exception of the iterator becomes a final
    `error` event. A client that disconnects cancels the iterator.

    `refuse` makes the response for an error. With `refuse`, the stream begins with its first event
    or after 10 s. An error before that is a normal response, and a later error is an event with
    the same body."""

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncIterator[Events],
        refuse: Callable[[ParrotError], Response] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        self.background = None
        self.status_code = 200
        self.raw_headers = list(_STREAM_HEADERS)
        for name, value in (headers or {}).items():
            self.raw_headers.append((name.encode("latin-1"), value.encode("latin-1")))
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
        """Send all events. Raises the error of a stream that has not begun."""
        loop, tasks = asyncio.get_running_loop(), TaskSet()
        if self._refuse is None:
            await self._begin(send)
        idle = loop.call_later(  # Most streams end before this timer fires.
            KEEP_ALIVE_S if self._has_begun else _REFUSAL_S,
            lambda: tasks.spawn(self._keep_alive(send), name="keep-alive"),
        )
        size = 0  # Bytes sent in this iteration of the event loop.
        try:
            while chunk := await self._next():
                if not self._has_begun:
                    await self._begin(send)
                self._sent_at = loop.time()
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
                if (size := size + len(chunk)) > _TURN_BYTES:
                    # Without this, an iterator that never waits would block the event loop.
                    size = 0
                    await asyncio.sleep(0)
        finally:
            if (aclose := getattr(self._events, "aclose", None)) is not None:
                await aclose()
            idle.cancel()
            if tasks:
                await tasks.close()
        await self._begin(send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self, send: Send) -> None:
        """Send the header of the response, unless it was sent."""
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

    async def _next(self) -> bytes:
        """The next events, encoded. Empty at the end. An error is the last event."""
        try:
            async for given in self._events:
                if isinstance(given, bytes):
                    return given
                if isinstance(given, tuple):
                    return _event_bytes(*given)
                if given:
                    return b"".join([_event_bytes(*event) for event in given])
        except ParrotError as error:
            return self._failed(error)
        except Exception:
            logger.exception("a stream failed")
            return self._failed(InternalError("internal error"))
        return b""

    def _failed(self, error: ParrotError) -> bytes:
        """The final `error` event. Raises the error if the stream has not begun."""
        if not self._has_begun:
            raise error
        if self._refuse is None:
            return _event_bytes("error", error.to_payload())
        return _event_bytes("error", bytes(self._refuse(error).body).decode())


def _event_bytes(name: str | None, payload: BaseModel | Mapping[str, Any] | str) -> bytes:
    """The encoded event. JSON has no line breaks, so the data is one line."""
    if isinstance(payload, BaseModel):
        data = json_bytes(payload)
    else:
        data = payload.encode() if isinstance(payload, str) else orjson.dumps(payload)
    if name is None:
        return b"data: %b\n\n" % data
    return b"event: %b\ndata: %b\n\n" % (name.encode(), data)


Check = Callable[[Request], object]
"""Raises `AuthenticationFailed` or `PermissionDenied` if the request is not allowed."""

ANY_HOST = "*"
_MAX_REQUEST_ID = 128  # Characters of a client's request id that are kept.
_REMEMBERED = 256  # `Host` headers whose check is cached.


Layer = Callable[[ASGIApp], ASGIApp]
"""Wraps an app."""


def create_base_app(
    title: str,
    layers: Sequence[Layer],
    *,
    max_body_memory: int = ConnectionLimits().max_body_memory,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> "BaseApp":
    """A FastAPI app with these layers around its routes, from outside in. They must include
    `own_layers`."""
    app = BaseApp(
        title=title,
        lifespan=lifespan,
        # Our own page has access rules. FastAPI's pages also load scripts from other sites.
        openapi_url=None,
        # Otherwise FastAPI looks for a provider of each in the environment for every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.body_budget = BodyBudget(max_body_memory)
    app.layers, app.direct = layers, {}
    return app


class BaseApp(FastAPI):
    """An app with our layers instead of FastAPI's six. Those take 10% of ServeCore's time for a
    call and have no use for plain routes."""

    layers: Sequence[Layer]
    direct: dict[tuple[str, str], ASGIApp]
    """The apps of routes by method and path. Other requests are passed to the router."""

    def build_middleware_stack(self) -> ASGIApp:
        direct, router = self.direct, self.router

        def routed(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
            key = scope.get("method", ""), scope.get("path", "")
            return direct.get(key, router)(scope, receive, send)

        app: ASGIApp = routed
        for layer in reversed(self.layers):
            app = layer(app)
        return app


def own_layers(
    *, max_body_size: int, names: Sequence[str] = (ANY_HOST,), error_form: ErrorForm = own_form
) -> list[Layer]:
    """The layers of every server. The server accepts only its own host names and `names` (see
    `HostGuard`). Bodies are limited to `max_body_size` bytes. All errors, including unknown paths
    and defects, are JSON in the format of `error_form`."""
    layers: list[Layer] = [
        partial(BodyLimit, max_body_size=max_body_size, error_form=error_form),
        partial(ErrorBoundary, error_form=error_form),
    ]
    if ANY_HOST not in names:
        layers.insert(0, partial(HostGuard, names=names, error_form=error_form))
    return layers


class RequestIds:
    """Gives each request an id, unless the client sent one, and returns the id in the response's
    headers."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        value = b""
        for name, given in scope["headers"]:
            if name == b"x-request-id":
                value = given[:_MAX_REQUEST_ID]
                break
        value = value or b"req_%b" % os.urandom(12).hex().encode()
        scope["request_id"] = value.decode("latin-1")

        def answer(message: Message) -> Awaitable[None]:
            if message["type"] == "http.response.start":
                # OpenAI's name, then Anthropic's name.
                message["headers"] += [(b"x-request-id", value), (b"request-id", value)]
            return send(message)

        return self._app(scope, receive, answer)


def request_id_of(request: Request) -> str:
    """The id of a request. The app must have the layer `RequestIds`."""
    return str(request.scope["request_id"])


_HOSTLESS = frozenset({"1.0", "2"})  # Versions of HTTP that allow a request without `Host`.


class HostGuard:
    """Rejects requests whose `Host` is not a name of the server. This stops DNS rebinding: a web
    page can point its own DNS name to this machine, but browsers send that name as `Host`. Allowed
    are `names`, the machine's name, `localhost`, and IP addresses, which cannot be rebound."""

    def __init__(self, app: ASGIApp, names: Iterable[str], error_form: ErrorForm) -> None:
        self._app = app
        self._error_form = error_form
        own = (socket.gethostname(), "localhost", *names)
        self._names = frozenset(name.lower() for name in own)
        self._is_own = lru_cache(_REMEMBERED)(self._names_us)

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] == "http":
            host, count = b"", 0
            for key, value in scope["headers"]:
                if key == b"host":
                    host, count = value, count + 1
            error: ParrotError | None = None
            if count > 1 or (count == 0 and scope["http_version"] not in _HOSTLESS):
                text = f"HTTP/{scope['http_version']} needs one `Host` header, not {count}"
                error = InvalidRequest(text, param="host")
            elif count and not self._is_own(host):
                error = _refusal(host)
            if error is not None:
                response = error_response(Request(scope), error, self._error_form)
                return response(scope, receive, send)
        return self._app(scope, receive, send)

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
        f"the host `{name}` is not allowed: add it to the server's `allowed_hosts`", param="host"
    )


class BodyLimit:
    """Rejects bodies over the limit with our own error (FastAPI's `max_body_size` answers in plain
    text). A body of declared length is first read and dropped, up to 256 MiB, because a client that
    is still sending would see a reset, not the response. Other bodies are counted."""

    _MAX_DISCARDED = 256 * 2**20  # Bytes that are read before the error response.

    def __init__(self, app: ASGIApp, max_body_size: int, error_form: ErrorForm) -> None:
        self._app = app
        self._max_body_size = max_body_size
        self._error_form = error_form

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if scope["type"] != "http":
            return self._app(scope, receive, send)
        declared = None
        for name, value in scope["headers"]:
            if name == b"content-length":
                declared = value
                break
        if declared is None:
            return self._app(scope, self._counting(receive), send)
        if declared.isdigit() and int(declared) <= self._max_body_size:
            return self._app(scope, receive, send)
        return self._reject(scope, receive, send)

    async def _reject(self, scope: Scope, receive: Receive, send: Send) -> None:
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
    """Calls `check` for each request, including unknown paths, except for `open_paths`. Rejects the
    request if `check` raises."""

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
    """Turns exceptions of `app` into error responses, if the response has not begun."""

    def __init__(self, app: ASGIApp, error_form: ErrorForm) -> None:
        self._app = app
        self._error_form = error_form

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        has_begun = False

        def noting(message: Message) -> Awaitable[None]:
            nonlocal has_begun
            has_begun = True
            return send(message)

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
    """The message for an unknown path, with a hint if the base URL is wrong."""
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
