"""Predicted seconds, the one currency in which placements are compared, and how they are learnt."""

from collections.abc import Sequence
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
        self._first_trace = _trace(self._first)
        self._back = [[_DRIFT * value for value in row] for row in self._first]

    def at_speed(self, slowness: float) -> CostModel:
        """The costs that are believed now of an engine so many times as slow as its model's."""
        scales, defaults = self._scales, self._defaults
        return CostModel(*[slowness * scales[i] * defaults[i] for i in range(4)])

    def learn(self, work: Work, seconds: float, engine: "EngineSpeed") -> None:
        """What is wrong with the prediction is shared out by how uncertain each part of it is."""
        slowness = engine.slowness
        parts = [n * cost * slowness for n, cost in zip(work, self._defaults, strict=True)]
        predicted = _dot(self._scales, parts)
        if min(predicted, seconds) <= 0:
            return
        # Relative to the larger one, so a wild answer moves little and a slow engine is still met.
        unit = max(predicted, seconds)
        parts = [part / unit for part in parts]
        error = (seconds - predicted) / unit
        self._drift()
        rows = self._variance
        spread = [_dot(row, parts) for row in rows]
        slope = predicted / unit / slowness
        total = _dot(spread, parts) + (_NOISE + engine.variance * slope**2)
        a, b, c, d = spread
        for i, (own, row) in enumerate(zip(spread, rows, strict=True)):
            self._scales[i] = _bounded(self._scales[i] + own / total * error)
            row[0] -= own * a / total
            row[1] -= own * b / total
            row[2] -= own * c / total
            row[3] -= own * d / total
        engine.slowness = _bounded(slowness + engine.variance * slope / total * error)
        engine.variance *= 1 - engine.variance * slope**2 / total
        engine.variance += _SPEED_DRIFT * engine.slowness**2
        self.version += 1

    def _drift(self) -> None:
        if _trace(self._variance) < self._first_trace:
            for row, back in zip(self._variance, self._back, strict=True):
                for j, value in enumerate(back):
                    row[j] += value


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2] + a[3] * b[3]


def _trace(rows: Sequence[Sequence[float]]) -> float:
    return rows[0][0] + rows[1][1] + rows[2][2] + rows[3][3]


@dataclass(slots=True)
class EngineSpeed:
    """How many times as long an engine takes as its model's costs say, and how sure that is."""

    slowness: float = 1.0
    variance: float = _SPEED_VARIANCE


def _bounded(scale: float) -> float:
    return min(max(scale, _MIN_SCALE), _MAX_SCALE)
