"""Async client of an engine's API. ServeCore holds one per engine: the requests, and one channel on
which the pieces of all outputs come."""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import Any, NamedTuple, Self

from parrot.protocol.engine_api import (
    ChannelChunks,
    ContextChunk,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    FillRequest,
    FillResponse,
    FreeContextResponse,
    GenerateRequest,
    GenerateResponse,
    PingResponse,
    RuntimeInfo,
    ScoreRequest,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.errors import InvalidRequest, NotFound, ParrotError, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.transport import Transport, read_answer, until_done
from parrot.utils.ids import new_token
from parrot.utils.tasks import TaskSet

CORE_HEADER = "x-parrot-core"
REGISTRATION_HEADER = "x-parrot-registration"
_MAX_EPOCH = 2**63


OnChunk = Callable[[StreamChunk], None]
logger = logging.getLogger(__name__)


class CoreIdentity(NamedTuple):
    """One start of a ServeCore, as each of its requests to engines names it. A later one has a
    greater `epoch`."""

    epoch: int
    id: str

    @classmethod
    def new(cls, epoch: int | None = None) -> Self:
        """With this epoch, or that of this moment: milliseconds since 1970."""
        return cls(time.time_ns() // 1_000_000 if epoch is None else epoch, new_token())

    @property
    def header(self) -> str:
        return f"{self.epoch} {self.id}"

    @classmethod
    def parse(cls, header: str) -> Self:
        """Raises `InvalidRequest`."""
        epoch, _, name = header.partition(" ")
        if not epoch.isdecimal() or not epoch.isascii() or not name or len(header) > 256:
            raise InvalidRequest(f"`{CORE_HEADER}` must be an epoch and an id, not {header!r:.80}")
        if (number := int(epoch)) > _MAX_EPOCH:
            raise InvalidRequest(f"`{CORE_HEADER}` has too large an epoch")
        return cls(number, name)


class EngineClient:
    """One method per verb. A job is not bounded here by a timeout: the caller cancels it, by
    freeing its context or by closing the connection (cancelling the coroutine)."""

    def __init__(self, http: Transport) -> None:
        self._http = http
        self._channel = ChunkChannel(http)

    async def close(self) -> None:
        await self._channel.close()
        await self._http.close()

    async def fill(self, request: FillRequest) -> FillResponse:
        return read_answer(
            FillResponse,
            await self._http.request("POST", "/fill", body=dict(request), timeout_s=None),
        )

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """`on_chunk` is given the pieces of the output as they come, none twice; none but the
        last ones may be missing."""
        if on_chunk is None:
            return await self._generate(_generate_body(request))
        channel = await self._channel.open()
        if channel is None:
            return await hand_over(self.generate_stream(request), on_chunk)
        with self._channel.sending(request.context_id, on_chunk):
            return await self._generate(_generate_body(request) | {"channel": channel})

    async def _generate(self, body: dict[str, Any]) -> GenerateResponse:
        answer = await self._http.request("POST", "/generate", body=body, timeout_s=None)
        return read_answer(GenerateResponse, answer)

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse, None]:
        """Chunks as they are generated, then the whole as a GenerateResponse, always last. Close
        it to abort."""
        body = _generate_body(request)
        stream = self._http.stream("POST", "/generate_stream", body=body)
        async with aclosing(until_done(stream)) as events:
            async for name, data in events:
                if name == "chunk":
                    yield read_answer(StreamChunk, data)
                elif name == "done":
                    yield read_answer(GenerateResponse, data)

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk, None]:
        """The chunks of an output that `generate` was asked for, until it ends."""
        return followed(self._http, context_id)

    async def embed(self, request: EmbedRequest) -> EmbedResponse:
        return read_answer(
            EmbedResponse,
            await self._http.request("POST", "/embed", body=dict(request), timeout_s=None),
        )

    async def score(self, request: ScoreRequest) -> ScoreResponse:
        return read_answer(
            ScoreResponse,
            await self._http.request("POST", "/score", body=dict(request), timeout_s=None),
        )

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        """Free contexts and abort their jobs; returns the tokens they held."""
        body = {"context_ids": list(context_ids)}
        answer = await self._http.request("POST", "/free_context", body=body)
        return read_answer(FreeContextResponse, answer).context_len

    async def ping(self) -> RuntimeInfo:
        return (await self._ping()).runtime_info

    async def incarnation(self) -> str:
        """Which start of the engine it is that answers now."""
        return (await self._ping()).incarnation

    async def _ping(self) -> PingResponse:
        answer = await self._http.request("POST", "/ping", body={}, timeout_s=5.0)
        return read_answer(PingResponse, answer)

    async def tokenizer(self) -> TokenizerResponse:
        return read_answer(TokenizerResponse, await self._http.request("GET", "/tokenizer"))


def _generate_body(request: GenerateRequest) -> dict[str, Any]:
    """Give what `model_dump` would, ten to a hundred times faster: that visits every token id."""
    return dict(request) | {
        "drafts": None if request.drafts is None else dict(request.drafts),
        "fills": [dict(fill) for fill in request.fills],
        "sampling_config": request.sampling_config.model_dump(mode="json", exclude_defaults=True),
    }


def http_connect(
    cluster_token: str | None, identity: Callable[[], CoreIdentity]
) -> Callable[[EngineInfo], EngineClient]:
    """Engines are reached at the address that they register with, and told who asks."""

    def connect(info: EngineInfo) -> EngineClient:
        host = f"[{info.host}]" if ":" in info.host else info.host
        headers = {CORE_HEADER: identity().header}
        if info.registration:
            headers[REGISTRATION_HEADER] = info.registration
        url = f"http://{host}:{info.port}"
        return EngineClient(HttpClient(url, bearer_token=cluster_token, headers=headers))

    return connect


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
