"""The HTTP API of an engine of any type.

It rejects requests of ServeCores that the engine no longer serves, restores the order of requests,
and sends chunks of outputs on channels."""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI, Request
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.engine.config import EngineConfig
from parrot.engine.metrics import Ended, EngineMetrics, log_ended, observe_request
from parrot.engine.service import EngineService, ServiceState
from parrot.protocol.answers import (
    Guard,
    Layer,
    create_base_app,
    error_response,
    own_layers,
)
from parrot.protocol.endpoint import PEER_BODY, Access, Described, Endpoint, require_cluster_token
from parrot.protocol.engine_api import (
    NO_PARENT,
    ChannelRequest,
    EmbedRequest,
    EmbedResponse,
    FillPiece,
    FillRequest,
    FillResponse,
    FollowRequest,
    FollowResponse,
    FreeContextRequest,
    FreeContextResponse,
    GenerateRequest,
    GenerateResponse,
    JobRequest,
    PingResponse,
    ScoreRequest,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import CORE_HEADER, REGISTRATION_HEADER, CoreIdentity
from parrot.protocol.errors import (
    Cancelled,
    Conflict,
    NotFound,
    ParrotError,
    StaleCore,
    Unavailable,
)
from parrot.protocol.openapi import install
from parrot.utils.clock import Clock
from parrot.utils.ids import new_token

if TYPE_CHECKING:
    from parrot.engine.traces import EngineTracer

_MAX_CALLS = 65_536  # The fence keeps the latest attempts of at most this number of retried calls.


# A request waits at most this long, in seconds, for the request that creates its parent context.
GRACE_S = 5.0
_Wanted = Sequence[FillPiece | GenerateRequest]


MAX_BODY_SIZE = 64 * 2**20  # Largest request body, in bytes: prompts of millions of token ids.
_ERRORS = (401, 404, 409, 413, 429, 499, 502, 503)
_DESCRIBED = Described(_ERRORS)
_EVENTS = Described(_ERRORS, media_type="text/event-stream")


class Fence:
    """Rejects requests of ServeCores other than the one that the engine is registered with.

    During a registration a ServeCore with a later epoch is accepted, because its first request may
    arrive before its answer. Requests that name no ServeCore are always accepted."""

    # Requests of an earlier registration are rejected, because no ServeCore would free the contexts
    # that they create.

    def __init__(self) -> None:
        self.era = 0  # A request that arrives in one era must not be submitted in a later era.
        # (session id, task id) -> the latest attempt, if it is not the first.
        self._attempts: OrderedDict[tuple[int, int], int] = OrderedDict()
        self._owner: CoreIdentity | None = None
        self._is_registered = False
        self.registration = ""  # Name of the current or pending registration; empty for none.
        self.answer: asyncio.Event | None = None  # Set once the pending registration is answered.

    def begin_registration(self) -> str:
        """Start a registration and return its name. Call `end_registration` afterwards."""
        self.registration = new_token()
        self.answer = asyncio.Event()
        return self.registration

    def end_registration(self) -> None:
        """The registration was accepted or rejected. Requests that wait for it continue."""
        if self.answer is not None:
            self.answer.set()
            self.answer = None

    def registered(self, owner: CoreIdentity) -> None:
        self._owner, self._is_registered = owner, True

    def released(self) -> None:
        """Reject requests of all previously registered ServeCores."""
        self._is_registered, self.registration = False, ""
        self.begin_era()

    def begin_era(self) -> None:
        """Reject requests that arrived before this call and are not submitted yet."""
        self.era += 1
        self._attempts.clear()

    def check(self, request: Request) -> None:
        """Raise `StaleCore` if the request's ServeCore or registration is not the current one."""
        if named := request.headers.get(CORE_HEADER):
            self.admit(CoreIdentity.parse(named))
        if request.headers.get(REGISTRATION_HEADER, self.registration) != self.registration:
            raise StaleCore("this engine has registered again, or is about to")

    def admit(self, asking: CoreIdentity) -> None:
        """Raise `StaleCore` if the engine does not serve this ServeCore."""
        owner = self._owner
        if owner is None or asking == owner:
            return
        if self._is_registered or asking.epoch <= owner.epoch:
            raise StaleCore("this engine belongs to another ServeCore, or a later start of it")

    def check_submission(self, request: JobRequest, era: int) -> None:
        """Check a request that arrived in `era`, right before it is submitted.

        Raises `StaleCore` if a new era has begun, and `Cancelled` if a later attempt of the call
        has arrived."""
        if era != self.era:
            raise StaleCore("this engine has registered again since the request arrived")
        if not request.attempt:
            return
        call = request.session_id, request.task_id
        latest = self._attempts.get(call, 0)
        if request.attempt < latest:
            raise Cancelled(f"attempt {request.attempt} is outdated: attempt {latest} has started")
        if request.attempt == 1:
            return  # No attempt is earlier, so there is nothing to record.
        self._attempts[call] = request.attempt
        self._attempts.move_to_end(call)
        if len(self._attempts) > _MAX_CALLS:
            self._attempts.popitem(last=False)


class ReorderBuffer:
    """Restores the order of requests that overtake each other on different connections.

    Two cases need it. A fork may arrive before the request that creates its parent. A free may
    arrive before the request that creates the context, which would then never be freed."""

    # `_known` has the ids that requests have named so far. The engine core owns the real contexts.

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._known: set[int] = set()
        self._awaited: dict[int, list[asyncio.Future[None]]] = {}
        self._freed_early: OrderedDict[int, float] = OrderedDict()

    async def enter(self, wanted: _Wanted) -> None:
        """Return once earlier requests have named all parents, or after `GRACE_S`.

        The caller must submit its request before it awaits anything else. Raises `Cancelled` for a
        context that was freed before this request arrived."""
        own = {piece.context_id for piece in wanted}
        for piece in wanted:
            parent = piece.parent_context_id
            if piece.context_id not in self._known and parent != NO_PARENT and parent not in own:
                await self._named(parent)
        new = own - self._known
        if self._freed_early:
            self._forget_old()
            if early := new & self._freed_early.keys():
                raise Cancelled(f"context {min(early)} was freed before this request arrived")
        self._known |= new
        for context_id in new & self._awaited.keys():
            for waiter in self._awaited[context_id]:
                if not waiter.done():
                    waiter.set_result(None)

    def free(self, context_ids: Sequence[int]) -> None:
        now = self._clock.now()
        for context_id in context_ids:
            if context_id in self._known:
                self._known.discard(context_id)
            else:
                self._freed_early[context_id] = now
        self._forget_old()

    def reset(self) -> None:
        """Forget all ids, because the next ServeCore uses the same ids for other contexts.

        Requests that wait for a parent continue."""
        self._known.clear()
        self._freed_early.clear()
        for waiters in self._awaited.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)

    async def _named(self, context_id: int) -> None:
        if context_id in self._known:
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        waiters = self._awaited.setdefault(context_id, [])
        waiters.append(waiter)
        grace = asyncio.ensure_future(self._clock.sleep(GRACE_S))
        try:
            await asyncio.wait((waiter, grace), return_when=asyncio.FIRST_COMPLETED)
        finally:
            grace.cancel()
            waiters.remove(waiter)
            if not waiters:
                self._awaited.pop(context_id, None)

    def _forget_old(self) -> None:
        oldest = self._clock.now() - GRACE_S
        while self._freed_early and next(iter(self._freed_early.values())) < oldest:
            self._freed_early.popitem(last=False)


class _Gate:
    """Rejects requests of other ServeCores. During a registration, requests of the new ServeCore
    wait until the engine knows the answer and has cancelled the work for the previous one."""

    def __init__(self, app: ASGIApp, fence: Fence) -> None:
        self._app = app
        self._fence = fence

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # ServeCore requests the tokenizer before it answers a registration. It may have an earlier
        # epoch than the previous ServeCore, so the fence would reject it.
        if scope["type"] == "http" and scope["path"] != "/tokenizer":
            request = Request(scope)
            try:
                self._fence.check(request)
                answer = self._fence.answer
                if answer is not None and REGISTRATION_HEADER in request.headers:
                    await answer.wait()
                    self._fence.check(request)
            except ParrotError as error:
                await error_response(request, error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class EngineFront:
    """The state of an engine's HTTP API. The heartbeat updates the fence, and a shutdown closes the
    channels."""

    def __init__(self, service: EngineService, reorder: ReorderBuffer) -> None:
        self.service = service
        self.reorder = reorder
        self.fence = Fence()
        self.channels = Channels()


def _fenced(
    front: EngineFront,
    path: str,
    verb: Callable[..., Any],
    summary: str,
    described: Described = _DESCRIBED,
) -> Endpoint:
    """An endpoint that checks the fence again after the body was read.

    The engine may have registered again meanwhile."""

    def check(request: Request, arguments: dict[str, Any]) -> None:
        front.fence.check(request)

    return _guarded("POST", path, verb, summary, described).stepping(check)


def _guarded(
    method: str, path: str, verb: Callable[..., Any], summary: str, described: Described
) -> Endpoint:
    return Endpoint(
        method, path, verb, summary, access=Access.CLUSTER, body=PEER_BODY, described=described
    )


def create_app(
    service: EngineService,
    reorder: ReorderBuffer,
    config: EngineConfig,
    incarnation: str = "",
    tracer: "EngineTracer | None" = None,
) -> FastAPI:
    """Build the app. `app.state.front` is its `EngineFront`.

    `incarnation`: identifies this start of the engine. `tracer`: replaces the config's tracer.
    Raises `ConfigError` if traces are configured and the extra `otel` is not installed."""
    own = None
    if config.otlp_endpoint is not None:
        from parrot.engine.traces import EngineTracer  # Needs the extra `otel`.

        own = EngineTracer.to(config.otlp_endpoint, config)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        if own is not None:
            own.close()

    metrics = EngineMetrics(config.engine_name, config.served_model)
    front = EngineFront(service, reorder)
    listeners = [metrics.count, log_ended]
    if (exporting := tracer or own) is not None:
        listeners.append(exporting.ended)
    endpoints = [
        *_verbs(front, listeners),
        *_streams(front, listeners),
        *_readings(front),
        *_facts(service, incarnation, metrics),
    ]
    open_paths = {one.path for one in endpoints if one.access is Access.ANYBODY}
    layers: list[Layer] = []
    if config.cluster_token is not None:
        check = partial(require_cluster_token, expected=config.cluster_token)
        layers.append(partial(Guard, check=check, open_paths=open_paths))
    layers.append(partial(_Gate, fence=front.fence))
    names = (config.host, *config.allowed_hosts)
    app = create_base_app(
        "Parrot engine",
        [*layers, *own_layers(max_body_size=MAX_BODY_SIZE, names=names)],
        max_body_memory=config.connections.max_body_memory,
        lifespan=lifespan,
    )
    app.state.front = front
    install(app, endpoints, access=Access.CLUSTER)
    return app


def _verbs(front: EngineFront, listeners: Sequence[Callable[[Ended], None]]) -> list[Endpoint]:
    """Fill, generate and free. A client that disconnects aborts its request.

    `listeners` receive an `Ended` for each request that generates."""

    async def fill(request: FillRequest) -> FillResponse:
        era = front.fence.era
        await front.reorder.enter((request,))
        front.fence.check_submission(request, era)
        return await front.service.fill(request)

    async def generate(request: GenerateRequest) -> GenerateResponse:
        era = front.fence.era
        with observe_request(request, listeners) as answered:
            await front.service.prepare(request)
            await front.reorder.enter((*request.fills, request))
            front.fence.check_submission(request, era)
            sink = front.channels.sink(request) if request.channel else None
            response = await front.service.generate(request, sink)
            answered(response)
            return response

    async def free_context(request: FreeContextRequest) -> FreeContextResponse:
        ids = [*request.context_ids]
        if request.context_id is not None:
            ids.append(request.context_id)
        front.reorder.free(ids)
        return FreeContextResponse(context_len=await front.service.free_contexts(ids))

    return [
        _fenced(front, "/fill", fill, "Append tokens to a context"),
        _fenced(front, "/generate", generate, "Append tokens to contexts and generate"),
        _fenced(front, "/free_context", free_context, "Free contexts"),
    ]


def _streams(front: EngineFront, listeners: Sequence[Callable[[Ended], None]]) -> list[Endpoint]:
    def generate_stream(request: GenerateRequest) -> AsyncGenerator[tuple[str, BaseModel]]:
        return generated(request, front.fence.era)

    async def generated(
        request: GenerateRequest, era: int
    ) -> AsyncGenerator[tuple[str, BaseModel]]:
        # The stream opens at once, so that keep-alives are sent while the request waits. A
        # rejection is an `error` event.
        with observe_request(request, listeners) as answered:
            await front.service.prepare(request)
            await front.reorder.enter((*request.fills, request))
            front.fence.check_submission(request, era)
            async with aclosing(front.service.generate_stream(request)) as events:
                async for event in events:
                    if isinstance(event, GenerateResponse):
                        answered(event)
                        yield "done", event
                    else:
                        yield "chunk", event

    async def follow(request: FollowRequest) -> AsyncGenerator[tuple[str, BaseModel]]:
        async with aclosing(front.service.follow(request.context_id)) as chunks:
            async for chunk in chunks:
                yield "chunk", chunk
        yield "done", FollowResponse()

    def channel(request: ChannelRequest) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        return front.channels.follow(request.channel)

    verbs: list[tuple[str, Callable[..., Any], str]] = [
        ("/generate_stream", generate_stream, "Append tokens to contexts and stream an output"),
        ("/follow", follow, "The stream of a running generation"),
        ("/channel", channel, "One stream for all outputs that name the channel"),
    ]
    return [_fenced(front, path, verb, about, _EVENTS) for path, verb, about in verbs]


def _readings(front: EngineFront) -> list[Endpoint]:
    async def embed(request: EmbedRequest) -> EmbedResponse:
        response = await front.service.read(request)
        assert isinstance(response, EmbedResponse), response
        return response

    async def score(request: ScoreRequest) -> ScoreResponse:
        response = await front.service.read(request)
        assert isinstance(response, ScoreResponse), response
        return response

    return [
        _fenced(front, "/embed", embed, "Embeddings of texts"),
        _fenced(front, "/score", score, "Log probabilities of prompts"),
    ]


def _facts(service: EngineService, incarnation: str, counts: EngineMetrics) -> list[Endpoint]:
    def ping() -> PingResponse:
        ready()
        return PingResponse(runtime_info=service.runtime_info(), incarnation=incarnation)

    def tokenizer() -> TokenizerResponse:
        response = service.tokenizer()
        if response is None:
            raise NotFound("this engine's contexts are text: it has no tokenizer")
        return response

    def ready() -> None:
        if service.state() is not ServiceState.READY:
            raise Unavailable("the engine is loading its model, shutting down, or lost its device")

    def health() -> None:
        """Answer with status 200."""

    def metrics() -> bytes:
        return counts.render(service.runtime_info())

    return [
        _guarded("POST", "/ping", ping, "The engine's state and load", Described((401, 503))),
        _guarded(
            "GET",
            "/tokenizer",
            tokenizer,
            "The model's tokenizer",
            Described((401, 404, 503)),
        ),
        Endpoint("GET", "/health", health, "Whether the process runs", access=Access.ANYBODY),
        Endpoint(
            "GET",
            "/ready",
            ready,
            "Whether the engine can serve requests",
            access=Access.ANYBODY,
            described=Described((503,)),
        ),
        _guarded(
            "GET",
            "/metrics",
            metrics,
            "Metrics for Prometheus",
            Described((401,), media_type=counts.content_type),
        ),
    ]


class Channels:
    """The open channels, by name."""

    def __init__(self) -> None:
        self._open: dict[str, _Channel] = {}

    async def follow(self, name: str) -> AsyncGenerator[tuple[str, dict[str, Any]]]:
        """Open a channel and yield its events, until the generator or the channel is closed.

        Raises `Conflict` if the channel is open already."""
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
        """Close all channels."""
        for channel in self._open.values():
            channel.close()

    def sink(self, request: GenerateRequest) -> Callable[[StreamChunk], None] | None:
        """The callback for chunks of the request's output; None if its channel is not open."""
        channel = self._open.get(request.channel)
        return None if channel is None else partial(channel.put, request.context_id)


class _Channel:
    """Buffers chunks until the reader takes them. A slow reader gets several steps at once."""

    def __init__(self) -> None:
        self._chunks: list[dict[str, Any]] = []
        self._filled = asyncio.Event()
        self._is_closed = False

    def put(self, context_id: int, chunk: StreamChunk) -> None:
        if self._is_closed:
            return
        # Without log probabilities, which is the common case, this is 10 times faster.
        is_plain = chunk.logprobs is None
        fields = {"ids": chunk.ids, "text": chunk.text} if is_plain else chunk.model_dump()
        self._chunks.append({"context_id": context_id} | fields)
        self._filled.set()

    async def take(self) -> list[dict[str, Any]]:
        """Wait for chunks and return all of them; an empty list once the channel is closed."""
        await self._filled.wait()
        self._filled.clear()
        chunks, self._chunks = self._chunks, []
        return chunks

    def close(self) -> None:
        self._is_closed = True
        self._chunks.clear()
        self._filled.set()
