"""What calls cost, learnt from what they did cost: how long a function's outputs are, and how fast
prompts and outputs go.

    seconds of a completion =  overhead
                             + tokens of its own fill * seconds per prompt token
                             + expected output tokens * seconds per output token

Every figure starts from a prior that weighs as much as a few observations, and old observations
fade. Seconds are as experienced, so in company: a slower figure in busy times is no error. Work is
what the same takes an engine that has nothing else to do, and may be compared whenever it was
predicted."""

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from parrot.protocol.engine_api import Usage
from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.links import Prediction
from parrot.serve.graph.nodes import Completion, Piece, Task, TextPiece

V = TypeVar("V")

_OVERHEAD_S = 0.01
_NATIVE_S = 0.01
_UNKNOWN_INPUT_TOKENS = 256
_PROMPT_S, _OUTPUT_S = 0.0002, 0.02  # of a token, before anything is known
_OUTPUT_SHARE = 0.5  # of max_gen_length: what an output has of which nothing is known

_MAX_FUNCTIONS = 4096
_MAX_SPEEDS = 256
_MAX_OUTPUTS = 64.0  # weight of a function's observations; older ones fade
_BOUNDS = tuple(sorted({int(1.15**i) for i in range(100)}))  # up to about a million tokens


class _Recent(Generic[V]):
    """The values of the keys that were used last."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._values: OrderedDict[Hashable, V] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable) -> V | None:
        if key in self._values:
            self._values.move_to_end(key)
        return self._values.get(key)

    def put(self, key: Hashable, value: V) -> V:
        self._values[key] = value
        if len(self._values) > self._size:
            self._values.popitem(last=False)
        return value


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
class Rate:
    """A ratio of sums, that begins at `total / count` and remembers about `memory` of the count."""

    total: float
    count: float
    memory: float

    def observe(self, total: float, count: float) -> None:
        self.total += total
        self.count += count
        while self.count > self.memory:
            self.total, self.count = self.total / 2, self.count / 2

    @property
    def value(self) -> float:
        return self.total / self.count


@dataclass(slots=True)
class Speed:
    """As experienced by the calls that name the same models. The priors are rough."""

    prompt: Rate = field(default_factory=lambda: Rate(_PROMPT_S * 256, 256, 2e5))
    output: Rate = field(default_factory=lambda: Rate(_OUTPUT_S * 32, 32, 2e4))
    tokens_per_char: Rate = field(default_factory=lambda: Rate(0.25 * 64, 64, 1e6))


def _by_priors(models: tuple[str, ...]) -> tuple[float, float]:
    return _PROMPT_S, _OUTPUT_S


class Estimates:
    """One for a ServeCore. Every method takes constant time and touches no graph. `alone`: the
    seconds of a prompt token and of an output token on an engine that does nothing else, by the
    models that a call names."""

    def __init__(
        self, alone: Callable[[tuple[str, ...]], tuple[float, float]] = _by_priors
    ) -> None:
        self._alone = alone
        self._functions: _Recent[OutputLengths] = _Recent(_MAX_FUNCTIONS)
        self._speeds: _Recent[Speed] = _Recent(_MAX_SPEEDS)
        self._prior = Speed()

    def output_tokens(self, completion: Completion) -> int:
        """Exact where the call fixes the length, else what such calls had, at least one."""
        limit = completion.sampling.max_gen_length
        if _has_fixed_length(completion.sampling):
            return limit
        prior = limit * _OUTPUT_SHARE
        lengths = self._functions.get(_function(completion))
        return 1 + int(prior if lengths is None else lengths.expect(prior, limit))

    def tokens_per_char(self, models: tuple[str, ...]) -> float:
        return self._speed(models).tokens_per_char.value

    def predict(self, task: Task) -> Prediction:
        """Of one run, from the lengths that are known now."""
        if not isinstance(task, Completion):
            return Prediction(_NATIVE_S, _NATIVE_S)
        models = task.options.models
        speed = self._speed(models)
        per_char = speed.tokens_per_char.value
        prompt = sum([_prompt_tokens(piece, per_char) for piece in task.fill])
        output = self.output_tokens(task)
        prompt_s, output_s = self._alone(models)
        return Prediction(
            _OVERHEAD_S + prompt * speed.prompt.value + output * speed.output.value,
            prompt * prompt_s + output * output_s,
        )

    def learn(self, completion: Completion, prompt_chars: int, usage: Usage) -> None:
        """An answer came. Engines that count nothing teach nothing."""
        if not usage.output_tokens:
            return
        key = _function(completion)
        lengths = self._functions.get(key) or self._functions.put(key, OutputLengths())
        lengths.observe(usage.output_tokens)
        models = completion.options.models
        speed = self._speeds.get(models) or self._speeds.put(models, Speed())
        if usage.decode_s > 0:
            speed.output.observe(usage.decode_s, usage.output_tokens)
        if prompt_tokens := usage.cached_tokens + usage.computed_tokens:
            speed.prompt.observe(usage.prefill_s, prompt_tokens)
            speed.tokens_per_char.observe(prompt_tokens, prompt_chars)

    def _speed(self, models: tuple[str, ...]) -> Speed:
        return self._speeds.get(models) or self._prior


def _has_fixed_length(sampling: SamplingConfig) -> bool:
    return sampling.ignore_tokenizer_eos and not (
        sampling.stop_token_ids or sampling.stop_str or sampling.regex or sampling.json_schema
    )


def _function(completion: Completion) -> int:
    """Calls of one tenant with the same template are one function, each output for itself. (A hash,
    so that a template is not kept for its statistics.)"""
    texts = tuple([piece.text for piece in completion.fill if isinstance(piece, TextPiece)])
    return hash((completion.options.tenant, texts))


def _prompt_tokens(piece: Piece, tokens_per_char: float) -> float:
    if isinstance(piece, TextPiece):
        return len(piece.text) * tokens_per_char
    variable = piece.variable
    if variable.tokenized is not None:
        return len(variable.tokenized.ids)
    if variable.is_settled:
        return len(variable.partial_text) * tokens_per_char
    return _UNKNOWN_INPUT_TOKENS
