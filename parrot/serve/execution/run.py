"""Runs: the work for one result, and its attempts on engines.

    completion --.              .-- attempt 1: its engine is lost
    completion ---> Run --------+
    completion --'              `-- attempt 2: the result, for all waiting completions

Identical deterministic completions share one run. If one of them is cancelled, the run continues
for the others."""

import asyncio
import math
from array import array
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, NamedTuple

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
from parrot.serve.prompts.messages import chat_messages, with_values
from parrot.serve.prompts.segments import extend_key, output_segment
from parrot.serve.scheduling.task import UNBOUND, CompletionTask, EngineShare

# A run fails after this number of lost engines for which the run may be the cause.
_MAX_ENGINE_LOSSES = 3
# Seconds between the last but one of these losses and the next attempt. Engines that die together
# are then not counted as three losses. Larger values delay the attempt.
_LAST_ATTEMPT_DELAY_S = 1.0
# A run fails after this number of rejections: no KV memory, an unknown context, or no quota.
_MAX_REJECTIONS = 5
_MAX_ATTEMPTS = 100  # A run fails after this number of attempts, whatever the reasons.


class RetriesExhausted(EngineFailed):
    """The engine's retries have failed, and no other engine can run the request."""


class RunState(StrEnum):
    NEW = auto()
    QUEUED = auto()  # The run is in the scheduler's queue.
    DELAYED = auto()  # The run waits before its last attempt. The scheduler does not have it.
    PLACED = auto()  # The run has an attempt on an engine.
    WITHDRAWN = auto()  # The run has no waiters. Its partial output is kept, and may be continued.
    ENDED = auto()  # The run has finished, failed, or was cancelled.


@dataclass(slots=True, eq=False)
class Attempt:
    """One request to one engine, for a run or for a prefetch."""

    task: CompletionTask
    engine: Engine
    priority: int = 0  # In the engine's queue; lower is earlier.
    # No live engine takes longer sequences. So an output that does not fit is cut to the engine's
    # limit, and not sent elsewhere.
    is_longest: bool = True
    share: EngineShare = UNBOUND
    started_at: float = 0.0
    is_sent: bool = False  # Whether the engine may have received the request.
    runner: "asyncio.Task[None] | None" = None  # None: the attempt has ended.
    tokenizer: ModelTokenizer | None = field(init=False)
    sampling: SamplingConfig = field(init=False)  # `max_gen_length` is cut to the engine's limit.
    conversation: dict[str, Any] | None = field(init=False)  # See `GenerateRequest`.
    # Output of earlier attempts, in the engine's units. The request appends it to the prompt.
    resumed: Units = ()
    resumed_key: bytes = b""  # The prefix key of the prompt with `resumed`.
    num_delivered: int = 0  # Number of tokens of `resumed`.
    context: LedgerContext | None = None  # The pinned context, which the output is appended to.
    opened: list[LedgerContext] = field(default_factory=list)  # In order; `context` is the last.
    cache_miss: CacheMiss | None = None
    # The engine was asked for the whole output at once. `follower` streams the output if a reader
    # wants that later. Until then, `reported_ids` are the tokens in the engine's heartbeats.
    is_unstreamed: bool = False
    follower: "asyncio.Task[None] | None" = None
    reported_ids: "array[int]" = field(default_factory=lambda: array("I"))

    def __post_init__(self) -> None:
        self.tokenizer = self.engine.tokenizer
        task = self.task
        self.sampling, self.conversation = task.completion.sampling, task.conversation
        if self.conversation is not None and task.completion.conversation_inputs:
            inputs = task.completion.conversation_inputs
            self.conversation = with_values(self.conversation, inputs)
        elif self.tokenizer is None and task.completion.options.chat and self._takes_messages:
            self.conversation = {"messages": chat_messages(task.segments)}

    @property
    def can_resume(self) -> bool:
        """Whether the engine can continue a partial output.

        An engine that takes text cannot restore the state of a grammar. A server that renders the
        conversation starts a new answer."""
        has_grammar = self.sampling.constraint is not None
        return self.tokenizer is not None or not (has_grammar or self.conversation is not None)

    @property
    def _takes_messages(self) -> bool:
        """Whether the engine's server applies the model's chat template."""
        return "messages" in (self.engine.info.capabilities.features or ())

    @property
    def resumed_ids(self) -> list[int]:
        """The ids of `resumed`; empty for engines that take text."""
        return [unit for unit in self.resumed if isinstance(unit, int)]

    def stop(self) -> None:
        """Cancel the runner and the follower."""
        assert self.runner is not None, self
        self.runner.cancel()
        self.runner = None
        self.stop_following()

    def record_failure(self, error: ParrotError) -> None:
        """Record whether the engine was unreachable."""
        if isinstance(error, Unreachable):
            self.engine.unreachable_since = min(self.started_at, self.engine.unreachable_since)

    def may_have_crashed_engine(self, lease_s: float) -> bool:
        """Whether the attempt may be the reason why its engine was lost.

        It is not if the request was not sent yet. It is not if the engine was unreachable, or
        silent for half of its lease, when the attempt started. All engines are in this state after
        ServeCore's network failed."""
        engine = self.engine
        silent_s = self.started_at - engine.last_seen
        was_lost = self.started_at >= engine.unreachable_since or silent_s > lease_s / 2
        return self.is_sent and not (engine.lost_without_crash or was_lost)

    def stop_following(self) -> None:
        self.is_unstreamed = False
        if self.follower is not None:
            self.follower.cancel()


class ReportedOutput(NamedTuple):
    """The first tokens of an unstreamed output, as the engine's heartbeats reported them."""

    tokenizer: ModelTokenizer
    ids: Ids


class Outcome(NamedTuple):
    """The result of an attempt, with the output of earlier attempts."""

    text: str
    tokenized: TokenizedText | None  # None: no token ids stand for exactly this text.
    num_units: int  # Tokens or characters that the engine appended to the context.
    response: GenerateResponse


@dataclass(slots=True, eq=False)
class Run(CompletionTask):
    """The work for one result. All `waiters` receive the result.

    `RunTable` owns the state. A run has an attempt only while its state is PLACED."""

    waiters: list[Completion] = field(default_factory=list)
    result_key: bytes | None = None  # Equal for identical runs; None: the run is not shared.
    stats: RunStats = field(default_factory=RunStats)
    state: RunState = RunState.NEW
    attempt: Attempt | None = None
    num_lost: int = 0  # Number of lost engines for which this run may be the cause.
    lost_at: float = -math.inf  # Time of the last of these losses.
    num_rejected: int = 0
    text: str = ""  # The output that the waiters have received so far.
    ids: list[int] = field(default_factory=list)  # The tokens of `text`.
    tokenizer_id: str | None = None  # The tokenizer of `ids`.
    num_streamed: int = 0  # Number of tokens of `text`, also if the ids are unknown.
    num_counted: int = 0  # Tokens of prompt and output that are already in a call's `used_tokens`.
    last_failure: str = ""  # Why the last attempt failed.
    reported: ReportedOutput | None = None  # Output of a lost attempt, for the next one to deliver.

    @property
    def objective(self) -> Objective | None:
        """The strictest objective of all waiters."""
        objective = None
        for waiter in self.waiters:
            objective = strictest_objective(objective, waiter.objective)
        return objective

    @property
    def wants_stream(self) -> bool:
        return any(waiter.wants_stream for waiter in self.waiters)

    @property
    def is_racing(self) -> bool:
        """Whether a waiter is in a race, so it may be withdrawn at any time and continued later."""
        return any(waiter.is_racing for waiter in self.waiters)

    @property
    def owner(self) -> Owner:
        """The owner of the context: the session, or the tenant if several sessions wait."""
        sessions = {waiter.session_id for waiter in self.waiters}
        return sessions.pop() if len(sessions) == 1 else self.completion.options.tenant

    @property
    def has_retries_left(self) -> bool:
        is_unlucky = self.num_lost >= _MAX_ENGINE_LOSSES or self.num_rejected >= _MAX_REJECTIONS
        return not is_unlucky and self.stats.attempts < _MAX_ATTEMPTS

    @property
    def can_continue(self) -> bool:
        """Whether a later attempt can continue after `text`."""
        sampling, attempt = self.completion.sampling, self.attempt
        if self.conversation is not None or (attempt is not None and attempt.conversation):
            return False  # A server that renders the conversation starts a new answer.
        # Grammars and penalties depend on the output so far. A new attempt gets that as its prompt.
        is_constrained = sampling.constraint is not None
        return bool(self.text) and not is_constrained and not sampling.adjusts_logits

    def is_cut_off(self, attempt: Attempt) -> bool:
        """Whether the readers have received a part of an output that the engine cannot continue.
        The rest of another answer must not follow that part."""
        return bool(self.text) and not attempt.can_resume

    def output_key(self, text: str) -> bytes:
        """The prefix key of the prompt with this output."""
        return extend_key(self.keys[-1], output_segment(text, None))

    def count_lost_engine(self, now: float, *, is_suspect: bool) -> None:
        """Record the loss of the run's engine. `is_suspect`: the run may be the cause."""
        if is_suspect:
            self.num_lost, self.lost_at = self.num_lost + 1, now
        self.last_failure = "the engine was lost"

    def delay_s(self, now: float) -> float:
        """Seconds until the next attempt may be placed. Only the last attempt must wait."""
        is_last = self.num_lost == _MAX_ENGINE_LOSSES - 1
        return max(0.0, self.lost_at + _LAST_ATTEMPT_DELAY_S - now) if is_last else 0.0

    def save_reported_output(self, attempt: Attempt) -> None:
        """Save the reported tokens of a failed attempt, for the next attempt to continue."""
        if not attempt.reported_ids or attempt.follower is not None or attempt.tokenizer is None:
            return
        # Heartbeats contain no log probabilities, so such an output must start from the beginning.
        if self.completion.sampling.logprobs is None:
            self.reported = ReportedOutput(
                attempt.tokenizer, (*attempt.resumed_ids, *attempt.reported_ids)
            )

    def count_response(self, attempt: Attempt, outcome: Outcome) -> None:
        """Copy the engine's usage counts into the run's statistics."""
        usage, stats = outcome.response.usage, self.stats
        stats.cached_tokens, stats.computed_tokens = usage.cached_tokens, usage.computed_tokens
        num_prompt = usage.cached_tokens + usage.computed_tokens - attempt.num_delivered
        stats.prompt_tokens = max(0, num_prompt)  # A server without usage counts reports 0.
        stats.output_tokens = (usage.output_tokens or outcome.num_units) + attempt.num_delivered
        stats.used_tokens = self.count_used(stats.prompt_tokens + stats.output_tokens)
        stats.drafted_tokens, stats.accepted_tokens = usage.drafted_tokens, usage.accepted_tokens
        stats.decode_s = usage.decode_s if usage.steps else None
        stats.finish_reason = outcome.response.finish_reason
        stats.extra = outcome.response.extra
        stats.stop_string = outcome.response.stop_string
        if usage.output_tokens:
            self.used = (usage.computed_tokens, usage.output_tokens)

    def count_used(self, num_tokens: int) -> int:
        """Count the run's first `num_tokens` tokens. Returns how many were not counted before."""
        added = max(0, num_tokens - self.num_counted)
        self.num_counted += added
        return added

    def count_delivered(self) -> int:
        """Count the prompt and the delivered output, if the run is placed. See `count_used`."""
        return 0 if self.attempt is None else self.count_used(self.prompt_len + self.num_streamed)

    def append(self, text: str) -> None:
        """Deliver more of the output to all waiters."""
        self.text += text
        for waiter in self.waiters:
            waiter.output.append(text)


def needs_ping(error: ParrotError) -> bool:
    """Whether the engine may be dead. Only a ping can tell, because one connection may be reset
    while others work. An engine that another ServeCore has taken over fails the ping."""
    may_be_dead = isinstance(error, Unavailable | StaleCore)
    return may_be_dead and not isinstance(error, OutOfMemory)


def should_retry(
    run: Run, attempt: Attempt, error: ParrotError, *, is_suspect: bool, is_busy: bool
) -> bool:
    """Count the error of a failed attempt. False if the run must fail now.

    `is_suspect`: the run may be the cause if the engine was lost. `is_busy`: the engine runs other
    calls, so a rejection means that the run must wait for one of them."""
    engine = attempt.engine
    run.last_failure = error.message
    if run.is_cut_off(attempt):
        return False
    match error:
        case PromptTooLong() if not attempt.is_longest:
            run.max_total_len = max(run.max_total_len, engine.max_len + 1)
            return True
        case ModelNumerics() | InvalidRequest() | RetriesExhausted():
            return False
        case OutOfMemory() | NotFound():
            run.num_rejected += 1
        case QuotaExceeded():
            run.num_rejected += not is_busy
            run.failed_engines.add(engine.id)
        case _ if is_suspect:
            run.num_lost += 1
            run.failed_engines.add(engine.id)
    return run.has_retries_left


def final_error(engine: Engine, error: ParrotError) -> ParrotError:
    """The error for the reader. Errors between ServeCore and the engine, such as a rejected token,
    become `EngineFailed`: they are not the reader's fault."""
    match error:
        case CallFailed() | InvalidRequest() | OutOfMemory() | QuotaExceeded():
            return error
        case _:
            name = engine.info.engine_name
            return EngineFailed(f"engine {name} could not run the completion: {error.message}")
