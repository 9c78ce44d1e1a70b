"""Predicted seconds, the one currency in which placements are compared, and how they are learnt."""

from dataclasses import dataclass
from typing import NamedTuple

_COMMON_VARIANCE = 4.0  # how far an engine's speed as a whole may be from the defaults', squared
_OWN_VARIANCE = 0.25  # how far one of its costs may be from that
_NOISE = 0.04  # of one answer: the squared relative error of its time
_DRIFT = 2e-3  # of the first uncertainty, that each answer brings back: engines change
_MIN_SCALE, _MAX_SCALE = 1 / 64, 1024.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """A decode step takes `step_s`, plus `sequence_s` for every running sequence, plus `token_s`
    for every token that it reads, shared ones once; a prompt token takes `prefill_s`. The defaults
    are those of a 7-8B model on a current GPU."""

    step_s: float = 4.3e-3
    sequence_s: float = 3e-5
    token_s: float = 4e-8
    prefill_s: float = 2.2e-5

    def decode_step_s(self, num_tasks: float, num_tokens: float) -> float:
        return self.step_s + num_tasks * self.sequence_s + num_tokens * self.token_s


class Work(NamedTuple):
    """What an engine did while it had a task: each sum is over the steps of that time."""

    num_steps: float
    num_sequences: float
    num_tokens: float
    num_prefilled: float


class CostLearner:
    """Learns one engine's costs from how long its answers took: each cost is its default times a
    scale, and the scales are followed by a Kalman filter on relative errors (recursive least
    squares with drift). To begin with the scales are taken to differ from 1 mostly together, so one
    answer of an engine that is slow altogether corrects all of them."""

    def __init__(self, default: CostModel) -> None:
        self._default = default
        self._scales = [1.0] * 4
        self._first = [
            [_COMMON_VARIANCE + _OWN_VARIANCE * (i == j) for j in range(4)] for i in range(4)
        ]
        self._variance = [row.copy() for row in self._first]

    def learn(self, work: Work, seconds: float) -> CostModel:
        """`seconds`: what the work took. Returns the costs that are believed now."""
        d = self._default
        defaults = (d.step_s, d.sequence_s, d.token_s, d.prefill_s)
        parts = [amount * cost for amount, cost in zip(work, defaults, strict=True)]
        predicted = sum(scale * part for scale, part in zip(self._scales, parts, strict=True))
        # Relative to the larger one, so a wild answer moves little and a slow engine is still met.
        unit = max(predicted, seconds)
        if min(predicted, seconds) > 0:
            self._correct([part / unit for part in parts], (seconds - predicted) / unit)
        return CostModel(*(s * cost for s, cost in zip(self._scales, defaults, strict=True)))

    def _correct(self, parts: list[float], error: float) -> None:
        variance = self._variance
        if sum(variance[i][i] for i in range(4)) < sum(self._first[i][i] for i in range(4)):
            for row, first in zip(variance, self._first, strict=True):
                for j in range(4):
                    row[j] += _DRIFT * first[j]
        spread = [sum(v * p for v, p in zip(row, parts, strict=True)) for row in variance]
        total = _NOISE + sum(s * p for s, p in zip(spread, parts, strict=True))
        for i in range(4):
            scale = self._scales[i] + spread[i] / total * error
            self._scales[i] = min(max(scale, _MIN_SCALE), _MAX_SCALE)
            for j in range(4):
                variance[i][j] -= spread[i] * spread[j] / total
