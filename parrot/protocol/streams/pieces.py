"""Outputs that come in pieces."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.errors import Unavailable

OnChunk = Callable[[StreamChunk], None]


async def hand_over(
    events: AsyncGenerator[StreamChunk | GenerateResponse], on_chunk: OnChunk
) -> GenerateResponse:
    """The result of a stream, whose chunks are given to `on_chunk`. Raises `Unavailable` if it ends
    without one."""
    async with aclosing(events):
        async for event in events:
            if isinstance(event, GenerateResponse):
                return event
            on_chunk(event)
    raise Unavailable("the stream ended without a result")
