"""A channel of an engine: one stream on which the pieces of all outputs come."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import aclosing, contextmanager

from parrot.protocol.errors import NotFound, ParrotError, Unavailable
from parrot.protocol.streams.payloads import ChannelChunks, ContextChunk
from parrot.protocol.streams.pieces import OnChunk, Sink, followed
from parrot.protocol.transport import Transport, read_answer, until_done
from parrot.utils.ids import new_token
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)


class ChunkChannel:
    """It is opened when it is first needed, and anew after it broke: the outputs of that time are
    followed each by itself."""

    def __init__(self, http: Transport) -> None:
        self._http = http
        self._tasks = TaskSet()
        self._opened: asyncio.Future[str | None] | None = None  # until it breaks
        self._sinks: dict[int, Sink] = {}
        self._followers: dict[int, asyncio.Task[None]] = {}  # of outputs whose channel broke

    async def open(self) -> str | None:
        """Its name; None if the engine has no channels. Raises what opening it raises."""
        if self._opened is None:
            self._opened = asyncio.get_running_loop().create_future()
            self._tasks.spawn(self._run(self._opened), name="channel of an engine")
        return await asyncio.shield(self._opened)

    @contextmanager
    def sending(self, context_id: int, on_chunk: OnChunk) -> Iterator[None]:
        """In the block, pieces of the output on this context are given to `on_chunk`."""
        self._sinks[context_id] = Sink(on_chunk)
        try:
            yield
        finally:
            self._sinks.pop(context_id, None)
            if (follower := self._followers.pop(context_id, None)) is not None:
                follower.cancel()

    async def close(self) -> None:
        await self._tasks.close()

    async def _run(self, opened: "asyncio.Future[str | None]") -> None:
        broken: ParrotError = Unavailable("a channel ended before it was open")
        try:
            await self._read(opened)
        except ParrotError as error:
            if isinstance(error, NotFound) and not opened.done():
                opened.set_result(None)
                return  # and it is not asked for again
            broken = error
        except asyncio.CancelledError:
            opened.cancel()
            raise
        if opened.done():
            logger.warning("a channel broke: %s", broken.message)
        else:
            opened.set_exception(broken)
            opened.exception()  # for whoever waits, if anybody still does
        self._opened = None
        sinks, self._sinks = self._sinks, {}
        for context_id, sink in sinks.items():
            follower = self._tasks.spawn(self._follow(context_id, sink), name="follower")
            self._followers[context_id] = follower

    async def _follow(self, context_id: int, sink: Sink) -> None:
        try:
            await sink.take_rest(followed(self._http, context_id))
        except (ParrotError, ValueError) as error:
            logger.info("the rest of an output comes at its end: %s", error)

    async def _read(self, opened: "asyncio.Future[str | None]") -> None:
        name = new_token()
        stream = self._http.stream("POST", "/channel", body={"channel": name})
        async with aclosing(until_done(stream)) as events:
            async for event, data in events:
                if event == "open" and not opened.done():
                    opened.set_result(name)
                elif event == "chunks":
                    for chunk in read_answer(ChannelChunks, data).chunks:
                        self._give(chunk)

    def _give(self, chunk: ContextChunk) -> None:
        sink = self._sinks.get(chunk.context_id)
        if sink is None:  # its request has ended
            return
        try:
            sink.take(chunk)
        except Exception:
            logger.exception("a piece of an output could not be taken")
            self._sinks.pop(chunk.context_id, None)
