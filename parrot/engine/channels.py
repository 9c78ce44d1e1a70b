"""Channels: streams of one client on which the pieces of many outputs come."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from functools import partial
from typing import Any

from parrot.protocol.engine_api import GenerateRequest, StreamChunk
from parrot.protocol.errors import Conflict


class Channels:
    """The channels that are open, by name."""

    def __init__(self) -> None:
        self._open: dict[str, _Channel] = {}

    async def follow(self, name: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """The events of a channel, which is open until this is closed, or `close` is called. Raises
        `Conflict` if it is open already."""
        if name in self._open:
            raise Conflict(f"channel `{name}` is open already", param="channel")
        channel = self._open[name] = _Channel()
        try:
            yield "open", {}
            while chunks := await channel.take():
                yield "chunks", {"chunks": chunks}
            yield "done", {}
        finally:
            del self._open[name]
            channel.close()

    def close(self) -> None:
        """End all that are open."""
        for channel in self._open.values():
            channel.close()

    def sink(self, request: GenerateRequest) -> Callable[[StreamChunk], None] | None:
        """Where the pieces of its output go; None if its channel is not open."""
        channel = self._open.get(request.channel)
        return None if channel is None else partial(channel.put, request.context_id)


class _Channel:
    """Keeps what is put until somebody takes it, so that a reader that lags gets more at once."""

    def __init__(self) -> None:
        self._chunks: list[dict[str, Any]] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    def put(self, context_id: int, chunk: StreamChunk) -> None:
        if self._is_closed:
            return
        # Most have no log probabilities, and then this is ten times faster than `model_dump`.
        is_plain = chunk.logprobs is None
        fields = {"ids": chunk.ids, "text": chunk.text} if is_plain else chunk.model_dump()
        self._chunks.append({"context_id": context_id} | fields)
        self._filled.set()

    async def take(self) -> list[dict[str, Any]]:
        """Everything that was put since the last time, when there is something; nothing once it is
        closed."""
        await self._filled.wait()
        self._filled.clear()
        chunks, self._chunks = self._chunks, []
        return chunks

    def close(self) -> None:
        self._is_closed = True
        self._chunks.clear()
        self._filled.set()
