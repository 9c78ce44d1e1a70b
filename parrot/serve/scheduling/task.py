"""The scheduler's view of a completion, its decisions, and the predictions of durations.

    seconds of a completion =  overhead
                             + tokens of its own fill * seconds per prompt token
                             + expected output tokens * seconds per step

Engines report the costs of prompts and steps. Output lengths are learned per function from earlier
outputs. `Prediction.seconds` uses the step of the engines under their present load.
`Prediction.work_s` uses the step of an idle engine, so values from different times are comparable.
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


# Predicted seconds of a completion in addition to its prompt and output.
_OVERHEAD_S = 0.01
# Predicted seconds of a native call.
_NATIVE_S = 0.01
# Predicted tokens of an input whose value does not exist yet.
_UNKNOWN_INPUT_TOKENS = 256
# Fraction of `max_gen_length` that is predicted for the first output of a function.
_OUTPUT_SHARE = 0.5
# Number of functions whose output lengths are kept.
_MAX_FUNCTIONS = 4096
# Number of model sets whose tokens per character are kept.
_MAX_RATIOS = 256
# Weight of a function's observations at which all weights are halved. One output has the weight 1.
# A larger value remembers old outputs longer.
_MAX_OUTPUTS = 64.0
# Lower bounds of the buckets of output lengths, in tokens: steps of 15%, up to about 1,000,000.
_BOUNDS = tuple(sorted({int(1.15**i) for i in range(100)}))


@dataclass(slots=True, eq=False)
class CompletionTask:
    """The unit of scheduling: a prompt with its sampling options. Identical completions may share
    one task, which belongs to the first of them."""

    completion: Completion
    segments: list[Segment]
    keys: tuple[bytes, ...]  # The prefix keys: `keys[i]` covers the segments 0 to i.
    arrived: float
    expected_output: int  # Predicted output tokens.
    tokens_per_char: float = 0.25  # For text without known token ids.
    failed_engines: set[int] = field(default_factory=set)  # Engines on which the task failed.
    num_skipped: int = 0  # Rounds in which later tasks were placed before this task.
    # Computed prompt tokens and generated tokens, after the engine has reported them.
    used: tuple[int, int] | None = None
    service_s: float = 0.0  # Engine seconds that the task has used.
    max_total_len: int = field(init=False)  # Tokens of the prompt and the longest output.
    tenant: str = field(init=False)
    models: tuple[str, ...] = field(init=False)
    needs: frozenset[str] = field(init=False)  # Features of the engine, see `Capabilities`.
    conversation: dict[str, Any] | None = field(init=False)
    max_output: int = field(init=False)
    lengths: tuple[int, ...] = field(init=False)  # Estimated tokens of each segment.
    prompt_len: int = field(init=False)
    is_latency: bool = field(init=False)  # A reader waits for the output or for its tokens.
    is_background: bool = field(init=False)  # No reader waits for the output or its consumers.
    remaining_path_s: float = field(init=False)
    deadline: float | None = field(init=False)
    group: tuple[int, str] | None = field(init=False)  # Session and task group.

    def __post_init__(self) -> None:
        options = self.completion.options
        self.tenant, self.models = options.tenant, options.models
        self.conversation = self.completion.conversation
        self.needs = self.completion.sampling.needs()
        # Each server that accepts conversations also supports JSON schemas in them.
        if self.conversation is not None and "messages" in self.conversation:
            own = {"messages", "tools"} if "tools" in self.conversation else {"messages"}
            self.needs = self.needs - {"json_schema"} | own
        self.max_output = self.completion.sampling.max_gen_length
        self.lengths = tuple([_num_tokens(s, self.tokens_per_char) for s in self.segments])
        self.prompt_len = sum(self.lengths)
        self.max_total_len = self.prompt_len + self.max_output
        self.refresh()

    @property
    def num_chars(self) -> int:
        """Number of characters of the prompt."""
        return sum([segment.num_chars for segment in self.segments])

    @property
    def objective(self) -> Objective | None:
        return self.completion.objective

    @property
    def wants_stream(self) -> bool:
        return self.completion.wants_stream

    def refresh(self) -> None:
        """Copy the completion's objective. The task must not be queued or placed."""
        objective = self.objective or _NO_OBJECTIVE
        self.is_latency = objective.criteria is not PerformanceCriteria.THROUGHPUT
        self.is_background = objective.is_background
        self.remaining_path_s = objective.remaining_path_s
        self.deadline = objective.deadline
        group = objective.task_group
        self.group = None if group is None else (self.completion.session_id, group)

    @property
    def num_constant(self) -> int:
        """Number of segments in the prompt's prefix that are constants of the template."""
        for i, segment in enumerate(self.segments):
            if segment.kind is not PieceKind.CONSTANT:
                return i
        return len(self.segments)


class EngineShare(NamedTuple):
    """The share of a call's tenant on an engine."""

    weight: float = 1.0
    # The fraction by which tenants of the same weight may lengthen its steps. None: no limit.
    step_growth: float | None = None


UNBOUND = EngineShare()


@dataclass(frozen=True, slots=True)
class Placement:
    """The order to run `task` on an engine now."""

    task: CompletionTask
    engine_id: int
    priority: int  # In the engine's waiting queue, lowest first.
    is_longest: bool = True  # No other engine of the task's models accepts longer sequences.
    share: EngineShare = UNBOUND


class Decision(NamedTuple):
    """A record of a placement, with the costs of the candidates."""

    at: float  # On the clock's scale.
    session_id: int
    request_id: int
    func_name: str
    engine_id: int
    prompt_tokens: int
    to_compute: int  # Uncached prompt tokens.
    waited_s: float  # Seconds since the call was queued.
    # Predicted seconds on each candidate engine. A value of None: the call does not fit there. None
    # instead of the dict: no engines were compared.
    costs: dict[int, float | None] | None


def _num_tokens(segment: Segment, tokens_per_char: float) -> int:
    if segment.tokenized is not None:
        return len(segment.tokenized.ids)
    return int(segment.num_chars * tokens_per_char) + 1


class OutputLengths:
    """A histogram of the output lengths of one function, in tokens."""

    def __init__(self) -> None:
        self._buckets: dict[int, tuple[float, float]] = {}  # Weight, and sum of the lengths.
        self._weight = 0.0  # Sum over all buckets.

    def observe(self, num_tokens: int) -> None:
        bucket = bisect_right(_BOUNDS, num_tokens)
        weight, total = self._buckets.get(bucket, (0.0, 0.0))
        self._buckets[bucket] = (weight + 1.0, total + num_tokens)
        self._weight += 1.0
        if self._weight > _MAX_OUTPUTS:
            self._fade()

    def expect(self, prior: float, limit: int) -> float:
        """The mean length of outputs that end at `limit`. `prior` counts as one observation."""
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
    """Tokens per character of prompts. Starts at 0.25. The last 1,000,000 characters count."""

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
    """Predicted speed of engines, in seconds."""

    prefill_s: float  # One prompt token.
    step_s: float  # One decode step under the present load.
    step_alone_s: float  # One decode step of a single sequence.


class Estimates:
    """Predicts lengths and durations for one ServeCore, from the values that are known now. The
    time of a prediction does not depend on the size of the graph. `pace` returns the speed of the
    engines with the given models. No models: all engines."""

    def __init__(self, pace: Callable[[tuple[str, ...]], Pace]) -> None:
        self._pace = pace
        self._functions: LruDict[int, OutputLengths] = LruDict(_MAX_FUNCTIONS)
        self._ratios: LruDict[tuple[str, ...], _TextRatio] = LruDict(_MAX_RATIOS)
        self._prior = _TextRatio()

    def output_tokens(self, completion: Completion) -> int:
        """The expected output length in tokens, at least 1. Exact if the call fixes the length."""
        limit = completion.sampling.max_gen_length
        if _has_fixed_length(completion.sampling):
            return limit
        prior = limit * _OUTPUT_SHARE
        lengths = self._functions.get(function_key(completion))
        return 1 + int(prior if lengths is None else lengths.expect(prior, limit))

    def tokens_per_char(self, models: tuple[str, ...]) -> float:
        return (self._ratios.get(models) or self._prior).value

    def tokens(self, completion: Completion) -> int:
        """Predicted tokens of the completion's own fill and its output."""
        per_char = self.tokens_per_char(completion.options.models)
        prompt = sum([_prompt_tokens(piece, per_char) for piece in completion.fill])
        return int(prompt) + self.output_tokens(completion)

    def predict(self, task: Task) -> Prediction:
        """Predict the duration of one run of the task."""
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
        """Record the lengths of a finished call."""
        if not usage.output_tokens:  # The engine does not count tokens.
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
    """The key of the statistics of an output: a hash of the cache salt and the template text before
    the output. A hash, so that statistics do not keep templates in memory."""
    digests = tuple([piece.digest for piece in completion.fill if isinstance(piece, TextPiece)])
    return hash((completion.options.cache_salt, digests))


def _prompt_tokens(piece: Piece, tokens_per_char: float) -> float:
    if isinstance(piece, TextPiece):
        return len(piece.text) * tokens_per_char
    variable = piece.variable
    if variable.tokenized is not None:
        return len(variable.tokenized.ids)
    if variable.is_settled:
        return len(variable.partial_text) * tokens_per_char
    return _UNKNOWN_INPUT_TOKENS
