"""Answers on their way out: JSON, errors in one form, and server-sent events, which are given up
when the client goes away.

Only servers import this module and those that take requests; they need FastAPI."""

import asyncio
import logging
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Mapping,
)
from contextlib import aclosing, suppress
from math import ceil
from typing import Any, TypeVar

import orjson
from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from parrot.protocol.errors import (
    Cancelled,
    InternalError,
    ParrotError,
    QueueFull,
)
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
