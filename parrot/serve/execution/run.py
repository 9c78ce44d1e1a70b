"""Runs: the work that makes one result, and its attempts on engines.

    completion --.              .-- attempt on an engine that is lost
    completion ---> Run --------+
    completion --'              `-- attempt on another ---> result, for all who wait

Identical deterministic completions wait for one run, as equals: whoever leaves takes nothing away
from the others."""

import asyncio
from array import array
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import NamedTuple

from parrot.protocol.engine_api import GenerateResponse
from parrot.protocol.errors import (
    CallFailed,
    EngineFailed,
    InvalidRequest,
    ModelNumerics,
    NotFound,
    OutOfMemory,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    StaleCore,
    Unavailable,
)
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.transport import Unreachable
from parrot.serve.contexts.index import LedgerContext, Owner
from parrot.serve.contexts.ledger import CacheMiss
from parrot.serve.execution.fleet import Engine
from parrot.serve.graph.nodes import Completion, Objective, RunStats, TokenizedText
from parrot.serve.graph.objective import strictest_objective
from parrot.serve.prompts.encode import Ids, ModelTokenizer, Units
from parrot.serve.prompts.segments import extend_key, output_segment
from parrot.serve.scheduling.task import UNBOUND, CompletionTask, EngineShare

_MAX_ENGINE_LOSSES = 3
_MAX_REJECTIONS = 5


class RunState(Enum):
    NEW = auto()
    QUEUED = auto()  # in the scheduler's queue
    PLACED = auto()  # on an engine, where its attempt is under way
    WITHDRAWN = auto()  # nobody waits for it; what it has generated is kept
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Attempt:
    """A prompt on one engine, for a run or ahead of it.

    `runner` carries it out, unless it has ended. `is_longest`: no live engine takes longer
    sequences, so an output for which there is no room is cut, not sent elsewhere. `sampling` has
    the length for which there is room. `resumed`: the text that earlier attempts have delivered, in
    the engine's units, which goes behind the prompt, and `resumed_key` the prefix key of both;
    `num_delivered`: its tokens. `opened`: the contexts that were created, the one that it pins
    (`context`) last. `lost`: what some context had of the prompt, but none of its engine.
    `is_whole`: its engine was asked for the whole output, which `follower` follows, once somebody
    wants it as it comes; until then the engine tells now and then of its tokens, which are
    `heard`."""

    task: CompletionTask
    engine: Engine
    priority: int = 0
    is_longest: bool = True
    share: EngineShare = UNBOUND
    started_at: float = 0.0
    runner: "asyncio.Task[None] | None" = None
    tokenizer: ModelTokenizer | None = field(init=False)
    sampling: SamplingConfig = field(init=False)
    resumed: Units = ()
    resumed_key: bytes = b""
    num_delivered: int = 0
    context: LedgerContext | None = None
    opened: list[LedgerContext] = field(default_factory=list)
    cache_miss: CacheMiss | None = None
    is_unstreamed: bool = False
    follower: "asyncio.Task[None] | None" = None
    reported_ids: "array[int]" = field(default_factory=lambda: array("I"))

    def __post_init__(self) -> None:
        self.tokenizer = self.engine.tokenizer
        self.sampling = self.task.completion.sampling

    @property
    def resumed_ids(self) -> list[int]:
        """The tokens after which the output continues; empty for engines that take text."""
        return [unit for unit in self.resumed if isinstance(unit, int)]

    def stop(self) -> None:
        """Let its runner do nothing more."""
        assert self.runner is not None, self
        self.runner.cancel()
        self.runner = None
        self.stop_following()

    def record_failure(self, error: ParrotError) -> None:
        """Remember of the engine whether it could be reached."""
        if isinstance(error, Unreachable):
            self.engine.unreachable_since = min(self.started_at, self.engine.unreachable_since)

    def may_have_crashed_engine(self, lease_s: float) -> bool:
        """Whether it may be why its engine was lost. One that could not be reached when it came, or
        had been silent for half of its lease, was in trouble already, as all are when ServeCore is
        cut off from them."""
        engine = self.engine
        silent_s = self.started_at - engine.last_seen
        was_lost = self.started_at >= engine.unreachable_since or silent_s > lease_s / 2
        return not (engine.lost_without_crash or was_lost)

    def stop_following(self) -> None:
        self.is_unstreamed = False
        if self.follower is not None:
            self.follower.cancel()


class ReportedOutput(NamedTuple):
    """Tokens of an output that nobody got as it came, from its beginning, by this tokenizer."""

    tokenizer: ModelTokenizer
    ids: Ids


class Outcome(NamedTuple):
    """The whole text, and its tokens if there are ids that stand for exactly this text.
    `num_units`: what the engine appended to the context."""

    text: str
    tokenized: TokenizedText | None
    num_units: int
    response: GenerateResponse


@dataclass(slots=True, eq=False)
class Run(CompletionTask):
    """The work for one result, which all `waiters` get.

    `result_key`: equal for identical runs; None if it is not shared. `text` was delivered to the
    waiters so far, `ids` are its tokens by the tokenizer of `tokenizer_id`, and `num_streamed` its
    tokens where ids are unknown. `num_counted`: tokens of prompt and output that were paid when it
    was withdrawn. `num_lost` counts engines that died or failed with it, but for those that
    ServeCore lost since it stood still itself,
    `num_rejected` refusals for want of memory or of a context, and `last_failure` says why the last
    attempt came to nothing. What was `heard` of that is delivered when the next begins."""

    waiters: list[Completion] = field(default_factory=list)
    result_key: bytes | None = None
    stats: RunStats = field(default_factory=RunStats)
    state: RunState = RunState.NEW
    attempt: Attempt | None = None
    num_lost: int = 0
    num_rejected: int = 0
    text: str = ""
    ids: list[int] = field(default_factory=list)
    tokenizer_id: str | None = None
    num_streamed: int = 0
    num_counted: int = 0
    last_failure: str = ""
    reported: ReportedOutput | None = None

    @property
    def objective(self) -> Objective | None:
        """The strictest of all who wait for it."""
        objective = None
        for waiter in self.waiters:
            objective = strictest_objective(objective, waiter.objective)
        return objective

    @property
    def wants_stream(self) -> bool:
        return any(waiter.wants_stream for waiter in self.waiters)

    @property
    def is_racing(self) -> bool:
        """It may be withdrawn at any time, and is to go on from there when it is wanted again."""
        return any(waiter.is_racing for waiter in self.waiters)

    @property
    def owner(self) -> Owner:
        """The owner of its context: the session, or the tenant where sessions share the run."""
        first = self.waiters[0].session_id
        if all(waiter.session_id == first for waiter in self.waiters):
            return first
        return self.completion.options.tenant

    @property
    def has_retries_left(self) -> bool:
        return self.num_lost < _MAX_ENGINE_LOSSES and self.num_rejected < _MAX_REJECTIONS

    @property
    def can_continue(self) -> bool:
        """Whether it can go on behind its text. What constrains an output, or penalises repetition
        in it, depends on what was generated before, which another attempt takes for its prompt.
        Servers that render a conversation begin a new answer."""
        sampling = self.completion.sampling
        if self.conversation is not None:
            return False
        is_constrained = sampling.constraint is not None
        return bool(self.text) and not is_constrained and not sampling.adjusts_logits

    def output_key(self, text: str) -> bytes:
        """The prefix key of the prompt with this output."""
        return extend_key(self.keys[-1], output_segment(text, None))

    def count_lost_engine(self, *, is_suspect: bool) -> None:
        """The engine that ran it is gone; not `counts`: it cannot be the cause."""
        self.num_lost += is_suspect
        self.last_failure = "the engine was lost"

    def save_reported_output(self, attempt: Attempt) -> None:
        """The attempt has come to nothing: the next goes on behind what is known of its output.
        Log probabilities are not heard."""
        if not attempt.reported_ids or attempt.follower is not None or attempt.tokenizer is None:
            return
        if self.completion.sampling.logprobs is None:
            self.reported = ReportedOutput(
                attempt.tokenizer, (*attempt.resumed_ids, *attempt.reported_ids)
            )

    def count_response(self, attempt: Attempt, outcome: Outcome) -> None:
        """Take over what the engine tells of the attempt's work."""
        usage, stats = outcome.response.usage, self.stats
        stats.cached_tokens, stats.computed_tokens = usage.cached_tokens, usage.computed_tokens
        num_prompt = usage.cached_tokens + usage.computed_tokens - attempt.num_delivered
        stats.prompt_tokens = max(0, num_prompt)  # of a server that counts nothing
        stats.output_tokens = (usage.output_tokens or outcome.num_units) + attempt.num_delivered
        stats.used_tokens = self.count_used(stats.prompt_tokens + stats.output_tokens)
        stats.drafted_tokens, stats.accepted_tokens = usage.drafted_tokens, usage.accepted_tokens
        stats.decode_s = usage.decode_s if usage.steps else None
        stats.finish_reason = outcome.response.finish_reason
        stats.stop_string = outcome.response.stop_string
        if usage.output_tokens:
            self.used = (usage.computed_tokens, usage.output_tokens)

    def count_used(self, num_tokens: int) -> int:
        """How many of its first `num_tokens` tokens were not counted yet; they are now."""
        added = max(0, num_tokens - self.num_counted)
        self.num_counted += added
        return added

    def count_delivered(self) -> int:
        """The same for its prompt and what was delivered, if it runs."""
        return 0 if self.attempt is None else self.count_used(self.prompt_len + self.num_streamed)

    def append(self, text: str) -> None:
        """Some more of the output was generated."""
        self.text += text
        for waiter in self.waiters:
            waiter.output.append(text)


def needs_ping(error: ParrotError) -> bool:
    """Whether the engine may be dead, which only a ping can tell: one connection that was reset
    says nothing of the others. One that obeys another ServeCore answers none."""
    is_gone = isinstance(error, Unavailable | StaleCore)
    return is_gone and not isinstance(error, OutOfMemory)


def should_retry(run: Run, attempt: Attempt, error: ParrotError, *, is_suspect: bool) -> bool:
    """Count the error against the run, which is given up after a few; not `counts`: it cannot be
    the cause of a loss. False if it is given up now, or if running it again would not help."""
    engine = attempt.engine
    run.last_failure = error.message
    match error:
        case PromptTooLong() if not attempt.is_longest:
            run.max_total_len = max(run.max_total_len, engine.max_len + 1)
            return True
        case ModelNumerics() | InvalidRequest():
            return False
        case OutOfMemory() | NotFound():
            run.num_rejected += 1
        case QuotaExceeded():
            run.num_rejected += 1
            run.failed_engines.add(engine.id)
        case _ if is_suspect:
            run.num_lost += 1
            run.failed_engines.add(engine.id)
    return run.has_retries_left


def final_error(engine: Engine, error: ParrotError) -> ParrotError:
    """The error that the reader gets. What is between ServeCore and the engine (a token, a size, a
    connection) is never shown as the reader's own fault or as a trouble of ServeCore."""
    match error:
        case CallFailed() | InvalidRequest() | OutOfMemory() | QuotaExceeded():
            return error
        case _:
            name = engine.info.engine_name
            return EngineFailed(f"engine {name} could not run the completion: {error.message}")
