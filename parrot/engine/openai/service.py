"""The openai engine. Contexts are text, and a Generate is one request to a foreign server."""

import asyncio
import heapq
import math
import os
from base64 import b64encode
from collections.abc import (
    AsyncGenerator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from dataclasses import dataclass, field
from itertools import count
from struct import pack
from typing import Any, NamedTuple, Self, TypeVar

from parrot.engine.config import OpenAIConfig
from parrot.engine.core.steps import StepCostFit
from parrot.engine.openai.contexts import ContextTurn, TextContext, TextContexts
from parrot.engine.openai.extra import AnswerExtra
from parrot.engine.openai.logprobs import AnswerLogprobs
from parrot.engine.openai.server_load import LoadWatch
from parrot.engine.openai.upstream import Backoff, Upstream, retries_temporary
from parrot.engine.openai.wire import AnswerWriter, Question, ServerAnswer, WireUsage
from parrot.engine.service import ServiceState
from parrot.protocol.engine_api import (
    CHARS_PER_TOKEN,
    EmbedRequest,
    EmbedResponse,
    EngineInfo,
    EngineType,
    FillPiece,
    FillRequest,
    FillResponse,
    FinishReason,
    GenerateRequest,
    GenerateResponse,
    RuntimeInfo,
    ScoreRequest,
    ScoreResponse,
    ServerLoad,
    StepCosts,
    StreamChunk,
    TokenizerResponse,
    Usage,
)
from parrot.protocol.engine_client import OnChunk
from parrot.protocol.errors import (
    Cancelled,
    InvalidRequest,
    ParrotError,
    QuotaExceeded,
    Unavailable,
    UnsupportedField,
)
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.valid import of_valid

_R = TypeVar("_R")
_LATENCY_SMOOTHING = 0.1  # Weight of the newest answer in the moving average of latencies.


@dataclass(slots=True, eq=False)
class _Job:
    """One request of this engine. It runs in the task of its caller."""

    task: asyncio.Task[Any]
    ended: asyncio.Future[None]
    turns: Mapping[int, ContextTurn] = field(default_factory=dict)
    error: ParrotError | None = None  # The reason of an abort.


class PriorityGate:
    """Admits at most `limit` requests at a time: by priority (lower first), then by arrival. If the
    limit is lowered, admitted requests stay."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._arrivals = count()
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self.num_admitted = 0

    async def enter(self, priority: int) -> None:
        """Wait until the request is admitted. Then the caller must `leave`."""
        if self.num_admitted < self.limit:
            self.num_admitted += 1
        else:
            await self._wait(priority)

    async def _wait(self, priority: int) -> None:
        admitted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._waiting, (priority, next(self._arrivals), admitted))
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self.leave()
            raise

    def leave(self) -> None:
        """Admit the first waiting request that was not cancelled, unless the limit is exceeded."""
        while self._waiting and self.num_admitted <= self.limit:
            _, _, admitted = heapq.heappop(self._waiting)
            if not admitted.done():
                admitted.set_result(None)
                return
        self.num_admitted -= 1


class _Totals(NamedTuple):
    """Totals of the server's work so far."""

    answer_s: float = 0.0  # Concurrent answers, integrated over seconds.
    token_s: float = 0.0  # Context tokens of concurrent answers, integrated over seconds.
    prompt_tokens: float = 0.0  # Prompt tokens computed.


@dataclass(slots=True)
class TimedAnswer:
    """A running answer, which ends with the block. The caller sets `usage` when the server reports
    it. `before`: the totals at the start."""

    costs: "AnswerCosts"
    before: _Totals
    began: float
    num_tokens: float
    usage: Usage | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.costs.ended(self)


class AnswerCosts:
    """Estimates the step costs of the foreign server from its answers. The model: each token of an
    answer takes one step, which the answer shares with all concurrent answers of this engine and,
    if known, of other clients. `latency_s` is a moving average of seconds per answer."""

    def __init__(self, clock: Clock) -> None:
        self.num_answered = 0
        self.latency_s = 0.0
        self._clock = clock
        self._fit = StepCostFit()
        self._totals = _Totals()
        self._since = clock.now()
        self._num_answers = 0
        self._num_tokens = 0.0
        self._others = ServerLoad()

    def set_external_load(self, load: ServerLoad | None) -> None:
        """Include the other clients' load from now on. None: unknown."""
        self._advance()
        self._others = load or ServerLoad()

    def costs(self) -> StepCosts | None:
        """The estimated costs. None before the first answer with a token count."""
        return self._fit.costs()

    def answering(self, num_tokens: float) -> TimedAnswer:
        """Measure one answer, from now to the end of the block. `num_tokens` is the estimated
        length of its prompt in tokens."""
        before = self._advance()
        self._num_answers += 1
        self._num_tokens += num_tokens
        return TimedAnswer(self, before, self._since, num_tokens)

    def ended(self, answer: TimedAnswer) -> None:
        after = self._advance()
        self._num_answers -= 1
        self._num_tokens -= answer.num_tokens
        if answer.usage is not None:
            self._learn(answer.before, after, self._since - answer.began, answer.usage)

    def _learn(self, before: _Totals, after: _Totals, seconds: float, usage: Usage) -> None:
        weight = _LATENCY_SMOOTHING if self.num_answered else 1.0
        self.latency_s += weight * (seconds - self.latency_s)
        self.num_answered += 1
        num_computed = after.prompt_tokens + usage.computed_tokens
        self._totals = _Totals(after.answer_s, after.token_s, num_computed)
        if usage.output_tokens <= 0 or seconds <= 0:
            return
        steps_per_s = usage.output_tokens / seconds
        self._fit.observe(
            seconds,
            num_steps=usage.output_tokens,
            num_sequences=(after.answer_s - before.answer_s) * steps_per_s,
            num_tokens=(after.token_s - before.token_s) * steps_per_s,
            num_prompt_tokens=self._totals.prompt_tokens - before.prompt_tokens,
        )

    def _advance(self) -> _Totals:
        now, totals, others = self._clock.now(), self._totals, self._others
        elapsed_s, self._since = now - self._since, now
        self._totals = _Totals(
            totals.answer_s + (self._num_answers + others.num_others) * elapsed_s,
            totals.token_s + (self._num_tokens + others.other_tokens) * elapsed_s,
            totals.prompt_tokens,
        )
        return self._totals


class OpenAIService:
    """An `EngineService`. All lengths are in characters. Only the usage of an answer is in tokens,
    as the foreign server reports it."""

    def __init__(
        self,
        config: OpenAIConfig,
        *,
        clock: Clock | None = None,
        environ: Mapping[str, str] = os.environ,
        backoff: Backoff = retries_temporary,
        forwards_key: bool = False,
    ) -> None:
        """Does not connect. `backoff` chooses the errors after which a request is sent again.
        Raises `ConfigError` if the API key is missing."""
        self._config = config
        self._clock = clock or MonotonicClock()
        self._upstream = Upstream(config, environ, backoff, forwards_key=forwards_key)
        self._gate = PriorityGate(config.scheduler.max_batch_size)
        self._by_priority = config.scheduler.policy == "priority"
        default_capacity = config.tasks_capacity * config.instance.max_seq_len * CHARS_PER_TOKEN
        self._contexts = TextContexts(config.tokens_capacity or default_capacity)
        self._jobs: set[_Job] = set()
        self.answered_at = -math.inf  # When the server last sent a part of an answer.
        self._costs = AnswerCosts(self._clock)
        self._watch = LoadWatch(
            self._upstream, lambda: self._gate.num_admitted, self._costs.set_external_load
        )
        self._state = ServiceState.LOADING

    async def start(self) -> None:
        """Probe the kind of the server. If the server does not answer yet, a later request probes
        again."""
        await self._upstream.probe()
        self._apply_server_limit()
        self._state = ServiceState.READY

    def state(self) -> ServiceState:
        """Never `LOST`, because the foreign server may recover."""
        return self._state

    async def prepare(self, request: GenerateRequest) -> None:
        """No preparation: the foreign server does all the work."""

    async def fill(self, request: FillRequest) -> FillResponse:
        _require_text([request])
        await self._run([request], request.cache_salt, lambda job: self._fill(job, [request]))
        return FillResponse(filled_len=len(request.text or ""))

    async def generate(
        self, request: GenerateRequest, on_chunk: OnChunk | None = None
    ) -> GenerateResponse:
        """`on_chunk` receives each chunk of the answer. None: the answer is not streamed."""
        _require_text(request.fills)
        needs = _needs(request)
        self._upstream.check(needs)
        return await self._run(
            [*request.fills, request],
            request.cache_salt,
            lambda job: self._generate(job, request, needs, on_chunk),
        )

    async def generate_stream(
        self, request: GenerateRequest
    ) -> AsyncGenerator[StreamChunk | GenerateResponse]:
        chunks: asyncio.Queue[StreamChunk | None] = asyncio.Queue()  # None marks the end.
        task = asyncio.create_task(self.generate(request, chunks.put_nowait))
        task.add_done_callback(lambda _: chunks.put_nowait(None))
        try:
            while (chunk := await chunks.get()) is not None:
                yield chunk
            yield await task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    async def follow(self, context_id: int) -> AsyncGenerator[StreamChunk]:
        raise UnsupportedField(
            "this engine cannot stream to followers: its server sends the whole answer at once"
        )
        yield

    async def read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        return await self._run([], "", lambda job: self._read(request))

    async def _read(self, request: EmbedRequest) -> EmbedResponse | ScoreResponse:
        await self._upstream.probe()
        self._apply_server_limit()
        if isinstance(request, ScoreRequest):
            return await self._score(request)
        return await self._embed(request)

    async def _score(self, request: ScoreRequest) -> ScoreResponse:
        answer = ScoreResponse(logprobs=[])
        for given in request.inputs:
            await self._gate.enter(request.priority if self._by_priority else 0)
            try:
                found, num_tokens = await self._upstream.score(
                    given, request.num_top, request.cache_salt, request.client_key
                )
            finally:
                self._gate.leave()
            answer.logprobs.append(found)
            answer.prompt_tokens += num_tokens
        return answer

    async def _embed(self, request: EmbedRequest) -> EmbedResponse:
        await self._gate.enter(request.priority if self._by_priority else 0)
        try:
            answer = await self._upstream.embed(
                request.inputs,
                request.traceparent,
                request.request_id,
                request.client_key,
                request.extra,
            )
        finally:
            self._gate.leave()
        vectors = [pack(f"<{len(unit)}f", *unit) for unit in [v.unit() for v in answer.data]]
        return EmbedResponse(
            embeddings=[b64encode(vector).decode() for vector in vectors],
            prompt_tokens=answer.usage.prompt_tokens,
        )

    async def free_contexts(self, context_ids: Sequence[int]) -> int:
        freed = [c for i in context_ids if (c := self._contexts.free(i)) is not None]
        users = {turn.job for context in freed for turn in context.turns}
        await self._abort(users, Cancelled("its context was freed"))
        return sum(len(context) for context in freed)

    async def reset(self) -> None:
        await self._abort(set(self._jobs), Cancelled("the engine was reset"))
        await self.free_contexts([context.context_id for context in self._contexts])

    def runtime_info(self, told: Mapping[int, int] | None = None) -> RuntimeInfo:
        """The engine's state. A heartbeat also starts a reading of the server's load, whose result
        is in the next heartbeat."""
        if told is not None and self._state is ServiceState.READY:
            self._watch.begin()
        capacity, used = self._contexts.capacity, self._contexts.num_chars
        return RuntimeInfo(
            num_cached_tokens=used,
            num_max_blocks=capacity,
            num_free_blocks=max(0, capacity - used),
            num_running_jobs=self._gate.num_admitted,
            num_total_jobs=len(self._jobs),
            recent_average_latency=self._costs.latency_s * 1e9,
            num_steps=self._costs.num_answered,
            costs=self._costs.costs(),
            capabilities=self._upstream.capabilities,
            server_load=self._watch.latest,
        )

    def engine_info(self) -> EngineInfo:
        config = self._config
        max_seq_len = config.instance.max_seq_len
        if "max_seq_len" not in config.instance.model_fields_set:
            max_seq_len = self._upstream.max_model_len or max_seq_len
        return EngineInfo(
            engine_type=EngineType.OPENAI,
            engine_name=config.engine_name,
            model=config.served_model,
            tokenizer=config.tokenizer,
            host=config.host,
            port=config.port,
            max_seq_len=max_seq_len,
            tasks_capacity=config.tasks_capacity,
            tokens_capacity=max(1, self._contexts.capacity // CHARS_PER_TOKEN),
            costs=self._costs.costs(),
            capabilities=self._upstream.capabilities,
        )

    def tokenizer(self) -> TokenizerResponse | None:
        return None

    @property
    def has_serial_answer(self) -> bool:
        """Whether any other request to the server would cut off a running answer."""
        return self._upstream.is_serial and self._gate.num_admitted > 0

    @property
    def may_be_silent(self) -> bool:
        """Whether the server may answer nothing for minutes, because it computes an answer."""
        return self._gate.num_admitted > 0 and not self._upstream.answers_while_busy

    @property
    def server_restarted(self) -> bool:
        """Whether the server was restarted since this engine has read its metrics first."""
        return self._watch.server_restarted

    def check_integrity(self) -> None:
        self._contexts.check_integrity()
        assert self._gate.num_admitted <= len(self._jobs), "the gate counts jobs that are gone"
        for context in self._contexts:
            users = {turn.job for turn in context.turns}
            assert users <= self._jobs, f"{context.context_id} waits for jobs that are gone"

    async def close(self) -> None:
        self._state = ServiceState.CLOSED
        await self._abort(set(self._jobs), Unavailable("the engine is shutting down"))
        await self._watch.close()
        await self._upstream.close()

    # Jobs

    async def _run(
        self,
        wanted: Sequence[FillPiece | GenerateRequest],
        salt: str,
        work: Callable[[_Job], Awaitable[_R]],
    ) -> _R:
        """Take the request's turns now, so that turns are in order of arrival, and do the work.
        `free_contexts` can cancel it. Raises the error of an abort."""
        if self._state is not ServiceState.READY:
            raise Unavailable("the engine is not running")
        if len(self._jobs) >= self._config.max_requests:
            raise QuotaExceeded(f"the engine already has {len(self._jobs)} requests")
        task = asyncio.current_task()
        assert task is not None
        job = _Job(task, asyncio.get_running_loop().create_future())
        job.turns = self._contexts.enter(wanted, job, salt)
        self._jobs.add(job)
        try:
            return await work(job)
        except asyncio.CancelledError:
            if job.error is not None and task.uncancel() == 0:
                raise job.error from None
            raise
        finally:
            self._jobs.discard(job)
            for turn in job.turns.values():
                turn.leave()
            job.ended.set_result(None)

    async def _abort(self, jobs: Collection[_Job], error: ParrotError) -> None:
        """Cancel the jobs, and wait until they have ended."""
        for job in jobs:
            if job.error is None:
                job.error = error
                job.task.cancel()
        if jobs:
            await asyncio.wait([job.ended for job in jobs])

    async def _fill(self, job: _Job, pieces: Sequence[FillPiece], kept: int | None = None) -> None:
        """Fill the pieces in order. After its last piece, a context other than `kept` is released
        to the next job."""
        last_use = {piece.context_id: at for at, piece in enumerate(pieces)}
        for at, piece in enumerate(pieces):
            turn = job.turns[piece.context_id]
            self._contexts.fill(await turn.ready(), piece.text or "")
            if last_use[piece.context_id] == at:
                turn.filled()
                if piece.context_id != kept:
                    turn.leave()

    async def _generate(
        self,
        job: _Job,
        request: GenerateRequest,
        needs: frozenset[str],
        on_chunk: OnChunk | None,
    ) -> GenerateResponse:
        submitted = self._clock.now()
        if not self._upstream.is_probed:  # Otherwise `check` has found all that is needed.
            await self._upstream.check_with_probe(needs)
            self._apply_server_limit()
        await self._fill(job, request.fills, kept=request.context_id)
        context = await job.turns[request.context_id].ready()
        await self._gate.enter(request.priority if self._by_priority else 0)
        try:
            queue_s = self._clock.now() - submitted
            with self._costs.answering(len(context) / CHARS_PER_TOKEN) as answer:
                response = await self._ask(context, request, queue_s, on_chunk)
                answer.usage = response.usage
        finally:
            self._gate.leave()
        return response

    def _apply_server_limit(self) -> None:
        if self._upstream.is_serial:
            self._gate.limit = 1

    async def _ask(
        self,
        context: TextContext,
        request: GenerateRequest,
        queue_s: float,
        on_chunk: OnChunk | None,
    ) -> GenerateResponse:
        """One request to the server and its answer."""
        is_stream = on_chunk is not None or self._upstream.is_serial
        answer = _Answer(self._contexts, context, request, self._clock, on_chunk)
        question = _question(context, request)

        def take(chunk: ServerAnswer) -> None:
            self.answered_at = self._clock.now()
            answer.add(chunk)

        if is_stream:
            await self._upstream.stream(question, take)
        else:
            take(await self._upstream.complete(question))
        return answer.response(queue_s, is_stream=is_stream)


class _Answer:
    """Collects the chunks of one answer, or the whole answer."""

    def __init__(
        self,
        contexts: TextContexts,
        context: TextContext,
        request: GenerateRequest,
        clock: Clock,
        on_chunk: OnChunk | None,
    ) -> None:
        """`on_chunk` receives the text of each chunk."""
        self._contexts = contexts
        self._context = context
        self._clock = clock
        self._on_chunk = on_chunk
        self._writer = AnswerWriter() if "messages" in (request.conversation or ()) else None
        self._logprobs = AnswerLogprobs(request.sampling_config.logprobs)
        self._extra = AnswerExtra()
        self._texts: list[str] = []
        self._reason = FinishReason.STOP
        self._stop_string: str | None = None
        self._usage: WireUsage | None = None
        self._started = clock.now()
        self._first_text: float | None = None

    def add(self, chunk: ServerAnswer) -> None:
        self._usage = chunk.usage or self._usage
        self._extra.add(chunk)
        if chunk.choice is None:
            return
        self._reason = chunk.finish_reason or self._reason
        self._stop_string = chunk.stop_string or self._stop_string
        if (logprobs := chunk.logprobs) is not None:
            self._logprobs.add(logprobs)
        self._append(chunk.text if self._writer is None else chunk.written(self._writer))

    def _append(self, text: str) -> None:
        """Append the text to the answer and to the context, and report it as a chunk."""
        if not text:
            return
        if self._first_text is None:
            self._first_text = self._clock.now()
        self._texts.append(text)
        self._contexts.append(self._context, text)
        if self._on_chunk is not None:
            self._on_chunk(of_valid(StreamChunk, ids=[], text=text, logprobs=self._logprobs.part()))

    def response(self, queue_s: float, *, is_stream: bool) -> GenerateResponse:
        """The complete answer. Without a stream, prefill time is included in `decode_s`. If the
        server reports no usage, each chunk of a stream counts as one token."""
        if self._writer is not None:
            self._append(self._writer.finish())
        texts, counted = self._texts, self._usage
        if counted is None and is_stream:
            num_chars = len(self._context) - sum(map(len, texts))
            counted = WireUsage(
                prompt_tokens=math.ceil(num_chars / CHARS_PER_TOKEN), completion_tokens=len(texts)
            )
        counted = counted or WireUsage()
        is_timed = is_stream and self._first_text is not None
        first_text = self._first_text if is_timed else self._started
        assert first_text is not None
        usage = of_valid(
            Usage,
            cached_tokens=counted.cached_tokens,
            computed_tokens=counted.prompt_tokens - counted.cached_tokens,
            output_tokens=counted.completion_tokens,
            queue_s=queue_s,
            prefill_s=first_text - self._started,
            decode_s=self._clock.now() - first_text,
        )
        text = "".join(texts)
        return of_valid(
            GenerateResponse,
            generated_text=text,
            generated_ids=[],
            finish_reason=self._reason,
            stop_string=self._stop_string,
            usage=usage,
            logprobs=self._logprobs.of_text(text),
            extra=self._extra.fields(),
        )


def _question(context: TextContext, request: GenerateRequest) -> Question:
    # A repeated attempt has its number in the id: the server may still run the one before it.
    is_first = request.attempt <= 1 or not request.request_id
    number = "" if is_first else f"-attempt{request.attempt}"
    return Question(
        "" if request.conversation is not None else context.text(),
        request.sampling_config,
        request.cache_salt,
        request.priority,
        traceparent=request.traceparent,
        request_id=request.request_id + number,
        client_key=request.client_key,
        conversation=request.conversation,
    )


def _needs(request: GenerateRequest) -> frozenset[str]:
    """The features that the request needs, see `Capabilities`. A conversation needs `messages`
    instead of `json_schema`, because chat endpoints support schemas."""
    needs = request.sampling_config.needs()
    is_chat = "messages" in (request.conversation or ())
    return needs - {"json_schema"} | {"messages"} if is_chat else needs


def _require_text(pieces: Iterable[FillPiece]) -> None:
    if any(piece.text is None for piece in pieces):
        raise InvalidRequest(
            "this engine's contexts are text: send `text`, not `token_ids`", param="token_ids"
        )
