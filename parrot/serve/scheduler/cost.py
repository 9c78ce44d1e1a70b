"""Predicted seconds, the one currency in which placements are compared, and how they are learnt."""

from dataclasses import dataclass
from typing import NamedTuple

_COMMON_VARIANCE = 4.0  # how far a model's costs as a whole may be from the defaults, squared
_OWN_VARIANCE = 1.0  # how far one of them may be from that
_SPEED_VARIANCE = 5e-3  # how far an engine may be from the others of its model
_NOISE = 0.003  # of one answer: the squared relative error of its time
_DRIFT = 1e-4  # of the first uncertainty, that each answer brings back: engines change
_SPEED_DRIFT = 2e-5
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


class ModelCosts:
    """Learns the costs of a model's engines from how long their answers took: each cost is its
    default times a scale, and the scales are followed by a Kalman filter on relative errors
    (recursive least squares with drift). To begin with the scales are taken to differ from 1 mostly
    together, so one answer of an engine that is slow altogether corrects all of them."""

    def __init__(self, default: CostModel) -> None:
        self.default = default
        self.version = 0
        self._defaults = (default.step_s, default.sequence_s, default.token_s, default.prefill_s)
        self._scales = [1.0] * 4
        self._first = [
            [_COMMON_VARIANCE + _OWN_VARIANCE * (i == j) for j in range(4)] for i in range(4)
        ]
        self._variance = [row.copy() for row in self._first]

    def at_speed(self, slowness: float) -> CostModel:
        """The costs that are believed now of an engine so many times as slow as its model's."""
        scaled = zip(self._scales, self._defaults, strict=True)
        return CostModel(*(slowness * scale * cost for scale, cost in scaled))

    def learn(self, work: Work, seconds: float, engine: "EngineSpeed") -> None:
        """What is wrong with the prediction is shared out by how uncertain each part of it is."""
        slowness, variance = engine.slowness, self._variance
        parts = [n * cost * slowness for n, cost in zip(work, self._defaults, strict=True)]
        predicted = sum(scale * part for scale, part in zip(self._scales, parts, strict=True))
        if min(predicted, seconds) <= 0:
            return
        # Relative to the larger one, so a wild answer moves little and a slow engine is still met.
        unit = max(predicted, seconds)
        parts = [part / unit for part in parts]
        error = (seconds - predicted) / unit
        self._drift()
        spread = [sum(v * p for v, p in zip(row, parts, strict=True)) for row in variance]
        slope = predicted / unit / slowness
        total = sum(s * p for s, p in zip(spread, parts, strict=True))
        total += _NOISE + engine.variance * slope**2
        for i in range(4):
            self._scales[i] = _bounded(self._scales[i] + spread[i] / total * error)
            for j in range(4):
                variance[i][j] -= spread[i] * spread[j] / total
        engine.slowness = _bounded(slowness + engine.variance * slope / total * error)
        engine.variance *= 1 - engine.variance * slope**2 / total
        engine.variance += _SPEED_DRIFT * engine.slowness**2
        self.version += 1

    def _drift(self) -> None:
        if sum(self._variance[i][i] for i in range(4)) < sum(self._first[i][i] for i in range(4)):
            for row, first in zip(self._variance, self._first, strict=True):
                for j in range(4):
                    row[j] += _DRIFT * first[j]


@dataclass(slots=True)
class EngineSpeed:
    """How many times as long an engine takes as its model's costs say, and how sure that is."""

    slowness: float = 1.0
    variance: float = _SPEED_VARIANCE


def _bounded(scale: float) -> float:
    return min(max(scale, _MIN_SCALE), _MAX_SCALE)
