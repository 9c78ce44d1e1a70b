"""The app of a server, and what stands before its routes, from outside in: it answers only under
its own names (`HostGuard`), to bodies that are not too large (`BodyLimit`), and whatever goes wrong
behind is an answer (`ErrorBoundary`). Servers put their own layers before and behind these, where
they are configured."""

import logging
import secrets
import socket
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Sequence,
)
from contextlib import AbstractAsyncContextManager
from functools import lru_cache, partial

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from parrot.protocol.answers import ErrorForm, error_response, own_form
from parrot.protocol.endpoint import BodyBudget, Check
from parrot.protocol.errors import (
    InternalError,
    MethodNotAllowed,
    MisdirectedRequest,
    NotFound,
    ParrotError,
    PayloadTooLarge,
    error_from_payload,
)
from parrot.protocol.server_config import ConnectionLimits
from parrot.utils.addresses import MAX_HOST_NAME, is_address

logger = logging.getLogger(__name__)
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
            return self._respond(request, NotFound(f"no such path: {request.url.path}"))
        if error.status_code == 405:
            refusal = MethodNotAllowed(f"{request.method} is not allowed here")
            response = self._respond(request, refusal)
            response.headers["Allow"] = ", ".join(_allowed_methods(request))
            return response
        return self._respond(request, error_from_payload(None, error.status_code))

    def _respond(self, request: Request, error: ParrotError) -> Response:
        return error_response(request, error, self._error_form)


def _allowed_methods(request: Request) -> list[str]:
    routes = [route for route in request.app.routes if isinstance(route, Route)]
    matching = [route for route in routes if route.matches(request.scope)[0] is not Match.NONE]
    return sorted({method for route in matching for method in route.methods or ()})
