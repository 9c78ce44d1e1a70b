"""Engine services: the interface of engines of any type, and the service of those that have a
`Runner`, on top of an engine core that a driver runs.

For real models a driver is a thread. (Simulated ones have `parrot.engine.sim`.) All drivers keep
the rule that makes the core simple: verbs (submit, abort, free) wait in an inbox and are applied
before a step is planned, so they take effect within one step and never meet a step half planned. A
step that was launched before goes on as it is. A verb that fails costs nobody else anything.
Outcomes are delivered on the event loop, all those of a step at once."""

import asyncio
import logging
import threading
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any, Protocol, TypeVar

from parrot.engine.config import EngineConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import BACKGROUND, Delivery, EngineRequest, Outcome, Piece, Response
from parrot.engine.core.output import unreported_outputs
from parrot.engine.core.shares import TenantShare
from parrot.engine.core.steps import SUPPORTED_SAMPLING, DeviceLost
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import (
    FEATURES,
    SERVER_FEATURES,
    Capabilities,
    DraftSources,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    EngineType,
    FillPiece,
    FillRequest,
    FillResponse,
    GenerateRequest,
    GenerateResponse,
    JobRequest,
    PoolingKind,
    RuntimeInfo,
    ScoreRequest,
    ScoreResponse,
    StreamChunk,
    TokenizerResponse,
)
from parrot.protocol.engine_client import OnChunk
from parrot.protocol.errors import (
    EngineFailed,
    InvalidRequest,
    ParrotError,
    PromptTooLong,
    Unavailable,
    UnsupportedField,
)
from parrot.protocol.sampling import CONSTRAINTS, SamplingConfig
from parrot.utils.ids import IdCounter

logger = logging.getLogger(__name__)

_THREAD_NAME = "engine-core"
_WARM_UP_CONTEXT = -1  # no request can name it, nor any below
_WARM_UP_TOKENS = 16

R = TypeVar("R")
Verb = Callable[[EngineCore], None]


class ServiceState(StrEnum):
    LOADING = "loading its model"
    READY = "ready"
    CLOSED = "shutting down"
    LOST = "lost"  # no request can ever be served again: the process should end


class EngineService(Protocol):
    """Used from one event loop. Every refusal or failure of a request is a `ParrotError`.

    Cancelling a verb, or closing the iterator of `generate_stream`, aborts the job within one
    engine step and leaves its context as far as it got."""

    async def start(self) -> None:
        """Load the model and warm up. Called once, before anything else; may take minutes."""
        ...

    def state(self) -> ServiceState: ...

    async def prepare(self, request: GenerateRequest) -> None:
        """Do what takes a while and need not wait for the request's turn, so that `generate` can
        take it at once. Raises what `generate` would."""
        ...

    async def fill(self, request: FillRequest) -> FillResponse: ...

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """`on_chunk` is given the pieces of the output as they are generated, on the event loop."""
        ...

    def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        """Chunks as they are generated; the last item, always, is the whole response. The request
        is checked when iteration begins."""
        ...

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        """The output that `generate` makes on a context, from its first token on, until it ends.
        If it has not begun yet it is waited for. Raises `UnsupportedField` if this engine gets its
        outputs whole."""
        ...

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        """Embed texts; or score them, for a `ScoreRequest`. Raises `UnsupportedField` if this
        engine does not."""
        ...

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        """Abort the jobs of these contexts and forget them; returns the tokens they held. Unknown
        ids count 0."""
        ...

    async def reset(self) -> None:
        """Abort every job and free every context: the ServeCore that owned them is gone, and the
        next one hands out the same ids again. Cached KV stays."""
        ...

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """With the `outputs` under way in these contexts that nobody takes as they come, behind the
        tokens that were `told`: how many, by contexts. The newest may be left out. None of them if
        that is None, nor of an engine of text."""
        ...

    def engine_info(self) -> EngineInfo:
        """Return the facts to register with; valid after `start`."""
        ...

    def tokenizer(self) -> TokenizerResponse | None:
        """None when the engine's contexts are text."""
        ...

    def check_integrity(self) -> None:
        """Recount blocks, contexts and jobs; an AssertionError tells what does not add up. Call
        it only between steps."""
        ...

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop. May be called twice."""
        ...


class Driver(Protocol):
    """Used from one event loop."""

    @property
    def is_lost(self) -> bool:
        """Whether no step will ever run again."""
        ...

    async def start(self) -> EngineCore:
        """Make the core and begin to run it. The core may be read, but only verbs change it."""
        ...

    def post(self, verb: Verb) -> None:
        """Apply `verb` between two steps."""
        ...

    async def close(self) -> None:
        """Fail what is unfinished with `Unavailable` and stop. May be called twice."""
        ...


async def ask(driver: Driver, question: Callable[[EngineCore], R]) -> R:
    """Post a verb and wait for what it returns."""
    answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def verb(core: EngineCore) -> None:
        try:
            outcome: R | Exception = question(core)
        except Exception as error:  # noqa: BLE001 - it is raised where the question was asked
            outcome = error
        core.requests.outbox.add(partial(settle, answer), outcome)

    driver.post(verb)
    return await answer


def apply_verbs(inbox: deque[Verb], core: EngineCore) -> None:
    """Apply the verbs that have come until now."""
    for _ in range(len(inbox)):
        verb = inbox.popleft()
        try:
            verb(core)
        except Exception:
            logger.exception("a verb failed")


def deliver(outcomes: list[Delivery]) -> None:
    """Make the calls; one sink's defect must not cost the others their answers."""
    for call, argument in outcomes:
        try:
            call(argument)
        except Exception:
            logger.exception("an outcome could not be delivered")


class ThreadDriver:
    """Runs the core in a thread of its own, in which the model is also loaded. Idle, the thread
    sleeps on a condition. `close` gives a step that is under way `patience_s` to end."""

    def __init__(self, load: Callable[[], EngineCore], *, patience_s: float = 10.0) -> None:
        self._load = load
        self._patience_s = patience_s
        self._inbox: deque[Verb] = deque()
        self._wake = threading.Condition()
        self._is_closing = False
        self._thread: threading.Thread | None = None
        self._is_loaded = False
        self._at_end: list[Callable[[], None]] = []
        self.is_lost = False

    async def start(self) -> EngineCore:
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[EngineCore] = loop.create_future()
        self._thread = threading.Thread(
            target=self._run, args=(loop, loaded), name=_THREAD_NAME, daemon=True
        )
        self._thread.start()
        core = await loaded
        self._is_loaded = True
        return core

    def post(self, verb: Verb) -> None:
        with self._wake:
            self._inbox.append(verb)
            self._wake.notify()

    def lose(self) -> None:
        """Say, from any thread, that no step can be run any more."""
        self.is_lost = True

    def at_end(self, call: Callable[[], None]) -> None:
        """Call in the core's thread when it ends. For `load` to use."""
        self._at_end.append(call)

    async def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None and self._is_loaded:  # loading cannot be interrupted
            await asyncio.to_thread(self._thread.join, self._patience_s)
            if self._thread.is_alive():
                logger.error("a step has not ended for %g s; it is given up", self._patience_s)

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: "asyncio.Future[EngineCore]") -> None:
        try:
            core = self._load()
        except Exception as error:  # noqa: BLE001 - whatever it is, `start` raises it
            _tell(loop, settle, loaded, error)
            return
        _tell(loop, settle, loaded, core)
        try:
            self._serve(core, loop)
        finally:
            self.is_lost = self.is_lost or not self._is_closing
            apply_verbs(self._inbox, core)
            core.fail_everything(Unavailable("the engine is shutting down"))
            self._deliver(core, loop)
            for call in self._at_end:
                call()

    def _serve(self, core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        may_step = False
        while not self._is_closing:
            with self._wake:
                while not (self._inbox or may_step or self._is_closing):
                    self._wake.wait()
            may_step = self._step_or_fail(core)
            self._deliver(core, loop)

    def _step_or_fail(self, core: EngineCore) -> bool:
        """Apply the inbox and run a step. A defect fails the requests at hand, not the engine."""
        try:
            core.wait_until_due()
            apply_verbs(self._inbox, core)
            return core.has_work and core.step()
        except DeviceLost as error:
            if not self.is_lost:
                logger.critical("the device is lost: %s", error)
            self.is_lost = True
            core.fail_everything(Unavailable("the engine has lost its device"))
        except Exception:
            logger.exception("the engine core failed; its requests are given up")
            core.fail_everything(EngineFailed("internal error of the engine"))
        return False

    @staticmethod
    def _deliver(core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        if outcomes := core.requests.outbox.take():
            _tell(loop, deliver, outcomes)


def core_thread_is_alive() -> bool:
    """Whether after `close` the thread still loads a model or waits for a stuck device, neither of
    which can be interrupted."""
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Call from another thread; nobody is left to be told once the loop has closed."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *args)


def settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Give the future its result, or the error that it is to raise, unless it was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class RunnerService:
    """See `EngineService`. The model may be loaded while the driver starts; `warm_up` then runs a
    few tokens through it, so that the first request is not slower than the rest. `pooling`: how it
    makes embeddings; None if there is no model for them, nor for scores."""

    def __init__(
        self,
        config: EngineConfig,
        driver: Driver,
        *,
        warm_up: bool,
        pooling: PoolingKind | None = None,
    ) -> None:
        self._config = config
        self._driver = driver
        self._warms_up = warm_up
        self._pooling = pooling
        self._temporary_ids = IdCounter()
        self._core: EngineCore | None = None
        self._request_ids = IdCounter()
        self._state = ServiceState.LOADING

    async def start(self) -> None:
        self._core = await self._driver.start()
        if self._warms_up:
            await self._warm_up(self._core)
        if self._state is ServiceState.LOADING:
            self._state = ServiceState.READY

    async def _warm_up(self, core: EngineCore) -> None:
        num_tokens = max(1, min(_WARM_UP_TOKENS, core.max_context_len - 2))
        piece = Piece(_WARM_UP_CONTEXT, array("i", [0] * num_tokens))
        sampling = SamplingConfig(temperature=0.0, max_gen_length=2, ignore_tokenizer_eos=True)
        await self._answer(self._wanted(JobRequest(), (piece,), sampling))
        await ask(self._driver, lambda core: core.requests.free([_WARM_UP_CONTEXT]))

    def state(self) -> ServiceState:
        return ServiceState.LOST if self._driver.is_lost else self._state

    async def fill(self, request: FillRequest) -> FillResponse:
        self._require_ready()
        wanted = self._wanted(request, (self._piece(request),))
        if request.background:
            wanted = replace(wanted, priority=BACKGROUND, background_share=request.background_share)
        response = await self._answer(wanted)
        assert isinstance(response, FillResponse), response
        return response

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        self._require_ready()
        if self._pooling is None:
            kind = self._config.engine_type
            text = f"an engine of type {kind} makes no embeddings, and scores no prompts"
            raise UnsupportedField(text, param="model")
        wanted = self._wanted(request, self._inputs(request.inputs))
        if isinstance(request, ScoreRequest):
            wanted = replace(wanted, num_scored=request.num_top)
        else:
            wanted = replace(wanted, pooling=self._pooling)
        response = await self._answer(wanted)
        assert isinstance(response, EmbedResponse | ScoreResponse), response
        return response

    def _inputs(self, inputs: Sequence[list[int] | str]) -> tuple[Piece, ...]:
        """A piece on a temporary context for each."""
        pieces = []
        for index, given in enumerate(inputs):
            fill = FillPiece.model_construct(
                context_id=_WARM_UP_CONTEXT - 1 - self._temporary_ids.next(),
                token_ids=given if isinstance(given, list) else None,
                text=given if isinstance(given, str) else None,
            )
            pieces.append(self._piece(fill))
            self._check_length(pieces[-1], index)
        return tuple(pieces)

    def _check_length(self, piece: Piece, index: int) -> None:
        length, limit = len(piece.token_ids), self._require_core().max_context_len
        if not length:
            raise InvalidRequest(f"input {index} is empty", param="input")
        if length > limit:
            text = f"input {index} has {length} tokens; the limit is {limit}"
            raise PromptTooLong(text, param="input")

    async def prepare(self, request: GenerateRequest) -> None:
        self._require_ready()
        await self._constraint(request)

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        wanted = await self._generation(request, stream=on_chunk is not None)
        response = await self._answer(wanted, on_chunk)
        assert isinstance(response, GenerateResponse), response
        return response

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        wanted = await self._generation(request, stream=True)
        events: asyncio.Queue[Outcome] = asyncio.Queue()  # bounded by the tokens generated
        self._driver.post(lambda core: core.requests.submit(wanted, events.put_nowait))
        has_ended = False
        try:
            while not has_ended:
                event = await events.get()
                has_ended = not isinstance(event, StreamChunk)
                if isinstance(event, ParrotError):
                    raise event
                assert isinstance(event, StreamChunk | GenerateResponse), event
                yield event
        finally:
            if not has_ended:
                self._driver.post(lambda core: core.requests.abort(wanted.request_id))

    async def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        self._require_ready()
        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()  # bounded as above
        follower = chunks.put_nowait
        self._driver.post(lambda core: core.requests.followers.add(context_id, follower))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
        finally:
            self._driver.post(lambda core: core.requests.followers.remove(context_id, follower))

    async def _generation(self, request: GenerateRequest, *, stream: bool) -> EngineRequest:
        self._require_ready()
        if request.conversation is not None:
            text = "this engine's contexts are tokens, and it renders no conversations"
            raise UnsupportedField(text, param="conversation")
        constraint = await self._constraint(request)
        wanted = self._wanted(request, self._pieces(request), request.sampling_config, stream)
        return replace(
            wanted,
            constraint=constraint,
            resumed_ids=request.resumed_ids,
            drafts=request.drafts or DraftSources(),
        )

    async def _constraint(self, request: GenerateRequest) -> Constraint | None:
        """Waits for nothing if `prepare` has."""
        sampling, grammars = request.sampling_config, self._require_core().language.grammars
        sampling.require_support(self._sampling, f"the {self._config.engine_type} engine")
        return (
            None if grammars is None else await grammars.constraint(sampling, request.resumed_ids)
        )

    @property
    def _sampling(self) -> frozenset[str]:
        """The fields of a sampling config that are carried out."""
        grammars = self._require_core().language.grammars
        return SUPPORTED_SAMPLING.union(() if grammars is None else CONSTRAINTS)

    def _wanted(
        self,
        request: JobRequest,
        pieces: tuple[Piece, ...],
        sampling: SamplingConfig | None = None,
        stream: bool = False,
    ) -> EngineRequest:
        return EngineRequest(
            request_id=self._request_ids.next(),
            pieces=pieces,
            priority=request.priority,
            sampling=sampling,
            stream=stream,
            cache_salt=request.cache_salt,
            share=TenantShare(request.tenant, request.weight, request.step_growth),
        )

    async def _answer(self, wanted: EngineRequest, on_chunk: OnChunk | None = None) -> Response:
        """Submit a request and wait for its end; abort it if this is cancelled."""
        answer: asyncio.Future[Response] = asyncio.get_running_loop().create_future()

        def sink(outcome: Outcome) -> None:
            if on_chunk is not None and isinstance(outcome, StreamChunk):
                on_chunk(outcome)
            else:
                settle(answer, outcome)

        self._driver.post(lambda core: core.requests.submit(wanted, sink))
        try:
            return await answer
        finally:
            if not answer.done() or answer.cancelled():
                self._driver.post(lambda core: core.requests.abort(wanted.request_id))

    def _pieces(self, request: GenerateRequest) -> tuple[Piece, ...]:
        """The request's fills and its own context, with neighbours on one context made one."""
        pieces = [self._piece(fill) for fill in request.fills]
        pieces.append(
            Piece(request.context_id, array("i"), request.parent_context_id, request.parent_len)
        )
        merged: list[Piece] = []
        for piece in pieces:
            if (
                merged
                and merged[-1].context_id == piece.context_id
                and piece.repeats_fork(merged[-1])
            ):
                merged[-1] = replace(merged[-1], token_ids=merged[-1].token_ids + piece.token_ids)
            else:
                merged.append(piece)
        return tuple(merged)

    def _piece(self, fill: FillPiece) -> Piece:
        if (fill.token_ids is None) == (fill.text is None):
            raise InvalidRequest("a fill needs either `token_ids` or `text`")
        parent = (fill.parent_context_id, fill.parent_len)
        if fill.token_ids is not None:
            ids = array("i", fill.token_ids)
            return Piece(fill.context_id, ids, *parent, public_len=fill.public_len)
        if fill.public_len:
            raise InvalidRequest("`public_len` counts `token_ids`", param="public_len")
        language = self._require_core().language
        special = language.response.special_ids
        text_ids = language.tokenizer.encode(fill.text or "", add_special_tokens=False).ids
        return Piece(
            fill.context_id, array("i", text_ids), *parent, special.bos if special.add_bos else None
        )

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        self._require_ready()
        return await ask(self._driver, lambda core: core.requests.free(context_ids))

    async def reset(self) -> None:
        if (
            self._state is ServiceState.READY
        ):  # otherwise there is nothing to forget, or soon will be
            await ask(self._driver, lambda core: core.requests.reset())

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        info = RuntimeInfo() if self._core is None else self._core.runtime_info()
        if told is not None and self._core is not None:
            generations = self._core.requests.generations()
            info.outputs = unreported_outputs(generations, told)
        return info

    def engine_info(self) -> EngineInfo:
        core, config = self._require_core(), self._config
        return EngineInfo(
            engine_type=EngineType(config.engine_type),
            engine_name=config.engine_name,
            model=config.served_model,
            device=f"{core.info.num_ranks} x {device}" if (device := core.info.device) else "",
            tokenizer=config.tokenizer or config.model,
            tokenizer_id=core.language.tokenizer_id,
            host=config.host,
            port=config.port,
            max_seq_len=core.max_context_len,
            tasks_capacity=config.tasks_capacity,
            tokens_capacity=core.tokens_capacity,
            host_tokens_capacity=core.host_tokens_capacity,
            block_size=core.info.block_size,
            costs=self.runtime_info().costs,
            capabilities=Capabilities(features=self._sampling | FEATURES - SERVER_FEATURES),
            default_sampling=core.language.default_sampling,
        )

    def tokenizer(self) -> TokenizerResponse | None:
        return self._require_core().language.response

    def check_integrity(self) -> None:
        self._require_core().check_integrity()

    async def close(self) -> None:
        self._state = ServiceState.CLOSED
        await self._driver.close()
        if self._core is not None and self._core.language.grammars is not None:
            self._core.language.grammars.close()

    def _require_core(self) -> EngineCore:
        if self._core is None:
            raise Unavailable("the engine is loading its model")
        return self._core

    def _require_ready(self) -> None:
        state = self.state()
        if state is ServiceState.LOST:
            raise Unavailable("the engine has lost its device")
        if state is not ServiceState.READY:
            raise Unavailable(f"the engine is {state}")
