"""The one HTTP client of all tiers.

aiohttp is imported when the first client is made, so that `import parrot` stays fast."""

import io
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import orjson

from parrot.protocol.errors import Unavailable
from parrot.protocol.transport import (
    ErrorReader,
    decode_answer,
    encode_body,
    own_error,
    parse_events,
)

if TYPE_CHECKING:
    import aiohttp

_JSON_HEADERS = {"Content-Type": "application/json"}
_LARGE_BODY = 2**20  # aiohttp sends larger ones in pieces, so that the event loop stays free


class HttpClient:
    """The `Transport` over HTTP: keep-alive connections to one server."""

    def __init__(
        self,
        base_url: str,
        *,
        bearer_token: str | None = None,
        max_connections: int = 0,
        headers: Mapping[str, str] | None = None,
        read_error: ErrorReader = own_error,
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
        """See `Transport`. TCP keep-alive notices when the peer's host is gone."""
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
                return self._decode(await response.read(), response.status, response.headers)
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
        """See `Transport`."""
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
        """Do as `stream`, for servers whose events are not all JSON."""
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
                async for event in parse_events(response.content.iter_any()):
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
        return decode_answer(raw, status, headers, self.base_url, self._read_error)

    def _unreachable(self, error: BaseException) -> Unavailable:
        reason = str(error) or type(error).__name__
        return Unavailable(f"no answer from {self.base_url}: {reason}")


def _encode(body: Any) -> bytes | io.BytesIO | None:
    raw = encode_body(body)
    return raw if raw is None or len(raw) < _LARGE_BODY else io.BytesIO(raw)


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
