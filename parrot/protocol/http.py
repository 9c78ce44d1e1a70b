"""The one HTTP client of all tiers: JSON both ways, typed errors, server-sent events.

aiohttp is imported when the first client is made, so that `import parrot` stays fast."""

import io
import socket
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from parrot.protocol.errors import (
    InternalError,
    InvalidRequest,
    ParrotError,
    Unavailable,
    error_from_payload,
)

if TYPE_CHECKING:
    import aiohttp

_JSON_HEADERS = {"Content-Type": "application/json"}
_MAX_SSE_EVENT = 64 * 2**20
_LARGE_BODY = 2**20  # aiohttp sends larger ones in pieces, so that the event loop stays free

ErrorReader = Callable[[Any, int, Mapping[str, str]], ParrotError]
"""The error meant by an answer's decoded body (None: not JSON), status and headers."""


def _own_error(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
    return error_from_payload(payload, status)


class HttpClient:
    """Keep-alive connections to one server. Use from one event loop; close when done.

    Raises `Unavailable` when the server cannot be reached or the connection breaks, and the
    server's own error (errors.py) for any status of 400 and above."""

    def __init__(
        self,
        base_url: str,
        *,
        bearer_token: str | None = None,
        max_connections: int = 0,
        headers: Mapping[str, str] | None = None,
        read_error: ErrorReader = _own_error,
    ) -> None:
        """`max_connections` 0 means no limit. `headers` go with every request. `read_error` is for
        servers that are not ours."""
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        if bearer_token:
            self._headers["Authorization"] = f"Bearer {bearer_token}"
        self._max_connections = max_connections
        self._read_error = read_error
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        timeout_s: float | None = 30.0,
    ) -> Any:
        """One exchange; returns the decoded JSON answer. `timeout_s` None waits as long as the
        peer's host is alive (TCP keep-alive notices a dead one). `body`: orjson-serialisable."""
        import aiohttp

        try:
            async with self._client().request(
                method,
                self.base_url + path,
                params=params,
                data=_encode(body),
                headers=_JSON_HEADERS if body is not None else None,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=5.0),
            ) as response:
                raw = await response.read()
                return self._decode(raw, response.status, response.headers)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    async def stream(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        idle_timeout_s: float = 60.0,
    ) -> AsyncGenerator[tuple[str, Any], None]:
        """Server-sent events as (event name, decoded data). Keep-alive comments are skipped, but
        silence of more than `idle_timeout_s` (servers send one every 15 s) is `Unavailable`.

        The end of the body is only the end of iteration: the caller must insist on the protocol's
        final event, since a broken server may close in the middle."""
        raw_events = self.stream_raw(
            method, path, params=params, body=body, idle_timeout_s=idle_timeout_s
        )
        async with aclosing(raw_events):
            async for name, data in raw_events:
                yield name, orjson.loads(data)

    async def stream_raw(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, str] | None = None,
        body: Any = None,
        idle_timeout_s: float = 60.0,
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """As `stream`, for servers whose events are not all JSON."""
        import aiohttp

        try:
            async with self._client().request(
                method,
                self.base_url + path,
                params=params,
                data=_encode(body),
                headers=_JSON_HEADERS if body is not None else None,
                timeout=aiohttp.ClientTimeout(
                    total=None, sock_connect=5.0, sock_read=idle_timeout_s
                ),
            ) as response:
                if response.status >= 400:
                    self._decode(await response.read(), response.status, response.headers)
                async for event in _parse_events(response.content):
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from error

    def _client(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=self._max_connections, socket_factory=_keepalive_socket
                ),
                headers=self._headers,
                read_bufsize=2**20,
            )
        return self._session

    def _decode(self, raw: bytes, status: int, headers: Mapping[str, str]) -> Any:
        try:
            payload = orjson.loads(raw)
        except orjson.JSONDecodeError:
            if status < 400:
                raise InternalError(
                    f"{self.base_url} answered with something that is not JSON"
                ) from None
            payload = None
        if status >= 400:
            raise self._read_error(payload, status, headers)
        return payload

    def _unreachable(self, error: BaseException) -> Unavailable:
        reason = str(error) or type(error).__name__
        return Unavailable(f"no answer from {self.base_url}: {reason}")


def _encode(body: Any) -> bytes | io.BytesIO | None:
    if body is None:
        return None
    try:
        raw = orjson.dumps(body)
    except orjson.JSONEncodeError as error:
        raise InvalidRequest(f"the request cannot be sent as JSON: {error}") from None
    return raw if len(raw) < _LARGE_BODY else io.BytesIO(raw)


def _keepalive_socket(addr_info: tuple[Any, ...]) -> socket.socket:
    """A socket that notices a vanished peer host within about a minute, however long it waits."""
    family, kind, proto = addr_info[:3]
    sock = socket.socket(family=family, type=kind, proto=proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock


async def _parse_events(content: "aiohttp.StreamReader") -> AsyncIterator[tuple[str, bytes]]:
    """The part of the SSE format that servers of JSON use: `event`, `data` and comment lines, ended
    by LF or CRLF."""
    name, data = "message", b""
    pending = b""
    async for chunk in content.iter_any():
        *lines, pending = (pending + chunk).split(b"\n")
        if len(pending) > _MAX_SSE_EVENT:
            raise InternalError("an event of the stream is too large")
        for line in lines:
            if line.startswith(b"data:"):
                data += line[5:].removesuffix(b"\r")
            elif line.startswith(b"event:"):
                name = line[6:].strip().decode()
            elif data and line in (b"", b"\r"):
                yield name, data
                name, data = "message", b""
