"""Requests, their jobs, and the results of jobs."""

from array import array
from base64 import b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from math import isfinite
from typing import Any

from parrot.engine.core.contexts import Context, ContextTree
from parrot.engine.core.host.tier import PendingLoad
from parrot.engine.core.output import Generation
from parrot.engine.core.shares import ALONE, TenantShare
from parrot.engine.core.steps import (
    PoolSpec,
    SampleSpec,
    ScoreSpec,
    SequenceStep,
    StateRead,
    StateSum,
    StepTotals,
)
from parrot.engine.drafts.drafter import OutputDrafts
from parrot.engine.drafts.pace import Acceptance
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import (
    NO_PARENT,
    DraftSources,
    EmbedResponse,
    FillResponse,
    GenerateResponse,
    PoolingKind,
    PromptTokens,
    ScoreResponse,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import Logprobs, SamplingConfig

BACKGROUND = 2**31
"""The priority of background fills, which run after all other jobs."""


Response = FillResponse | GenerateResponse | EmbedResponse | ScoreResponse
Outcome = StreamChunk | Response | ParrotError
Sink = Callable[[Outcome], None]
"""Receives the events of a request: chunks while it streams, then one response or error."""

Delivery = tuple[Callable[[Any], None], Any]


class Outbox:
    """Calls of sinks, in order. The driver makes the calls outside of the core."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []

    def add(self, call: Callable[[Any], None], argument: Any) -> None:
        self._deliveries.append((call, argument))

    def take(self) -> list[Delivery]:
        """Return the calls since the last `take`."""
        deliveries, self._deliveries = self._deliveries, []
        return deliveries


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens to append to a context. The first piece of a context creates or forks it."""

    context_id: int
    token_ids: "array[int]"
    parent_id: int = NO_PARENT
    parent_len: int | None = None  # None: all tokens of the parent.
    first_id: int | None = None  # Put before the tokens of an empty context (BOS).
    public_len: int = 0  # First tokens that a context without a parent shares with any salt.

    def repeats_fork(self, creator: "Piece") -> bool:
        """Whether the piece names no fork, or the fork of `creator`, the context's first piece."""
        return self.parent_id in (NO_PARENT, creator.parent_id) and (
            self.parent_len in (None, creator.parent_len)
        )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A request to the core: fill all pieces, then generate after the last one with `sampling`.

    With `pooling` or `num_scored` the request reads hidden states. Its contexts are temporary."""

    request_id: int  # Chosen by the sender, for aborts.
    pieces: tuple[Piece, ...]
    priority: int = 0  # Smaller values run first. Fills may be `BACKGROUND`.
    sampling: SamplingConfig | None = None
    stream: bool = False
    # Contexts share KV only within one salt, except public prefixes.
    cache_salt: str = ""
    # Fraction by which a background fill may lengthen the steps of other jobs.
    background_share: float = 1.0
    # The constraint of `sampling`, advanced by `resumed_ids`.
    constraint: Constraint | None = None
    # The first tokens of the output, which another engine has generated.
    resumed_ids: Sequence[int] = ()
    pooling: PoolingKind | None = None  # Return an embedding of each piece.
    # Return log probabilities of each piece's tokens, and of this many most likely tokens.
    num_scored: int | None = None
    drafts: DraftSources = field(default_factory=DraftSources)
    share: TenantShare = ALONE  # The tenant whose share of KV and step time is used.

    def reading(self) -> "Pooling | Scoring | None":
        """A new reading of a piece; None if the request reads no hidden states."""
        if self.pooling is not None:
            return Pooling(kind=self.pooling)
        return None if self.num_scored is None else Scoring(num_top=self.num_scored)


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Reads a context's final hidden states, step by step.

    Each position is read once, also if it is computed several times.

    position   0 ... num_read ............... num_scheduled ........ end
               `- read -'  `- in steps in flight -'"""

    num_scheduled: int = 0
    num_read: int = 0

    def reset_in_flight(self) -> None:
        """Read the positions of failed steps in flight again."""
        self.num_scheduled = self.num_read


@dataclass(slots=True, kw_only=True)
class Pooling(_Reading):
    """Reads one vector: the sum of all hidden states, or the last one."""

    kind: PoolingKind
    states: StateSum | None = None

    def spec(self, job_id: int, start: int, stop: int, token_ids: "array[int]") -> PoolSpec | None:
        """The part that a step with positions [start, stop) reads; None if it reads nothing."""
        first = max(start, len(token_ids) - 1 if self.kind == "last" else self.num_scheduled)
        return PoolSpec(job_id, first - start, stop - start) if first < stop else None

    def add(self, read: StateRead, stop: int) -> None:
        """Add the states from `num_read` to position `stop`."""
        assert not isinstance(read, Logprobs), read
        self.states = read if self.states is None else self.states.plus(read)
        self.num_read = stop

    def result(self, token_ids: "array[int]") -> bytes | None:
        """The vector of length 1; None if the sum is zero or not finite."""
        return None if self.states is None else self.states.unit()


@dataclass(slots=True, kw_only=True)
class Scoring(_Reading):
    """Reads log probabilities: of all tokens except the first, and of `num_top` likely tokens."""

    num_top: int
    rows: Logprobs | None = None
    is_finite: bool = True

    def spec(self, job_id: int, start: int, stop: int, token_ids: "array[int]") -> ScoreSpec | None:
        """See `Pooling.spec`. The step of the last position always has a spec."""
        first = min(max(start, self.num_scheduled), stop)
        targets = token_ids[first + 1 : stop + 1]
        is_wanted = targets or stop == len(token_ids)
        return ScoreSpec(job_id, first - start, targets, self.num_top) if is_wanted else None

    def add(self, read: StateRead, stop: int) -> None:
        assert isinstance(read, Logprobs), read
        self.rows = self.rows or Logprobs(1 + self.num_top)
        self.rows.extend(read)
        self.is_finite = self.is_finite and isfinite(sum(read.values))
        self.num_read = stop

    def result(self, token_ids: "array[int]") -> Logprobs | None:
        """The rows of all tokens; None if a value is not finite. The first row is a placeholder."""
        first = [token_ids[0], *[-1] * self.num_top]
        found = Logprobs(len(first), first, [0.0] * len(first))
        found.extend(self.rows or Logprobs(len(first)))
        return found if self.is_finite else None


@dataclass(slots=True)
class PromptTotals:
    """The prompt tokens of successful requests, by the place where their KV was found."""

    num_on_device: int = 0
    num_on_host: int = 0
    num_computed: int = 0

    def add(self, request: "RequestState") -> None:
        self.num_on_device += request.num_cached - request.num_host_cached
        self.num_on_host += request.num_host_cached
        self.num_computed += request.num_missing

    def payload(self) -> PromptTokens:
        return PromptTokens(
            device=self.num_on_device, host=self.num_on_host, nowhere=self.num_computed
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """An accepted request, shared by its jobs.

    Times are in seconds of the clock, and None until they are known."""

    params: EngineRequest
    sink: Sink
    generation: Generation | None
    submitted_at: float
    jobs: "list[Job]" = field(init=False, default_factory=list)
    num_unfinished: int = field(init=False, default=0)
    num_filled: int = field(init=False, default=0)
    num_missing: int = field(init=False, default=0)
    # Tokens whose KV was loaded from CPU memory for the request.
    num_from_host: int = field(init=False, default=0)
    prompt_len: int = field(init=False, default=0)
    started_at: float | None = field(init=False, default=None)
    prompt_done_at: float | None = field(init=False, default=None)
    # The engine's totals at `started_at`.
    totals_at_start: StepTotals | None = field(init=False, default=None)
    has_ended: bool = field(init=False, default=False)

    @property
    def context_id(self) -> int:
        """The context of the last piece, where a generation appends its tokens."""
        return self.params.pieces[-1].context_id

    def start(self, now: float, totals: StepTotals) -> None:
        """Record the start of the request's first step."""
        self.started_at, self.totals_at_start = now, replace(totals)

    @property
    def num_cached(self) -> int:
        """Prompt tokens that had KV when the first step of their job was planned."""
        return max(0, self.prompt_len - self.num_missing)

    @property
    def num_host_cached(self) -> int:
        """Tokens of `num_cached` whose KV was loaded from CPU memory."""
        # A token may be loaded more than once.
        return min(self.num_from_host, self.num_cached)

    def response(self, now: float, totals: StepTotals) -> Response:
        found = [job.reading_result for job in self.jobs]
        if self.params.pooling is not None:
            return EmbedResponse.model_construct(
                embeddings=[b64encode(one).decode() for one in found if isinstance(one, bytes)],
                prompt_tokens=self.num_filled,
            )
        if self.params.num_scored is not None:
            return ScoreResponse.model_construct(
                logprobs=[one for one in found if isinstance(one, Logprobs)],
                prompt_tokens=self.num_filled,
            )
        generation = self.generation
        if generation is None:
            return FillResponse(
                filled_len=self.num_filled,
                cached_tokens=self.num_cached,
                computed_tokens=self.num_missing,
            )
        assert generation.finish_reason is not None, "the generation has not ended"
        return GenerateResponse.model_construct(
            generated_text=generation.text(),
            generated_ids=generation.output_ids,
            finish_reason=generation.finish_reason,
            stop_string=generation.stop_string,
            usage=self._usage(len(generation.output_ids), now, totals),
            logprobs=generation.logprobs,
        )

    def _usage(self, num_output_tokens: int, now: float, totals: StepTotals) -> Usage:
        started = now if self.started_at is None else self.started_at
        prompt_done = now if self.prompt_done_at is None else self.prompt_done_at
        before = totals if self.totals_at_start is None else self.totals_at_start
        drafts = next((job.drafts for job in self.jobs if job.drafts is not None), None)
        return Usage.model_construct(
            cached_tokens=self.num_cached,
            host_tokens=self.num_host_cached,
            computed_tokens=self.num_missing,
            output_tokens=num_output_tokens,
            drafted_tokens=0 if drafts is None else drafts.num_drafted,
            accepted_tokens=0 if drafts is None else drafts.num_accepted,
            queue_s=started - self.submitted_at,
            prefill_s=prompt_done - started,
            decode_s=now - prompt_done,
            steps=totals.num_steps - before.num_steps,
            step_sequences=totals.num_sequences - before.num_sequences,
            step_prompt_tokens=totals.num_prompt_tokens - before.num_prompt_tokens,
        )


@dataclass(slots=True, eq=False)
class Job:
    """Computes the missing KV of a context and, with a `generation`, samples tokens.

    Jobs of one context run in order of arrival. The first job is opened when the context's fork is
    applied. Then the piece's tokens are appended to the context."""

    job_id: int
    request: RequestState
    context: Context
    piece: Piece
    generation: Generation | None
    priority: int
    # The job only computes evicted KV again, for a fork of the context.
    restores: bool = False
    # Order among jobs of the same priority, in prompt tokens (see scheduler.py).
    queue_position: int = field(init=False, default=0)
    # Order among all jobs.
    key: tuple[int, ...] = field(init=False, default=())
    is_open: bool = field(init=False, default=False)
    is_admitted: bool = field(init=False, default=False)
    # The prompt is computed, and the job was not preempted since.
    is_decoding: bool = field(init=False, default=False)
    has_begun: bool = field(init=False, default=False)
    # The job's part of the request's `num_missing`.
    num_counted: int = field(init=False, default=0)
    # A step in flight samples the next token, or ends the `reading`.
    awaits_token: bool = field(init=False, default=False)
    # The load from CPU memory that the job waits for.
    pending_load: "PendingLoad[Job] | None" = field(init=False, default=None)
    has_ended: bool = field(init=False, default=False)
    reading: Pooling | Scoring | None = field(init=False, default=None)
    # The result of the `reading`.
    reading_result: bytes | Logprobs | None = field(init=False, default=None)
    # None: the output has no drafts.
    drafts: OutputDrafts | None = field(init=False, default=None)

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND

    @property
    def may_continue(self) -> bool:
        """Whether another token may follow the token that the job awaits."""
        return self.generation is not None and self.generation.num_left > 1

    def count_missing(self) -> None:
        """Update the request's `num_missing`. Cached KV may be evicted until the job begins."""
        num_missing = self.context.num_missing
        self.request.num_missing += num_missing - self.num_counted
        self.num_counted = num_missing

    def adopt(self, tree: ContextTree) -> int:
        """Adopt published KV in GPU memory, unless a load is pending.

        Returns the number of tokens with new KV."""
        context = self.context
        if self.pending_load is not None or context.num_missing <= 1:
            return 0
        if not (num_found := tree.adopt(context)):
            return 0
        if not self.has_begun:
            self.count_missing()
        if not context.num_missing:
            tree.rewind_one(context)
        return num_found

    def sequence(self, num_tokens: int, drafts: tuple[int, ...], block_size: int) -> SequenceStep:
        """The job's part of a step that computes `num_tokens` missing tokens and then `drafts`."""
        context = self.context
        start = context.num_computed
        end = start + num_tokens
        token_ids = context.token_ids[start:end]
        sample = self._sample(drafts) if end == len(context.token_ids) else None
        read = None
        if self.reading is not None:
            read = self.reading.spec(self.job_id, start, end, context.token_ids)
        if drafts:
            token_ids.extend(drafts)
            end += len(drafts)
        blocks = context.block_ids[: -(-end // block_size)]
        return SequenceStep(context.context_id, token_ids, start, blocks, sample, read)

    def _sample(self, drafts: tuple[int, ...]) -> SampleSpec | None:
        generation = self.generation
        if generation is None:
            return None
        return SampleSpec(
            self.job_id,
            generation.sampling,
            generation.seed,
            len(self.context.token_ids),
            generation.output_ids,
            self.context.token_ids,
            generation.constraint,
            drafts,
            generation.resumed_ids,
        )

    def begin_drafts(self, shared: Acceptance) -> None:
        """Allow drafts for the output, unless the request forbids them.

        `shared`: the acceptance of all outputs of the engine."""
        sources, generation = self.request.params.drafts, self.generation
        if generation is None or generation.logprobs is not None:
            return
        if not (sources.in_context or sources.texts):
            return
        # The module needs NumPy, which only engines with a model have.
        from parrot.engine.drafts.finder import DraftFinder

        self.drafts = OutputDrafts(
            DraftFinder(sources.texts, in_context=sources.in_context),
            self.context.token_ids,
            generation.output_ids,
            generation.max_tokens,
            generation.constraint,
            Acceptance(shared),
        )


class ContextQueues:
    """The jobs that write to each context, in order of arrival. Only the first job may run."""

    def __init__(self) -> None:
        self._queues: dict[Context, list[Job]] = {}

    def of(self, context: Context) -> Sequence[Job]:
        return self._queues.get(context, ())

    def add(self, job: Job) -> None:
        self._queues.setdefault(job.context, []).append(job)

    def remove(self, job: Job) -> None:
        queue = self._queues[job.context]
        queue.remove(job)
        if not queue:
            del self._queues[job.context]
