"""Requests, their jobs, and the queues and policies that keep the jobs in order."""

from array import array
from base64 import b64encode
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any

from parrot.engine.core.contexts import Context
from parrot.engine.core.host.tier import Arrival
from parrot.engine.core.output import Generation
from parrot.engine.core.plan import PoolSpec, SampleSpec, SequenceStep, StateSum
from parrot.engine.drafts.finder import DraftFinder
from parrot.engine.drafts.output_drafts import OutputDrafts
from parrot.engine.grammar.constraint import Constraint
from parrot.protocol.engine_api import (
    NO_PARENT,
    DraftSources,
    EmbedResponse,
    FillResponse,
    GenerateResponse,
    PoolingKind,
    PromptTokens,
    StreamChunk,
    Usage,
)
from parrot.protocol.errors import ParrotError
from parrot.protocol.sampling import SamplingConfig

BACKGROUND = 2**31
"""The priority of fills that nobody waits for yet: behind all others."""


Response = FillResponse | GenerateResponse | EmbedResponse
Outcome = StreamChunk | Response | ParrotError
Sink = Callable[[Outcome], None]
"""Takes what happens to a request: chunks while it streams, then exactly one of the others."""

Delivery = tuple[Callable[[Any], None], Any]


class Outbox:
    """Events of requests: calls to make, in order, where sinks may be called."""

    def __init__(self) -> None:
        self._deliveries: list[Delivery] = []

    def add(self, call: Callable[[Any], None], argument: Any) -> None:
        self._deliveries.append((call, argument))

    def take(self) -> list[Delivery]:
        """The calls since the last time."""
        deliveries, self._deliveries = self._deliveries, []
        return deliveries


@dataclass(frozen=True, slots=True)
class Piece:
    """Append tokens to a context, which is forked from its parent at its first use.

    `first_id` is put before the tokens if the context is still empty (a BOS token)."""

    context_id: int
    token_ids: "array[int]"
    parent_id: int = NO_PARENT
    parent_len: int | None = None
    first_id: int | None = None

    def repeats_fork(self, creator: "Piece") -> bool:
        """Whether it names no other fork than `creator`, the piece that creates its context."""
        return self.parent_id in (NO_PARENT, creator.parent_id) and (
            self.parent_len in (None, creator.parent_len)
        )


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """What is asked of the core: fill all pieces; then, if `sampling` is given, generate after the
    last one. Lower `priority` runs first; fills may be `BACKGROUND`. `request_id` is the
    sender's, for aborting. Roots that it creates share KV only with contexts of the same
    `cache_salt`. `background_share`: how much longer it may make others' steps, if it is a
    background fill. `constraint`: the one of its `sampling`, at the output's beginning. `pooling`:
    give an embedding of each piece, whose contexts are temporary. `drafts`: where to look for
    drafts of its output."""

    request_id: int
    pieces: tuple[Piece, ...]
    priority: int = 0
    sampling: SamplingConfig | None = None
    stream: bool = False
    cache_salt: str = ""
    background_share: float = 1.0
    constraint: Constraint | None = None
    pooling: PoolingKind | None = None
    drafts: DraftSources = field(default_factory=DraftSources)


@dataclass(slots=True)
class Pooling:
    """The final hidden states of a context, on their way to one vector: the sum of all, or the
    last alone. Each position counts once, however often it is computed.

    position   0 ........ num_landed ........ num_taken ........ end
               `- in `states` -'`- in steps on their way -'"""

    kind: PoolingKind
    num_taken: int = 0
    num_landed: int = 0
    states: StateSum | None = None

    def spec(self, job_id: int, start: int, stop: int, length: int) -> PoolSpec | None:
        """What a step that computes positions [start, stop) of `length` is to sum up."""
        first = max(start, length - 1 if self.kind == "last" else self.num_taken)
        return PoolSpec(job_id, first - start, stop - start) if first < stop else None

    def land(self, states: StateSum, stop: int) -> None:
        """Take the sum of the states before position `stop`, from the last ones on."""
        self.states = states if self.states is None else self.states.plus(states)
        self.num_landed = stop

    def lose_flights(self) -> None:
        """Steps on their way have failed."""
        self.num_taken = self.num_landed


@dataclass(slots=True)
class StepTotals:
    """The number of an engine's steps so far, and the sums of their sequences and prompt tokens."""

    num_steps: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0

    def add(self, num_sequences: int, num_prompt_tokens: int) -> None:
        self.num_steps += 1
        self.num_sequences += num_sequences
        self.num_prompt_tokens += num_prompt_tokens


@dataclass(slots=True)
class PromptTotals:
    """The prompt tokens of requests that have ended well, by where their KV was found."""

    num_on_device: int = 0
    num_on_host: int = 0
    num_computed: int = 0

    def add(self, request: "RequestState") -> None:
        self.num_on_device += request.num_cached - request.num_from_host
        self.num_on_host += request.num_from_host
        self.num_computed += request.num_missing

    def payload(self) -> PromptTokens:
        return PromptTokens(
            device=self.num_on_device, host=self.num_on_host, nowhere=self.num_computed
        )


@dataclass(slots=True, eq=False)
class RequestState:
    """An accepted request: the account that its jobs share. Times are the clock's seconds; each is
    stamped once, and None until then. `before`: the engine's totals when it started.
    `num_from_host`: tokens whose KV was brought back for it."""

    wanted: EngineRequest
    sink: Sink
    generation: Generation | None
    submitted_at: float
    jobs: "list[Job]" = field(default_factory=list)
    num_unfinished: int = 0
    num_filled: int = 0
    num_missing: int = 0
    num_from_host: int = 0
    prompt_len: int = 0
    started_at: float | None = None
    prompt_done_at: float | None = None
    before: StepTotals | None = None
    has_ended: bool = False

    @property
    def context_id(self) -> int:
        """That of its last piece, on which it generates if it does."""
        return self.wanted.pieces[-1].context_id

    def start(self, now: float, totals: StepTotals) -> None:
        """Its first step begins."""
        self.started_at, self.before = now, replace(totals)

    @property
    def num_cached(self) -> int:
        """`num_missing` counted each prompt token without KV once, when its job's first step was
        planned."""
        return max(0, self.prompt_len - self.num_missing)

    def response(self, now: float, totals: StepTotals) -> Response:
        if self.wanted.pooling is not None:
            return EmbedResponse.model_construct(
                embeddings=[b64encode(job.embedding).decode() for job in self.jobs],
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
        before = totals if self.before is None else self.before
        drafts = next((job.drafts for job in self.jobs if job.drafts is not None), None)
        return Usage.model_construct(
            cached_tokens=self.num_cached,
            host_tokens=self.num_from_host,
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
    """Bring a context's KV up to all its tokens, and with a `generation`, sample after the last.

    Jobs of one context run in order of arrival. The first of them is opened when its context's
    fork is carried out: only then are `token_ids` appended. `restores`: it only computes KV again
    that the context has lost and a fork wants. `key` is its place among all jobs. `awaits_token`: a
    step that samples for it, or gives the last states for its `pooling`, is on its way. `drafts`:
    None if its output is not drafted. `arrival`: KV from the host that it waits for."""

    job_id: int
    request: RequestState
    context: Context
    piece: Piece
    generation: Generation | None
    priority: int
    restores: bool = False
    key: tuple[int, ...] = ()
    is_open: bool = False
    is_admitted: bool = False
    has_begun: bool = False
    awaits_token: bool = False
    arrival: "Arrival[Job] | None" = None
    has_ended: bool = False
    pooling: Pooling | None = None
    embedding: bytes = b""
    drafts: OutputDrafts | None = None

    @property
    def is_background(self) -> bool:
        return self.priority >= BACKGROUND

    def sequence(self, num_tokens: int, drafts: tuple[int, ...], block_size: int) -> SequenceStep:
        """Its share of a step that computes so many of its missing tokens, and drafts if these are
        all."""
        context = self.context
        start = context.num_computed
        end = start + num_tokens
        token_ids = context.token_ids[start:end]
        sample = self._sample(drafts) if end == len(context.token_ids) else None
        pool = None
        if self.pooling is not None:
            pool = self.pooling.spec(self.job_id, start, end, len(context.token_ids))
        if drafts:
            token_ids.extend(drafts)
            end += len(drafts)
        blocks = context.block_ids[: -(-end // block_size)]
        return SequenceStep(context.context_id, token_ids, start, blocks, sample, pool)

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
        )

    def begin_drafts(self) -> None:
        """Its output may be drafted from now on, unless its request says otherwise."""
        sources, generation = self.request.wanted.drafts, self.generation
        if generation is None or generation.logprobs is not None:
            return
        if not (sources.in_context or sources.texts):
            return
        self.drafts = OutputDrafts(
            DraftFinder(sources.texts, in_context=sources.in_context),
            self.context.token_ids,
            generation.output_ids,
            generation.max_tokens,
            generation.constraint,
        )


_KEY = attrgetter("key")


class JobQueue:
    """Jobs in order of their keys. A job's key must not change while it is in a queue."""

    def __init__(self) -> None:
        self._jobs: list[Job] = []

    def __len__(self) -> int:
        return len(self._jobs)

    def __iter__(self) -> Iterator[Job]:
        """A snapshot, so the loop may change the queue."""
        return iter(self._jobs[:])

    def __contains__(self, job: Job) -> bool:
        at = bisect_left(self._jobs, job.key, key=_KEY)
        return at < len(self._jobs) and self._jobs[at] is job

    def add(self, job: Job) -> None:
        insort(self._jobs, job, key=_KEY)

    def remove(self, job: Job) -> None:
        at = bisect_left(self._jobs, job.key, key=_KEY)
        assert self._jobs[at] is job, f"job {job.job_id} is not in the queue"
        del self._jobs[at]


POLICIES: dict[str, Callable[[Job], tuple[int, ...]]] = {
    "priority": lambda job: (job.priority, job.job_id),
    "fcfs": lambda job: (int(job.is_background), job.job_id),
}
"""Each gives a job its key, by which jobs run: unique and total, so that the first of all jobs
always runs and all end some day. Background jobs come after all others."""
