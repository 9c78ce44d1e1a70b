"""A transport for requests of one kind, which share the connections of a transport with others."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Unpack

from parrot.protocol.transport import RequestOptions, StreamOptions, Transport


class LimitedTransport:
    """At most `limit` requests and streams at a time. Others wait, so requests of one kind cannot
    delay requests of another kind."""

    def __init__(self, http: Transport, limit: int) -> None:
        self._http = http
        self._slots = asyncio.Semaphore(limit)

    async def request(self, method: str, path: str, **options: Unpack[RequestOptions]) -> Any:
        """See `Transport`. `timeout_s` starts when the request is sent."""
        async with self._slots:
            return await self._http.request(method, path, **options)

    async def stream(
        self, method: str, path: str, **options: Unpack[StreamOptions]
    ) -> AsyncGenerator[tuple[str, bytes], None]:
        """See `Transport`."""
        async with self._slots, aclosing(self._http.stream(method, path, **options)) as events:
            async for event in events:
                yield event

    async def close(self) -> None:
        await self._http.close()
