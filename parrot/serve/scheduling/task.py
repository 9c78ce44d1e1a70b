"""A completion as the scheduler knows it, and its decisions.

Predictions of calls: the lengths of their outputs, learnt from those before, and their seconds.

    seconds of a completion =  overhead
                             + tokens of its own fill * seconds per prompt token
                             + expected output tokens * seconds per step

Engines report what prompts and steps cost. Lengths start from a prior that weighs as much as one
observation, and old observations fade. `seconds` are in the present company; `work_s` is what the
same takes an engine that has nothing else to do, and may be compared whenever it was predicted.
"""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from parrot.protocol.engine_api import Usage
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import (
    Completion,
    Objective,
    Piece,
    PieceKind,
    Prediction,
    Task,
    TextPiece,
)
from parrot.serve.prompts.segments import Segment
from parrot.utils.heaps import LruDict

_NO_OBJECTIVE = Objective(PerformanceCriteria.LATENCY, depth=0, remaining_path_s=0.0)


_OVERHEAD_S = 0.01
_NATIVE_S = 0.01
_UNKNOWN_INPUT_TOKENS = 256
_OUTPUT_SHARE = 0.5  # of max_gen_length: what an output has of which nothing is known
_MAX_FUNCTIONS = 4096
_MAX_RATIOS = 256
_MAX_OUTPUTS = 64.0  # weight of a function's observations; older ones fade
_BOUNDS = tuple(sorted({int(1.15**i) for i in range(100)}))  # up to about a million tokens


@dataclass(slots=True, eq=False)
class CompletionTask:
    """A prompt to be run, and how, of the completion that asked for it first.

    `needs`: what its engine must be able to do, see `Capabilities`. `keys[i]` is the prefix key of
    the prompt that ends with segment i, and `lengths[i]` an estimate of that segment's tokens.
    `expected_output`: tokens that the output is predicted to have. `used`: the tokens of its prompt
    that were computed, and those that were generated, once an engine has told. `service_s`: seconds
    of engines that it has had."""

    completion: Completion
    segments: list[Segment]
    keys: tuple[bytes, ...]
    arrived: float
    expected_output: int
    tokens_per_char: float = 0.25  # of the text whose tokens are not known
    failed_engines: set[int] = field(default_factory=set)  # engines that failed with it
    num_skipped: int = 0  # times the scheduler placed later tasks before it
    used: tuple[int, int] | None = None
    service_s: float = 0.0
    max_total_len: int = field(init=False)  # tokens of prompt and output, as long as both may be
    tenant: str = field(init=False)
    models: tuple[str, ...] = field(init=False)
    needs: frozenset[str] = field(init=False)
    conversation: dict[str, Any] | None = field(init=False)
    max_output: int = field(init=False)
    lengths: tuple[int, ...] = field(init=False)
    prompt_len: int = field(init=False)
    is_latency: bool = field(init=False)  # someone waits for this very output or its tokens
    is_background: bool = field(init=False)  # no reader waits for it, or for what needs it
    remaining_path_s: float = field(init=False)
    deadline: float | None = field(init=False)
    group: tuple[int, str] | None = field(init=False)

    def __post_init__(self) -> None:
        options = self.completion.options
        self.tenant, self.models = options.tenant, options.models
        self.conversation = self.completion.conversation
        self.needs = self.completion.sampling.needs()
        if self.conversation is not None:  # all servers that take one keep to schemas there
            own = {"messages", "tools"} if "tools" in self.conversation else {"messages"}
            self.needs = self.needs - {"json_schema"} | own
        self.max_output = self.completion.sampling.max_gen_length
        self.lengths = tuple([_num_tokens(s, self.tokens_per_char) for s in self.segments])
        self.prompt_len = sum(self.lengths)
        self.max_total_len = self.prompt_len + self.max_output
        self.refresh()

    @property
    def num_chars(self) -> int:
        """Characters of the prompt."""
        return sum([segment.num_chars for segment in self.segments])

    @property
    def objective(self) -> Objective | None:
        return self.completion.objective

    @property
    def wants_stream(self) -> bool:
        return self.completion.wants_stream

    def refresh(self) -> None:
        """Read the objective anew. Only while no queue or engine counts the task."""
        objective = self.objective or _NO_OBJECTIVE
        self.is_latency = objective.criteria is not PerformanceCriteria.THROUGHPUT
        self.is_background = objective.is_background
        self.remaining_path_s = objective.remaining_path_s
        self.deadline = objective.deadline
        group = objective.task_group
        self.group = None if group is None else (self.completion.session_id, group)

    @property
    def num_constant(self) -> int:
        """Number of segments at the prompt's start that come from the template alone."""
        for i, segment in enumerate(self.segments):
            if segment.kind is not PieceKind.CONSTANT:
                return i
        return len(self.segments)


class EngineShare(NamedTuple):
    """The weight of a call's tenant, and by what part others of the same weight may lengthen the
    call's steps; None: by any."""

    weight: float = 1.0
    step_growth: float | None = None


UNBOUND = EngineShare()


@dataclass(frozen=True, slots=True)
class Placement:
    """Run `task` on this engine now. `priority`: its place in the engine's queue, lower first.
    `is_longest`: no live engine of the task's models takes longer sequences. `share`: its
    tenant's."""

    task: CompletionTask
    engine_id: int
    priority: int
    is_longest: bool = True
    share: EngineShare = UNBOUND


class Decision(NamedTuple):
    """A placement that was made, and what it was chosen from.

    `at` is on the clock's scale, `waited_s` since the call was queued. `costs`: the predicted
    seconds on each engine that was compared, None where it did not fit; None if nothing was
    compared."""

    at: float
    session_id: int
    request_id: int
    func_name: str
    engine_id: int
    prompt_tokens: int
    to_compute: int
    waited_s: float
    costs: dict[int, float | None] | None


def _num_tokens(segment: Segment, tokens_per_char: float) -> int:
    if segment.tokenized is not None:
        return len(segment.tokenized.ids)
    return int(segment.num_chars * tokens_per_char) + 1


class OutputLengths:
    """A histogram of one function's output lengths in buckets of 15%, with each bucket's sum."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float]] = {}
        self._weight = 0.0

    def observe(self, num_tokens: int) -> None:
        bucket = bisect_right(_BOUNDS, num_tokens)
        weight, total = self._buckets.get(bucket, (0.0, 0.0))
        self._buckets[bucket] = (weight + 1.0, total + num_tokens)
        self._weight += 1.0
        if self._weight > _MAX_OUTPUTS:
            self._fade()

    def expect(self, prior: float, limit: int) -> float:
        """The mean length of an output that is cut at `limit`; `prior` is one observation."""
        total = prior
        for weight, tokens in self._buckets.values():
            total += min(tokens, weight * limit)
        return total / (1.0 + self._weight)

    def _fade(self) -> None:
        self._buckets = {
            bucket: (weight / 2, total / 2)
            for bucket, (weight, total) in self._buckets.items()
            if weight > 2 / _MAX_OUTPUTS
        }
        self._weight = sum(weight for weight, _ in self._buckets.values())


@dataclass(slots=True)
class _TextRatio:
    """Tokens per character of prompts: a ratio of sums that begins at a usual value and remembers
    about the last million characters."""

    num_tokens: float = 16.0
    num_chars: float = 64.0

    def observe(self, num_tokens: float, num_chars: float) -> None:
        self.num_tokens += num_tokens
        self.num_chars += num_chars
        while self.num_chars > 1e6:
            self.num_tokens, self.num_chars = self.num_tokens / 2, self.num_chars / 2

    @property
    def value(self) -> float:
        return self.num_tokens / self.num_chars


class Pace(NamedTuple):
    """Predicted seconds of a prompt token, of a step in the present company, and of a step of one
    sequence alone."""

    prefill_s: float
    step_s: float
    step_alone_s: float


class Estimates:
    """Predictions for one ServeCore. Every method takes constant time and touches no graph. `pace`
    says how fast engines with some models are now (none named: all engines)."""

    def __init__(self, pace: Callable[[tuple[str, ...]], Pace]) -> None:
        self._pace = pace
        self._functions: LruDict[int, OutputLengths] = LruDict(_MAX_FUNCTIONS)
        self._ratios: LruDict[tuple[str, ...], _TextRatio] = LruDict(_MAX_RATIOS)
        self._prior = _TextRatio()

    def output_tokens(self, completion: Completion) -> int:
        """Exact where the call fixes the length, else what such calls had, at least one."""
        limit = completion.sampling.max_gen_length
        if _has_fixed_length(completion.sampling):
            return limit
        prior = limit * _OUTPUT_SHARE
        lengths = self._functions.get(function_key(completion))
        return 1 + int(prior if lengths is None else lengths.expect(prior, limit))

    def tokens_per_char(self, models: tuple[str, ...]) -> float:
        return (self._ratios.get(models) or self._prior).value

    def tokens(self, completion: Completion) -> int:
        """The predicted tokens of its own fill and its output."""
        per_char = self.tokens_per_char(completion.options.models)
        prompt = sum([_prompt_tokens(piece, per_char) for piece in completion.fill])
        return int(prompt) + self.output_tokens(completion)

    def predict(self, task: Task) -> Prediction:
        """Predict one run from the lengths that are known now."""
        if not isinstance(task, Completion):
            return Prediction(_NATIVE_S, _NATIVE_S)
        models = task.options.models
        per_char = self.tokens_per_char(models)
        prompt = sum([_prompt_tokens(piece, per_char) for piece in task.fill])
        output = self.output_tokens(task)
        pace = self._pace(models)
        prefill_s = prompt * pace.prefill_s
        return Prediction(
            _OVERHEAD_S + prefill_s + output * pace.step_s, prefill_s + output * pace.step_alone_s
        )

    def learn(self, completion: Completion, prompt_chars: int, usage: Usage) -> None:
        """Take in an answer. Engines that count nothing teach nothing."""
        if not usage.output_tokens:
            return
        key, models = function_key(completion), completion.options.models
        if (lengths := self._functions.get(key)) is None:
            self._functions.put(key, lengths := OutputLengths())
        lengths.observe(usage.output_tokens)
        if prompt_tokens := usage.cached_tokens + usage.computed_tokens:
            if (ratio := self._ratios.get(models)) is None:
                self._ratios.put(models, ratio := _TextRatio())
            ratio.observe(prompt_tokens, prompt_chars)


def _has_fixed_length(sampling: SamplingConfig) -> bool:
    return sampling.ignore_tokenizer_eos and not (
        sampling.stop_token_ids or sampling.stop_str or sampling.constraint
    )


def function_key(completion: Completion) -> int:
    """Calls with one cache salt and the same template are one function, each output for itself. (A
    hash, so that a template is not kept for its statistics.)"""
    texts = tuple([piece.text for piece in completion.fill if isinstance(piece, TextPiece)])
    return hash((completion.options.cache_salt, texts))


def _prompt_tokens(piece: Piece, tokens_per_char: float) -> float:
    if isinstance(piece, TextPiece):
        return len(piece.text) * tokens_per_char
    variable = piece.variable
    if variable.tokenized is not None:
        return len(variable.tokenized.ids)
    if variable.is_settled:
        return len(variable.partial_text) * tokens_per_char
    return _UNKNOWN_INPUT_TOKENS
