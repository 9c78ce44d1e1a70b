"""Transports between a client and its server: over HTTP (`HttpClient`), or inside one process."""

import asyncio
import time
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Mapping,
    MutableMapping,
)
from contextlib import aclosing
from typing import Any, Protocol, TypedDict, TypeVar, Unpack
from urllib.parse import urlencode

import orjson
from pydantic import BaseModel, ValidationError

from parrot.protocol.errors import (
    InternalError,
    InvalidRequest,
    ParrotError,
    QuotaExceeded,
    Unavailable,
    error_from_payload,
)
from parrot.utils.tasks import TaskSet
from parrot.utils.traceparent import TraceParent

_MAX_SSE_EVENT = 64 * 2**20  # Bytes of one server-sent event.
_MAX_RETRY_AFTER_S = 1e9  # Longer waits of a server, also infinite ones, are shortened to it.

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

M = TypeVar("M", bound=BaseModel)
ErrorReader = Callable[[Any, int, Mapping[str, str]], ParrotError]
"""Returns the error for an answer's decoded body (None: not JSON), status and headers."""


TIMEOUT_S = 30.0  # Default seconds for a whole request.
# Default seconds without data after which a stream fails. Servers send comments every 15 s.
IDLE_TIMEOUT_S = 60.0


class Unreachable(Unavailable):
    """The connection failed, so the server has not received the request."""


class Options(TypedDict, total=False):
    """Options of a request or a stream."""

    params: Mapping[str, str] | None  # The query.
    body: Any  # Serializable with orjson.
    bearer: str | None  # Replaces the client's token.
    traceparent: str  # The parent span. Ignored if invalid.
    request_id: str  # The id of the caller's request. Empty: none.


class RequestOptions(Options, total=False):
    """`timeout_s`: 30 by default. None: no limit while the connection is open."""

    timeout_s: float | None


class StreamOptions(Options, total=False):
    """`idle_timeout_s`: 60 by default."""

    idle_timeout_s: float


class Transport(Protocol):
    """A connection to one server. Use it from one event loop and close it.

    Raises `Unreachable` if the connection fails, `Unavailable` if it breaks, and the server's error
    (errors.py) for statuses from 400. Cancelling a request, or closing a stream, aborts the work in
    the server."""

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """Send a request and return the decoded JSON answer."""
        ...

    def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """Yield server-sent events as (event name, data), without comments. Raises `Unavailable`
        after `idle_timeout_s` without data.

        The iteration ends with the body, which a failing server may cut off. The caller must check
        for the final event (see `until_done`)."""
        ...

    async def close(self) -> None: ...


class AppTransport:
    """A transport inside one process: calls an ASGI app with the same bytes as over HTTP. Streams
    have no idle timeout, because the app cannot become unreachable."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._streams = TaskSet()

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """See `Transport`. The app runs in the caller's task, so a cancellation reaches it
        immediately."""
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        messages: list[Message] = []

        async def send(message: Message) -> None:
            messages.append(message)

        try:
            async with asyncio.timeout(timeout_s):
                await self._app(*_called(method, path, options, asyncio.Event()), send)
        except TimeoutError:
            raise Unavailable(f"no answer to {method} {path} within {timeout_s} s") from None
        except Exception:
            if not messages:  # Otherwise the app has sent an error response before it raised.
                raise
        answer = b"".join([message.get("body", b"") for message in messages])
        return decode_answer(answer, messages[0]["status"], {}, path)

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """See `Transport`."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        is_gone = asyncio.Event()
        called = _called(method, path, options, is_gone)

        async def run() -> None:
            try:
                await self._app(*called, messages.put)
            finally:
                messages.put_nowait(None)

        self._streams.spawn(run(), name=f"{method} {path}")
        try:
            start = await messages.get()
            if start is None:
                raise Unavailable(f"no answer to {method} {path}")
            if start["status"] >= 400:
                answer = b""
                while (message := await messages.get()) is not None:
                    answer += message.get("body", b"")
                decode_answer(answer, start["status"], {}, path)
            parser = EventParser()
            while (message := await messages.get()) is not None:
                for event in parser.feed(message.get("body", b"")):
                    yield event
        finally:
            is_gone.set()

    async def close(self) -> None:
        await self._streams.close()


def _called(
    method: str, path: str, options: Options, is_gone: asyncio.Event
) -> tuple[Message, Receive]:
    """The arguments of an ASGI app: the scope, and a `receive` that returns the body and then, once
    `is_gone` is set, the disconnect."""
    raw = encode_body(options.get("body")) or b""
    headers = [(b"content-length", b"%d" % len(raw)), (b"content-type", b"application/json")]
    if (bearer := options.get("bearer")) is not None:
        headers.append((b"authorization", f"Bearer {bearer}".encode()))
    given = options.get("traceparent")
    if given and (span := TraceParent.parse(given)) is not None:
        headers.append((b"traceparent", str(span).encode()))
    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "2",  # Without a `Host` header, as HTTP/2 allows.
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": urlencode(options.get("params") or {}).encode(),
        "headers": headers,
        "client": None,
        "server": None,
    }
    bodies = [raw]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        await is_gone.wait()
        return {"type": "http.disconnect"}

    return scope, receive


def encode_body(body: Any) -> bytes | None:
    """The body as JSON. Raises `InvalidRequest` if it cannot be encoded."""
    if body is None:
        return None
    try:
        return orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"the request cannot be sent as JSON: {error}") from None


def own_error(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
    """The error of a Parrot server."""
    error = error_from_payload(payload, status)
    if isinstance(error, QuotaExceeded):
        error.retry_after_s = retry_after_s(headers)
    return error


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Seconds from the header `retry-after-ms`, or `retry-after` in seconds or as a date, from 0 to
    `_MAX_RETRY_AFTER_S`. None: there is no such header, or it is invalid."""
    try:
        if (millis := headers.get("retry-after-ms")) is not None:
            wait_s = float(millis) / 1000
        elif (given := headers.get("retry-after", "")).replace(".", "", 1).isdigit():
            wait_s = float(given)
        else:
            from email.utils import parsedate_to_datetime

            wait_s = parsedate_to_datetime(given).timestamp() - time.time()
    except (ValueError, OverflowError):
        return None
    return max(0.0, min(wait_s, _MAX_RETRY_AFTER_S))


def decode_answer(
    raw: bytes | bytearray,
    status: int,
    headers: Mapping[str, str],
    server: str,
    read_error: ErrorReader = own_error,
) -> Any:
    """The answer's JSON. Raises the server's error for statuses from 400, and `InternalError` if
    the answer is not JSON."""
    try:
        payload = orjson.loads(raw)
    except orjson.JSONDecodeError:
        if status < 400:
            raise InternalError(f"{server} answered with something that is not JSON") from None
        payload = None
    if status >= 400:
        raise read_error(payload, status, headers)
    return payload


def read_answer(kind: type[M], answer: Any) -> M:
    """Validate the decoded answer of a Parrot server, or the data of an event (bytes). Raises
    `InternalError` if it is not a `kind`."""
    try:
        if isinstance(answer, bytes):
            return kind.model_validate_json(answer)
        return kind.model_validate(answer)
    except ValidationError as error:
        where = ".".join(str(part) for part in error.errors(include_url=False)[0]["loc"])
        raise InternalError(
            f"the answer is not a {kind.__name__}{f': {where}' if where else ''}"
        ) from None


async def until_done(
    events: AsyncGenerator[tuple[str, bytes], None],
) -> AsyncGenerator[tuple[str, bytes], None]:
    """Yield the events of a Parrot server up to the final `done`. Raises the error of an `error`
    event, and `Unavailable` if the stream ends earlier."""
    async with aclosing(events):
        async for name, data in events:
            if name == "error":
                raise error_from_payload(_json_or_none(data), 500)
            yield name, data
            if name == "done":
                return
    raise Unavailable("the stream ended before its final event")


def _json_or_none(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


class EventParser:
    """Parses the part of the SSE format that JSON servers use: `event`, `data` and comment lines
    with LF or CRLF."""

    def __init__(self) -> None:
        self._pending: list[bytes] = []  # Chunks of the incomplete line.
        self._size = 0
        self._name, self._data = "message", bytearray()

    def feed(self, chunk: bytes) -> list[tuple[str, bytes]]:
        """The events (name, data) that the chunk completes."""
        if not (self._size or self._data) and chunk.startswith(b"data:"):
            data, end, rest = chunk[5:].partition(b"\n\n")
            if data and end and not rest and b"\n" not in data and self._name == "message":
                return [("message", data.removesuffix(b"\r"))]  # Nearly all chunks are one event.
        self._size += len(chunk)
        if self._size + len(self._data) > _MAX_SSE_EVENT:
            raise InternalError("an event of the stream is too large")
        self._pending.append(chunk)
        found: list[tuple[str, bytes]] = []
        if b"\n" not in chunk:
            return found
        *lines, rest = b"".join(self._pending).split(b"\n")
        self._pending, self._size = [rest], len(rest)
        for line in lines:
            if line.startswith(b"data:"):
                self._data += line[5:].removesuffix(b"\r")
            elif line.startswith(b"event:"):
                self._name = line[6:].strip().decode(errors="replace")
            elif self._data and line in (b"", b"\r"):
                found.append((self._name, bytes(self._data)))
                self._name, self._data = "message", bytearray()
        return found
