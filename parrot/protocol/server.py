"""Common parts of both servers (ServeCore and engines): strict JSON, the error table, SSE, keys.

Only server processes import this module; it needs FastAPI."""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
    Sequence,
)
from contextlib import AbstractAsyncContextManager, aclosing, suppress
from typing import Any, TypeVar

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, ValidationError
from pydantic_core import to_json
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    InternalError,
    InvalidRequest,
    ParrotError,
    UnsupportedMediaType,
    ValidationFailed,
)
from parrot.protocol.gate.answer import ErrorForm, own_form
from parrot.protocol.gate.bodies import ANY_BODY, BodyBudget, BodyLimit, BodyRules, read_body
from parrot.protocol.gate.config import ConnectionLimits
from parrot.protocol.gate.errors import ErrorBoundary
from parrot.protocol.gate.hosts import ANY_HOST, HostGuard
from parrot.utils.ids import tokens_equal
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

KEEP_ALIVE_S = 15.0
_REFUSAL_S = 10.0
_KEEP_ALIVE = b": keep-alive\n\n"
_JSON = "application/json"
_LARGE = 2**17  # bytes of a body
_MAX_FIELDS = 64
_MAX_KEY = 256  # characters of a client's for a request
_TURN_BYTES = 2**16
_TURN_ITEMS = 4096  # of a list in an answer
_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies pass it on
T = TypeVar("T", bound=BaseModel)
R = TypeVar("R")


def create_base_app(
    title: str,
    *,
    max_body_size: int,
    max_body_memory: int = ConnectionLimits().max_body_memory,
    host: str = "localhost",
    allowed_hosts: Sequence[str] = (ANY_HOST,),
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    error_form: ErrorForm = own_form,
    around: Callable[[ASGIApp], ASGIApp] | None = None,
) -> FastAPI:
    """A FastAPI app whose every error, also of unknown paths and defects, is the JSON of errors, in
    the form that `error_form` gives it. It answers under the names of `host` and `allowed_hosts`
    (see `HostGuard`). `around`: what stands between its errors and its routes."""
    app = _App(
        title=title,
        lifespan=lifespan,
        openapi_url=None,  # ours have rules; and FastAPI's pages load scripts from elsewhere
        # Else it looks for a provider of each in the environment, with every request.
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    app.state.body_budget = BodyBudget(max_body_memory)
    app.error_form = error_form
    app.around = around
    app.add_middleware(BodyLimit, max_body_size=max_body_size, error_form=error_form)
    app.add_middleware(HostGuard, bound=host, others=allowed_hosts, error_form=error_form)
    return app


class _App(FastAPI):
    """An app with one layer in the place of FastAPI's six, which cost a tenth of all of ServeCore's
    work on a call and do nothing for plain routes."""

    error_form: ErrorForm
    around: Callable[[ASGIApp], ASGIApp] | None

    def build_middleware_stack(self) -> ASGIApp:
        routes: ASGIApp = self.router if self.around is None else self.around(self.router)
        app: ASGIApp = ErrorBoundary(routes, self.error_form)
        for layer, args, options in reversed(self.user_middleware):
            app = layer(app, *args, **options)
        return app


def json_response(model: BaseModel) -> Response:
    """The fast way out: one serialisation in pydantic-core."""
    return Response(json_bytes(model), media_type="application/json")


def json_bytes(model: BaseModel) -> bytes:
    """The bytes of what `model_dump_json` gives, without making a text of it first."""
    return bytes(model.__pydantic_serializer__.to_json(model))


def has_long_list(model: BaseModel) -> bool:
    return any(isinstance(v, list) and len(v) > _TURN_ITEMS for v in model.__dict__.values())


async def json_in_turns(model: BaseModel) -> bytes:
    """The same for a model without aliases; others may go on while its long lists are encoded."""
    fields: list[bytes] = []
    for name, value in model:
        items: list[bytes] = []
        long = value if isinstance(value, list) else []
        for start in range(0, len(long), _TURN_ITEMS):
            items.append(to_json(long[start : start + _TURN_ITEMS], inf_nan_mode="null")[1:-1])
            await asyncio.sleep(0)
        text = b"[%b]" % b",".join(items) if items else to_json(value, inf_nan_mode="null")
        fields.append(b"%b:%b" % (to_json(name), text))
    return b"{%b}" % b",".join(fields)


async def read_json(
    request: Request, rules: BodyRules = ANY_BODY, check: Callable[[Any], None] | None = None
) -> Any:
    """The request's JSON body, {} when it is empty. orjson refuses NaN, lone surrogates and deep
    nesting, so nothing behind this line meets them; nor what `check` raises for.

    A page of another site can make a browser send any body but one that is declared as JSON, for
    which the browser asks first."""
    raw = await read_body(request, rules)
    if not raw:
        return {}
    declared = request.headers.get("content-type", "")
    if declared.partition(";")[0].strip().lower() != _JSON:
        raise UnsupportedMediaType(f"the body must be declared as {_JSON}, not {declared!r:.80}")
    await others_first(len(raw))
    try:
        payload = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if isinstance(payload, dict) and len(payload) > _MAX_FIELDS:
        # Before validation, which would say of each that it is unknown.
        raise InvalidRequest(f"the body has more than {_MAX_FIELDS} fields")
    if check is not None:
        await others_first(len(raw))
        check(payload)
    await others_first(len(raw))
    return payload


async def others_first(size: int) -> None:
    """Each look at a large body takes some ten milliseconds: others may go on between two."""
    if size > _LARGE:
        await asyncio.sleep(0)


def parse_payload(model: type[T], payload: Any) -> T:
    """Validate `payload`, or raise `ValidationFailed` that names the first bad field."""
    try:
        return model.model_validate(payload)
    except ValidationError as error:
        first, *others = error.errors(include_url=False, include_input=False)
        param = ".".join(map(str, first["loc"]))
        where = f"`{param}`: " if param else ""
        more = f" (and {len(others)} more)" if others else ""
        raise ValidationFailed(f"{where}{first['msg']}{more}", param=param or None) from None


def bearer_token(request: Request) -> str | None:
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return token if scheme.lower() == "bearer" and token else None


def api_key_of(request: Request) -> str | None:
    """The Bearer token, or the header `x-api-key` (Anthropic's)."""
    return bearer_token(request) or request.headers.get("x-api-key")


def idempotency_key_of(request: Request) -> str | None:
    """The header `Idempotency-Key`. Raises `InvalidRequest` for one that is too long."""
    key = request.headers.get("idempotency-key")
    if key is not None and len(key) > _MAX_KEY:
        text = f"`Idempotency-Key` has more than {_MAX_KEY} characters"
        raise InvalidRequest(text, param="Idempotency-Key")
    return key or None


def knows_cluster_token(request: Request, expected: str | None) -> bool:
    """Whether it carries the cluster's token, or none is configured."""
    return expected is None or tokens_equal(bearer_token(request) or "", expected)


def require_cluster_token(request: Request, expected: str | None) -> None:
    """Raises `AuthenticationFailed`."""
    if not knows_cluster_token(request, expected):
        raise AuthenticationFailed("missing or wrong cluster token (`Authorization: Bearer TOKEN`)")


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
