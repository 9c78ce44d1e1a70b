"""The HTTP client of programs. It does not need aiohttp, whose import takes 0.1 s."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Unpack
from urllib.parse import quote, urlencode

from parrot.protocol.connections import OnEvent, Origin, Reply, ServerConnections
from parrot.protocol.errors import Unavailable
from parrot.protocol.transport import (
    IDLE_TIMEOUT_S,
    TIMEOUT_S,
    Options,
    RequestOptions,
    StreamOptions,
    own_error,
)

_FINAL = frozenset({"done", "error"})  # Events that end a stream of a Parrot server.


class ProgramClient:
    """The `Transport` to a Parrot server over HTTP, with keep-alive connections."""

    def __init__(self, base_url: str) -> None:
        """Raises `ValueError` for an invalid port."""
        self._connections = ServerConnections(base_url, read_error=own_error)

    async def close(self) -> None:
        await self._connections.close()

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """See `Transport`."""
        timeout_s = options.get("timeout_s", TIMEOUT_S)
        try:
            async with asyncio.timeout(timeout_s):
                reply = await self._send(method, path, options, None, None)
                await reply.end()
        except TimeoutError:
            text = f"no answer from {self._connections.base_url} within {timeout_s} s"
            raise Unavailable(text) from None
        return self._connections.decode(reply)

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """See `Transport`. The iteration also ends after an event `done` or `error`. Then the
        connection can serve another request."""
        events: asyncio.Queue[tuple[str, bytes] | None] = asyncio.Queue()

        def on_event(name: str, data: bytes) -> bool:
            events.put_nowait((name, data))
            return name in _FINAL

        idle_s = options.get("idle_timeout_s", IDLE_TIMEOUT_S)
        reply = await self._send(method, path, options, on_event, idle_s)
        reply.over.add_done_callback(lambda _: events.put_nowait(None))
        try:
            while (event := await events.get()) is not None:
                yield event
            await reply.end()
        finally:
            reply.cancel()

    async def _send(
        self,
        method: str,
        path: str,
        options: Options,
        on_event: OnEvent | None,
        idle_s: float | None,
    ) -> Reply:
        target = quote(path)
        if params := options.get("params"):
            target += f"?{urlencode(params)}"
        origin = Origin(
            options.get("traceparent", ""), options.get("request_id", ""), options.get("bearer")
        )
        body = options.get("body")
        return await self._connections.send(method, target, body, on_event, origin, idle_s)
