"""Predictions of calls: the lengths of their outputs, learnt from those before, and their seconds.

    seconds of a completion =  overhead
                             + tokens of its own fill * seconds per prompt token
                             + expected output tokens * seconds per step

Engines report what prompts and steps cost. Lengths start from a prior that weighs as much as one
observation, and old observations fade. `seconds` are in the present company; `work_s` is what the
same takes an engine that has nothing else to do, and may be compared whenever it was predicted."""

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from parrot.protocol.engine_api import Usage
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import Completion, Piece, Prediction, Task, TextPiece
from parrot.utils.heaps import LruDict

_OVERHEAD_S = 0.01
_NATIVE_S = 0.01
_UNKNOWN_INPUT_TOKENS = 256
_OUTPUT_SHARE = 0.5  # of max_gen_length: what an output has of which nothing is known

_MAX_FUNCTIONS = 4096
_MAX_RATIOS = 256
_MAX_OUTPUTS = 64.0  # weight of a function's observations; older ones fade
_BOUNDS = tuple(sorted({int(1.15**i) for i in range(100)}))  # up to about a million tokens


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
