"""HTTP connections to one server, for requests and answers in JSON.

    data_received -> HTTP parser -> events -> the request's `on_event`

An event of a stream reaches its function in the callback of the socket. In a general HTTP client
it passes queues and tasks, which take longer than all other work for the event."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, cast
from urllib.parse import urlsplit

import httptools

from parrot.protocol.errors import InternalError, InvalidRequest, Unavailable
from parrot.protocol.http import keepalive_socket
from parrot.protocol.transport import (
    IDLE_TIMEOUT_S,
    ErrorReader,
    EventParser,
    Unreachable,
    decode_answer,
    encode_body,
)
from parrot.utils.addresses import is_address
from parrot.utils.traceparent import TraceParent

_CONNECT_TIMEOUT_S = 5.0  # Per address of the server.
_MAX_IDLE_S = 15.0  # Seconds after which an unused connection is closed.
_END_S = 1.0  # Seconds from the last event to the end of an answer. Then its connection is closed.
_MAX_HEAD = 2**16  # Bytes of an answer's head, its trailers, or the size line of a chunk.
_MAX_ANSWER = 2**28  # Bytes of an answer that is not a stream.
_LARGE_BODY = 2**16  # Bytes from which a body is not copied next to its head.
_PORTS = {"http": 80, "https": 443}

OnEvent = Callable[[str, bytes], bool]
"""Receives the name and the data of an event. Returns whether the answer is complete."""


class Origin(NamedTuple):
    """The request of a client for which a request is sent to the server."""

    traceparent: str = ""  # The parent span. Ignored if invalid.
    request_id: str = ""
    bearer: str | None = None  # Replaces the token of the connections.


_NO_CLIENT = Origin()


class Reply:
    """The answer to one request. `begun` is set at the first event, and at the latest with `over`,
    which is set when the answer is complete or has failed with `error`."""

    def __init__(self, connection: "_Connection", on_event: OnEvent | None) -> None:
        loop = asyncio.get_running_loop()
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.error: Exception | None = None
        self.has_events = False
        self._has_data = False
        self.is_complete = False  # `on_event` has received the last event.
        self.status = 0
        self.is_stream = False  # The body consists of events.
        self.headers: dict[str, str] = {}
        self.body = bytearray()  # Of an answer that is not a stream of events.
        self._connection = connection
        self._on_event = on_event
        self._events = EventParser()

    async def first(self) -> None:
        """Wait for the first event, or for an answer without events. Raises its error."""
        await self._wait(self.begun)
        if self.error is not None and not self.has_events:
            raise self.error

    async def end(self) -> None:
        """Wait for the end of the answer. Raises its error."""
        if not self.over.done():
            await self._wait(self.over)
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Abort an unfinished answer. The server notices that the connection is closed."""
        if not self.over.done():
            self._connection.abort()

    def begin(self, status: int) -> None:
        """The head of the answer has arrived."""
        self.status = status
        self.is_stream = self._on_event is not None and 200 <= status < 300

    def feed(self, data: bytes) -> None:
        """More of the answer's body."""
        if self.over.done():
            return
        try:
            if self.is_stream and not self._has_data:
                self.is_stream = data[:1] != b"{"  # A server without streams sends JSON.
            self._has_data = True
            if not self.is_stream:
                self.body += data
                if len(self.body) > _MAX_ANSWER:
                    raise InternalError(f"the server answered with more than {_MAX_ANSWER} bytes")
                return
            assert self._on_event is not None
            for name, event in self._events.feed(data):
                self.has_events = True
                if self._on_event(name, event):
                    self.is_complete = True
                    self.finish()
                    self._connection.expect_end()
                    return
            if self.has_events and not self.begun.done():
                self.begun.set_result(None)
        except Exception as error:  # noqa: BLE001 - it is raised by `end`
            self.finish(error)
            self._connection.abort()

    def finish(self, error: Exception | None = None) -> None:
        """The answer has ended, or failed. No effect afterwards."""
        if not self.over.done():
            self.error = error
            self.over.set_result(None)
            if not self.begun.done():
                self.begun.set_result(None)

    async def _wait(self, change: "asyncio.Future[None]") -> None:
        try:
            await change
        except asyncio.CancelledError:
            self._connection.abort()
            raise


class _Connection(asyncio.Protocol):
    """One connection. It serves one request at a time."""

    def __init__(self, pool: "ServerConnections") -> None:
        self._pool = pool
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._parser.set_dangerous_leniencies(  # Old servers send such answers.
            lenient_headers=True,
            lenient_optional_cr_before_lf=True,
            lenient_spaces_after_chunk_size=True,
        )
        self._reply: Reply | None = None  # Until its last byte has arrived.
        self._alarm: asyncio.TimerHandle | None = None
        self._ending: asyncio.TimerHandle | None = None  # From the last event to the answer's end.
        self._active_at = 0.0  # Last data of a stream, the start of another request, or its end.
        self._timeout_s: float | None = None  # Of the last request.
        self._has_length = False  # The end of the answer does not close the connection.
        self._num_unused = 0  # Bytes since the last complete head or part of a body.

    def send(
        self, head: bytes, body: bytes, on_event: OnEvent | None, timeout_s: float | None
    ) -> Reply:
        """Send a request on an idle connection. `timeout_s`: see `ServerConnections.send`."""
        assert self._transport is not None
        assert self._reply is None
        self._active_at = self._loop.time()
        self._reply = reply = Reply(self, on_event)
        if len(body) < _LARGE_BODY:
            self._transport.write(head + body)
        else:
            self._transport.writelines((head, body))
        if self._alarm is not None and timeout_s != self._timeout_s:
            self._alarm.cancel()
            self._alarm = None
        self._timeout_s = timeout_s
        if self._alarm is None and timeout_s is not None:
            self._alarm = self._loop.call_later(timeout_s, self._on_alarm)
        return reply

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def expect_end(self) -> None:
        """The rest of the answer has no use."""
        self._ending = self._loop.call_later(_END_S, self.abort)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._transport.is_closing()

    @property
    def idle_since(self) -> float:
        return self._active_at

    # Callbacks of the transport.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        reply = self._reply
        if reply is None:  # Data that was not asked for.
            self.abort()
            return
        if reply.is_stream:
            self._active_at = self._loop.time()
        self._num_unused += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(f"the answer is not HTTP: {error}")
            self.abort()
            return
        if self._num_unused > _MAX_HEAD:
            self._fail(f"the headers of the answer have more than {_MAX_HEAD} bytes")
            self.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._alarm, self._ending):
            if timer is not None:
                timer.cancel()
        self._pool.discard(self)
        if self._reply is not None and not self._has_length and self._reply.status and exc is None:
            self._reply.finish(self._error_of(self._reply))  # The end of the connection ends it.
        self._fail(str(exc or "the server closed the connection"))

    def _on_alarm(self) -> None:
        self._alarm = None
        if self._reply is None or self._timeout_s is None:
            return
        rest_s = self._active_at + self._timeout_s - self._loop.time()
        if rest_s > 0:
            self._alarm = self._loop.call_later(rest_s, self._on_alarm)
        else:
            self._fail(f"no data for {self._timeout_s:g} s")
            self.abort()

    def _fail(self, reason: str) -> None:
        if self._reply is not None:
            self._reply.finish(Unavailable(f"no answer from {self._pool.base_url}: {reason}"))
            self._reply = None

    # Callbacks of the parser.

    def on_message_begin(self) -> None:
        if self._reply is None:  # An answer that was not asked for. The next request must not
            self.abort()  # receive it.

    def on_header(self, name: bytes, value: bytes) -> None:
        reply = self._reply
        if reply is not None and not reply.status:  # Trailers are not read.
            reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._num_unused = 0
        if (reply := self._reply) is None:
            return
        headers = reply.headers
        self._has_length = "content-length" in headers or (
            headers.get("transfer-encoding", "").lower().endswith("chunked")
        )
        reply.begin(self._parser.get_status_code())
        encoding = headers.get("content-encoding", "identity")
        if 200 <= reply.status < 300 and encoding != "identity":
            reply.finish(InternalError(f"{self._pool.base_url} sent an answer in {encoding}"))
            self.abort()

    def on_body(self, body: bytes) -> None:
        self._num_unused = 0
        if self._reply is not None:
            self._reply.feed(body)

    def on_message_complete(self) -> None:
        reply = self._reply
        if reply is None:
            return
        if reply.status < 200:  # Another answer follows.
            reply.headers.clear()
            reply.status = 0
            return
        self._reply = None
        if self._ending is not None:
            self._ending.cancel()
        reply.finish(self._error_of(reply))
        if not self.is_open:
            return
        assert self._transport is not None
        if self._parser.should_keep_alive() and not self._transport.get_write_buffer_size():
            self._active_at = self._loop.time()
            self._pool.release(self)
        else:
            self.abort()  # `close` would first send the rest of the request.

    def _error_of(self, reply: Reply) -> Exception | None:
        """The error of a complete answer."""
        if 300 <= reply.status < 400:
            location = reply.headers.get("location")
            return Unavailable(f"{self._pool.base_url} redirects to {location}")
        if reply.status < 400:
            return None
        try:
            self._pool.decode(reply)
        except Exception as error:  # noqa: BLE001 - it is raised by `end`
            return error
        return None


@cache
def _system_tls() -> ssl.SSLContext:
    """The settings of TLS with the certificates of the system. Loading them takes 20 ms."""
    return ssl.create_default_context()


class ServerConnections:
    """Keep-alive connections to one server. Raises the errors of `Transport`."""

    def __init__(
        self,
        base_url: str,
        *,
        read_error: ErrorReader,
        bearer_token: str | None = None,
        headers: Mapping[str, str] | None = None,
        query: str = "",
        tls: ssl.SSLContext | None = None,
        timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        """`headers` and `query` are sent with each request. `tls`: for `https://`. None: the
        certificates of the system are trusted. `timeout_s`: of `post` and `stream`."""
        parts = urlsplit(base_url)
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._host = parts.hostname or ""
        self._port = parts.port or _PORTS[parts.scheme]
        self._path = parts.path.rstrip("/")
        self._query = query
        self._is_tls = parts.scheme == "https"
        self._tls = tls
        self._read_error = read_error
        self._bearer = bearer_token
        host = parts.netloc.rpartition("@")[2]
        fixed = {"Host": host, "Content-Type": "application/json", "Accept": "*/*"}
        fixed |= {"Accept-Encoding": "identity", "User-Agent": "parrot", **(headers or {})}
        self._head = "".join(f"{name}: {value}\r\n" for name, value in fixed.items())
        self._idle: list[_Connection] = []  # The most recently used one is the last.
        self._open: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in list(self._open):
            connection.abort()

    async def post(self, path: str, body: Any, origin: Origin = _NO_CLIENT) -> Any:
        """Send a request and return the decoded JSON answer."""
        reply = await self.send("POST", path, body, None, origin, self._timeout_s)
        await reply.end()
        return self.decode(reply)

    async def stream(
        self, path: str, body: Any, on_event: OnEvent, origin: Origin = _NO_CLIENT
    ) -> Reply:
        """Send a request and wait for its first event. `on_event` receives all events. An error of
        `on_event` fails the answer. The caller must `end` or `cancel` the answer."""
        reply = await self.send("POST", path, body, on_event, origin, self._timeout_s)
        await reply.first()
        return reply

    async def send(
        self,
        method: str,
        path: str,
        body: Any,
        on_event: OnEvent | None,
        origin: Origin,
        timeout_s: float | None,
    ) -> Reply:
        """Send a request. `on_event`: see `stream`. `timeout_s`: seconds for a whole answer, or
        between two chunks of a stream. None: no limit. The caller must `end` or `cancel` the
        answer."""
        raw = encode_body(body) or b""
        target = f"{self._path}{path}{self._query}"
        head = f"{method} {target} HTTP/1.1\r\n{self._head}Content-Length: {len(raw)}\r\n"
        if (token := origin.bearer or self._bearer) is not None:
            if not (token.isascii() and token.isprintable()):
                raise InvalidRequest("the API key cannot be sent in a header")
            head += f"Authorization: Bearer {token}\r\n"
        given = origin.traceparent
        if given and (span := TraceParent.parse(given)) is not None:
            head += f"traceparent: {span}\r\n"
        if origin.request_id:
            head += f"X-Request-Id: {origin.request_id}\r\n"
        connection = self._take_idle() or await self._connect()
        return connection.send(f"{head}\r\n".encode("latin-1"), raw, on_event, timeout_s)

    def decode(self, reply: Reply) -> Any:
        """The JSON of a complete answer. Raises the server's error."""
        return decode_answer(
            reply.body, reply.status, reply.headers, self.base_url, self._read_error
        )

    def release(self, connection: _Connection) -> None:
        """The connection can serve another request."""
        self._idle.append(connection)
        if self._sweep is None:
            loop = asyncio.get_running_loop()
            self._sweep = loop.call_later(_MAX_IDLE_S, self._close_idle)

    def discard(self, connection: _Connection) -> None:
        """The connection is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweep = None
        oldest = loop.time() - _MAX_IDLE_S
        for connection in [one for one in self._idle if one.idle_since <= oldest]:
            self._idle.remove(connection)
            connection.abort()
        if self._idle:
            rest_s = self._idle[0].idle_since - oldest
            self._sweep = loop.call_later(rest_s, self._close_idle)

    def _take_idle(self) -> _Connection | None:
        while self._idle:
            if (connection := self._idle.pop()).is_open:
                return connection
        return None

    async def _connect(self) -> _Connection:
        if self._is_tls and self._tls is None:
            self._tls = await asyncio.to_thread(_system_tls)
        try:
            addresses = await self._addresses()
            for number, address in enumerate(addresses, 1):
                try:
                    async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                        return await self._connect_to(address)
                except OSError:
                    if number == len(addresses):
                        raise
        except OSError as error:
            reason = str(error) or type(error).__name__
            raise Unreachable(f"no answer from {self.base_url}: {reason}") from error
        raise Unreachable(f"no answer from {self.base_url}: the host has no address")

    async def _addresses(self) -> Sequence[Any]:
        if is_address(self._host):  # The event loop would start a thread.
            return socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        loop = asyncio.get_running_loop()
        return await loop.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)

    async def _connect_to(self, address: Any) -> _Connection:
        loop = asyncio.get_running_loop()
        sock = keepalive_socket(address)
        try:
            sock.setblocking(False)
            await loop.sock_connect(sock, address[4])
            _, connection = await loop.create_connection(
                lambda: _Connection(self),
                sock=sock,
                ssl=self._tls if self._is_tls else None,
                server_hostname=self._host if self._is_tls else None,
            )
        except BaseException:
            sock.close()
            raise
        self._open.add(connection)
        return connection
