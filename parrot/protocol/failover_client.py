"""A client of several servers, of which only one serves at a time. It detects servers that hang."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, TypeVar, Unpack

from parrot.protocol.errors import Standby, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.transport import RequestOptions, StreamOptions, Transport, Unreachable

_PATIENCE_S = 30.0  # Seconds for which a request tries the servers in turn.
_PAUSE_S = 0.25  # Seconds of pause after each round through all servers.
_PROBE_S = 1.0  # Seconds between health probes during a request.
_PROBE_TIMEOUT_S = 1.5  # Seconds without an answer to a probe after which a server hangs.
_AVOIDED_S = 5.0  # Seconds for which other servers are preferred to a server that hung.


T = TypeVar("T")


class LivenessProbe:
    """Detects a server that hangs: connections stay open, but no answer comes.

    `ask` returns if the server is alive, and raises the error for pending reads if not. All pending
    reads share its calls, at most one per `interval_s` seconds."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._probe: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    async def guard(self, read: Awaitable[T]) -> T:
        """Wait for `read` while the server is alive. Cancelling `guard` cancels `read`."""
        task = asyncio.ensure_future(read)
        try:
            while not (await asyncio.wait((task,), timeout=self._interval_s))[0]:
                now = asyncio.get_running_loop().time()
                if self._probe is None or now - self._asked_at >= self._interval_s:
                    self._asked_at = now
                    self._probe = asyncio.ensure_future(self._ask())
                await asyncio.shield(self._probe)
            return task.result()
        finally:
            task.cancel()


class _Server:
    def __init__(self, http: Transport) -> None:
        self.http = http
        self.liveness = LivenessProbe(self._ask, _PROBE_S)
        self._avoided_until = 0.0

    @property
    def is_avoided(self) -> bool:
        """Whether the server hung less than 5 s ago. Another attempt would probably time out."""
        return asyncio.get_running_loop().time() < self._avoided_until

    async def _ask(self) -> None:
        try:
            await self.http.request("GET", "/health", timeout_s=_PROBE_TIMEOUT_S)
        except Unavailable:
            self._avoided_until = asyncio.get_running_loop().time() + _AVOIDED_S
            raise


class FailoverClient:
    """The `Transport` to several ServeCores with one journal, of which one serves at a time.

    A request goes to the server that answered last. If that server cannot have executed the request
    (no connection, standby, or a GET), the next server is tried, for up to 30 s. Otherwise
    `Unavailable` is raised, and later requests go to the next server. Health probes detect a server
    that hangs, except during streams."""

    def __init__(self, servers: Sequence[Transport]) -> None:
        self._servers = [_Server(server) for server in servers]
        self._current = 0

    async def close(self) -> None:
        for server in self._servers:
            await server.http.close()

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """See `Transport`."""
        tries = _Tries(len(self._servers))
        while True:
            server = self._servers[self._current]
            try:
                return await server.liveness.guard(server.http.request(method, path, **options))
            except Unavailable as error:
                self._leave(server, error)
                await tries.go_on(error, is_read=method == "GET")

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """See `Transport`."""
        tries = _Tries(len(self._servers))
        has_begun = False
        while True:
            server = self._servers[self._current]
            try:
                async with aclosing(server.http.stream(method, path, **options)) as events:
                    async for event in events:
                        has_begun = True
                        yield event
                return
            except Unavailable as error:
                self._leave(server, error)
                if has_begun:
                    raise
                await tries.go_on(error, is_read=method == "GET")

    def _leave(self, server: _Server, error: Unavailable) -> None:
        """Use another server from now on, unless the error is an answer of a serving server."""
        if (
            type(error) in (Unavailable, Unreachable, Standby)
            and server is self._servers[self._current]
        ):
            count = len(self._servers)
            others = [(self._current + step) % count for step in range(1, count + 1)]
            self._current = min(others, key=lambda i: self._servers[i].is_avoided)


class _Tries:
    """The attempts of one request, with a pause after each round through all servers."""

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._num = 0
        self._until = asyncio.get_running_loop().time() + _PATIENCE_S

    async def go_on(self, error: Unavailable, *, is_read: bool) -> None:
        """Raise the error unless another attempt is allowed. May sleep."""
        is_safe = isinstance(error, Standby | Unreachable) or (
            is_read and type(error) is Unavailable
        )
        if not is_safe or asyncio.get_running_loop().time() > self._until:
            raise error
        self._num += 1
        if self._num % self._num_servers == 0:
            await asyncio.sleep(_PAUSE_S)


def client_of(
    urls: Sequence[str], make: Callable[..., Transport] = HttpClient, **options: Any
) -> Transport:
    """The transport to a service with these URLs. `make` makes the client of a URL. It receives
    the `options`."""
    servers = [make(url, **options) for url in urls]
    return servers[0] if len(servers) == 1 else FailoverClient(servers)
