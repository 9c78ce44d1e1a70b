"""Engine services: the interface of all engine types, and the service of types with a runner.

A driver runs the engine core: a thread for real models, `parrot.engine.sim` for simulated ones.
Verbs (submit, abort, free) wait in an inbox and are applied before a step is planned. So a verb
takes effect within one step and never changes a step that is planned or launched. A verb that fails
affects no other request. The outcomes of a step are delivered together on the event loop."""

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
# Context of the warm-up request. Requests cannot name negative ids. Lower ids are used for
# embeddings and scores.
_WARM_UP_CONTEXT = -1
_WARM_UP_TOKENS = 16  # Prompt tokens of the warm-up request.

R = TypeVar("R")
Verb = Callable[[EngineCore], None]


class ServiceState(StrEnum):
    LOADING = "loading its model"
    READY = "ready"
    CLOSED = "shutting down"
    LOST = "lost"  # The device is unusable, so the process should exit.


class EngineService(Protocol):
    """An engine of any type, used from one event loop. Requests fail with a `ParrotError`.

    Cancelling a verb, or closing the iterator of `generate_stream`, aborts the job within one
    step. Its context keeps the tokens computed so far."""

    async def start(self) -> None:
        """Load the model and warm up, which may take minutes. Call it once, before all else."""
        ...

    def state(self) -> ServiceState: ...

    async def prepare(self, request: GenerateRequest) -> None:
        """Validate a request and compile its grammar, so that `generate` does not wait for that.

        Raises the same errors as `generate`."""
        ...

    async def fill(self, request: FillRequest) -> FillResponse: ...

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """Generate an output. `on_chunk` receives its chunks on the event loop."""
        ...

    def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        """Yield chunks as they are generated, then the response.

        The request is validated when iteration begins."""
        ...

    def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        """Yield the output that `generate` produces on a context, from its first token on.

        Waits if the output has not begun. Raises `UnsupportedField` if this engine does not
        stream."""
        ...

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        """Embed texts, or score them for a `ScoreRequest`.

        Raises `UnsupportedField` if this engine does not support it."""
        ...

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        """Free contexts and abort their jobs. Returns the number of tokens that they held.

        Unknown ids are ignored."""
        ...

    async def reset(self) -> None:
        """Abort all jobs and free all contexts. Cached KV stays.

        Called when the ServeCore that owned the contexts is lost: the next one uses the same ids.
        """
        ...

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """The engine's state and load.

        `told` has the number of output tokens reported so far, by context. The `outputs` of the
        result are the later tokens of running generations that have no stream. The newest tokens
        may be missing. There are no `outputs` if `told` is None or contexts are text."""
        ...

    def engine_info(self) -> EngineInfo:
        """The data for the registration. Call it after `start`."""
        ...

    def tokenizer(self) -> TokenizerResponse | None:
        """The model's tokenizer; None if contexts are text."""
        ...

    def check_integrity(self) -> None:
        """Recount blocks, contexts and jobs, and raise `AssertionError` for a wrong count.

        Call it only between steps."""
        ...

    async def close(self) -> None:
        """Fail unfinished requests with `Unavailable` and stop. Idempotent."""
        ...


class Driver(Protocol):
    """Runs an engine core. Used from one event loop."""

    @property
    def is_lost(self) -> bool:
        """Whether the device is unusable, so that no further step can run."""
        ...

    async def start(self) -> EngineCore:
        """Create the core and start to run it. The caller may read it; only verbs may change it."""
        ...

    def post(self, verb: Verb) -> None:
        """Apply `verb` between two steps."""
        ...

    async def close(self) -> None:
        """Fail unfinished requests with `Unavailable` and stop. Idempotent."""
        ...


async def ask(driver: Driver, question: Callable[[EngineCore], R]) -> R:
    """Post a verb and wait for its result."""
    answer: asyncio.Future[R] = asyncio.get_running_loop().create_future()

    def verb(core: EngineCore) -> None:
        try:
            outcome: R | Exception = question(core)
        except Exception as error:  # noqa: BLE001 - the caller of `ask` gets the error
            outcome = error
        core.requests.outbox.add(partial(settle, answer), outcome)

    driver.post(verb)
    return await answer


def apply_verbs(inbox: deque[Verb], core: EngineCore) -> None:
    """Apply the verbs that are in the inbox at the time of the call."""
    for _ in range(len(inbox)):
        verb = inbox.popleft()
        try:
            verb(core)
        except Exception:
            logger.exception("an engine command failed")


def deliver(outcomes: list[Delivery]) -> None:
    """Call all sinks. An exception in one sink must not affect the others."""
    for call, argument in outcomes:
        try:
            call(argument)
        except Exception:
            logger.exception("a result could not be delivered")


class ThreadDriver:
    """Loads the model and runs the core in a thread. Without work the thread sleeps."""

    def __init__(self, load: Callable[[], EngineCore], *, patience_s: float = 10.0) -> None:
        """`close` waits up to `patience_s` for the running step."""
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
        """Report that the device is unusable. Callable from any thread."""
        self.is_lost = True

    def at_end(self, call: Callable[[], None]) -> None:
        """Call `call` in the core's thread when the thread ends. For `load`."""
        self._at_end.append(call)

    async def close(self) -> None:
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if self._thread is not None and self._is_loaded:  # Loading cannot be interrupted.
            await asyncio.to_thread(self._thread.join, self._patience_s)
            if self._thread.is_alive():
                logger.error(
                    "a step has not finished within %g s; the engine stops anyway", self._patience_s
                )

    def _run(self, loop: asyncio.AbstractEventLoop, loaded: "asyncio.Future[EngineCore]") -> None:
        try:
            core = self._load()
        except Exception as error:  # noqa: BLE001 - `start` raises it
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
        """Apply the inbox and run a step. An exception fails all requests, but not the engine."""
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
            logger.exception("the engine core failed; all its requests fail")
            core.fail_everything(EngineFailed("internal error of the engine"))
        return False

    @staticmethod
    def _deliver(core: EngineCore, loop: asyncio.AbstractEventLoop) -> None:
        if outcomes := core.requests.outbox.take():
            _tell(loop, deliver, outcomes)


def core_thread_is_alive() -> bool:
    """Whether the core's thread still runs.

    After `close` it may still load a model or wait for a hanging GPU. Both cannot be interrupted.
    """
    return any(thread.name == _THREAD_NAME for thread in threading.enumerate())


def _tell(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *args: Any) -> None:
    """Call a function on the event loop from another thread."""
    with suppress(RuntimeError):  # The loop may be closed already.
        loop.call_soon_threadsafe(call, *args)


def settle(future: "asyncio.Future[Any]", outcome: Any) -> None:
    """Set the future's result or exception, unless the future was cancelled."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)


class RunnerService:
    """The `EngineService` of engine types with a runner and an engine core."""

    def __init__(
        self,
        config: EngineConfig,
        driver: Driver,
        *,
        warm_up: bool,
        pooling: PoolingKind | None = None,
    ) -> None:
        """`warm_up`: run a short request first, so that the first client does not wait for one-time
        work. `pooling`: the kind of embeddings; None if the engine has neither embeddings nor
        scores."""
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
            text = f"an engine of type {kind} cannot compute embeddings or score prompts"
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
        """One piece per input, each on a temporary context."""
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
        # The queue holds at most one event per generated token.
        events: asyncio.Queue[Outcome] = asyncio.Queue()
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
        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()
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
            text = "this engine's contexts are tokens, so it cannot render conversations"
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
        """The request's grammar. Does not wait if `prepare` was called."""
        sampling, grammars = request.sampling_config, self._require_core().language.grammars
        sampling.require_support(self._sampling, f"the {self._config.engine_type} engine")
        return (
            None if grammars is None else await grammars.constraint(sampling, request.resumed_ids)
        )

    @property
    def _sampling(self) -> frozenset[str]:
        """The sampling fields that this engine supports."""
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
        """Submit a request and wait for its response. Aborts the request if cancelled."""
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
        """The request's fills and its own context. Consecutive fills of one context are merged."""
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
            raise InvalidRequest("`public_len` needs `token_ids`", param="public_len")
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
        if self._state is ServiceState.READY:  # In other states no context exists or survives.
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
            architecture=core.info.architecture,
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
