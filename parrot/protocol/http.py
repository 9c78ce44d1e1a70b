"""The HTTP client of programs, ServeCore and engines.

The first request imports aiohttp, so that `import parrot` stays fast."""

import errno
import io
import socket
import sys
from collections.abc import AsyncGenerator, Mapping
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, Unpack

from parrot.protocol.errors import InternalError, Unavailable
from parrot.protocol.transport import (
    IDLE_TIMEOUT_S,
    TIMEOUT_S,
    ErrorReader,
    EventParser,
    Options,
    RequestOptions,
    StreamOptions,
    Unreachable,
    decode_answer,
    encode_body,
    own_error,
)
from parrot.utils.addresses import is_metadata
from parrot.utils.traceparent import TraceParent

if TYPE_CHECKING:
    import ssl

    import aiohttp

_MAX_ANSWER = 2**28  # Bytes of an answer. Enough for a tokenizer or thousands of embeddings.
_LARGE_BODY = 2**20  # Bytes from which aiohttp sends a body in chunks, without blocking the loop.


class HttpClient:
    """The `Transport` over HTTP, with keep-alive connections to one server."""

    def __init__(
        self,
        base_url: str,
        *,
        bearer_token: str | None = None,
        headers: Mapping[str, str] | None = None,
        read_error: ErrorReader = own_error,
        tls: "ssl.SSLContext | None" = None,
    ) -> None:
        """`headers` are sent with every request. `read_error` translates the errors of servers
        other than Parrot's. `tls`: for `https://`. None: the certificates of the system are
        trusted."""
        self.base_url = base_url.rstrip("/")
        self._headers = dict(headers or {})
        if bearer_token:
            self._headers["Authorization"] = f"Bearer {bearer_token}"
        self._read_error = read_error
        self._tls = tls
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

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """See `Transport`. TCP keep-alive detects a lost host."""
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        with self._own_errors():
            async with self._send(method, path, options, total_s=timeout_s) as response:
                return await self._decode(response)

    async def text(self, path: str, *, limit: int, timeout_s: float) -> str:
        """The first `limit` bytes of the text at `path`. Raises the errors of `request`."""
        raw = bytearray()
        with self._own_errors():
            async with self._send("GET", path, {}, total_s=timeout_s) as response:
                if response.status >= 300:
                    await self._decode(response)
                async for chunk in response.content.iter_any():
                    raw += chunk
                    if len(raw) >= limit:
                        break
        return raw[:limit].decode(errors="replace")

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """See `Transport`."""
        idle_s = options.get("idle_timeout_s", IDLE_TIMEOUT_S)
        parser = EventParser()
        with self._own_errors():
            async with self._send(method, path, options, idle_s=idle_s) as response:
                if response.status >= 300:
                    await self._decode(response)
                while chunk := await response.content.readany():
                    for event in parser.feed(chunk):
                        yield event

    def _own_errors(self) -> "_OwnErrors":
        return _OwnErrors(self.base_url)

    def _send(
        self,
        method: str,
        path: str,
        options: Options,
        *,
        total_s: float | None = None,
        idle_s: float | None = None,
    ) -> "AbstractAsyncContextManager[aiohttp.ClientResponse]":
        """One request, and its response in the block."""
        import aiohttp

        raw, bearer = encode_body(options.get("body")), options.get("bearer")
        headers = {} if raw is None else {"Content-Type": "application/json"}
        if bearer is not None:
            headers["Authorization"] = f"Bearer {bearer}"
        if (given := options.get("traceparent")) and (span := TraceParent.parse(given)):
            headers["traceparent"] = str(span)
        if request_id := options.get("request_id"):
            headers["X-Request-Id"] = request_id
        return self._client().request(
            method,
            self.base_url + path,
            params=options.get("params"),
            data=raw if raw is None or len(raw) < _LARGE_BODY else io.BytesIO(raw),
            headers=headers,
            timeout=aiohttp.ClientTimeout(total_s, sock_read=idle_s, sock_connect=5.0),
            allow_redirects=False,  # A redirect would send prompts and keys to another server.
        )

    def _client(self) -> "aiohttp.ClientSession":
        if self._session is None:
            import aiohttp

            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(
                    limit=0,  # No limit.
                    socket_factory=keepalive_socket,
                    ssl=True if self._tls is None else self._tls,
                ),
                headers=self._headers,
                read_bufsize=2**20,
            )
        return self._session

    async def _read(self, response: "aiohttp.ClientResponse") -> bytes:
        """The body of the answer. Raises `InternalError` if it is larger than 256 MiB, also after
        decompression."""
        size = response.content_length
        if size is not None and size <= _MAX_ANSWER and "Content-Encoding" not in response.headers:
            return await response.read()
        raw = bytearray()
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > _MAX_ANSWER:
                text = f"{self.base_url} answered with more than {_MAX_ANSWER} bytes"
                raise InternalError(text)
        return bytes(raw)

    async def _decode(self, response: "aiohttp.ClientResponse") -> Any:
        if 300 <= response.status < 400:
            raise Unavailable(f"{self.base_url} redirects to {response.headers.get('Location')}")
        raw = await self._read(response)
        return decode_answer(
            raw, response.status, response.headers, self.base_url, self._read_error
        )


class _OwnErrors:
    """Raises `Unreachable` or `Unavailable` in place of aiohttp's errors in the block."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            return
        import aiohttp

        if not isinstance(error, aiohttp.ClientError | OSError | TimeoutError):
            return
        cause = error.os_error if isinstance(error, aiohttp.ClientConnectorError) else error
        text = f"no answer from {self._base_url}: {str(cause) or type(error).__name__}"
        if isinstance(error, aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError):
            raise Unreachable(text) from error
        raise Unavailable(text) from error


def keepalive_socket(addr_info: tuple[Any, ...]) -> socket.socket:
    """A socket that detects a lost peer host within about 1 min, even while a request waits."""
    family, kind, proto, _, address = addr_info
    if is_metadata(address[0]):  # A DNS name may resolve to this address.
        raise OSError(errno.EACCES, f"{address[0]} is a metadata service's address")
    sock = socket.socket(family=family, type=kind, proto=proto)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    return sock
