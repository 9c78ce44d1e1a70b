"""Outputs that come in pieces."""

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from parrot.protocol.engine_api import GenerateResponse, StreamChunk
from parrot.protocol.errors import Unavailable
from parrot.protocol.transport import Transport, read_answer, until_done

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


async def followed(http: Transport, context_id: int) -> AsyncGenerator[StreamChunk]:
    """The chunks of an output that `/generate` was asked for, from its first token to its end."""
    body = {"context_id": context_id}
    async with aclosing(until_done(http.stream("POST", "/follow", body=body))) as events:
        async for name, data in events:
            if name == "chunk":
                yield read_answer(StreamChunk, data)


class Sink:
    """Takes the pieces of one output for `on_chunk`, and knows how much that was given."""

    def __init__(self, on_chunk: OnChunk) -> None:
        self._on_chunk = on_chunk
        self._num_ids = 0
        self._num_chars = 0

    def take(self, chunk: StreamChunk) -> None:
        self._num_ids += len(chunk.ids)
        self._num_chars += len(chunk.text)
        self._on_chunk(chunk)

    async def take_rest(self, chunks: AsyncGenerator[StreamChunk]) -> None:
        """Take, of the output's chunks from its beginning, what has not been given."""
        num_ids, num_chars = self._num_ids, self._num_chars
        async with aclosing(chunks):
            async for chunk in chunks:
                rest = _behind(chunk, num_ids, num_chars)
                num_ids = max(0, num_ids - len(chunk.ids))
                num_chars = max(0, num_chars - len(chunk.text))
                if rest.ids or rest.text:
                    self.take(rest)


def _behind(chunk: StreamChunk, num_ids: int, num_chars: int) -> StreamChunk:
    """The chunk without so many of its first tokens, and of its first characters."""
    logprobs = None if chunk.logprobs is None else chunk.logprobs.part(num_ids)
    return StreamChunk(ids=chunk.ids[num_ids:], text=chunk.text[num_chars:], logprobs=logprobs)
