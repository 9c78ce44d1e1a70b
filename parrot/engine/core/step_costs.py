"""The costs of an engine's steps, fitted to the times that they took.

    seconds = steps * step_s + sequences * sequence_s + tokens read * token_s
            + prompt tokens computed * prefill_s

Each cost is a scale times its usual value. Weighted least squares on relative errors, in which old
observations fade, find the scales; until the observations tell the costs apart, the scales differ
little from the one that explains all of the time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from parrot.engine.core.plan import RunnerInfo, SequenceStep
from parrot.protocol.engine_api import StepCosts

_USUAL = StepCosts()
_UNITS = (_USUAL.step_s, _USUAL.sequence_s, _USUAL.token_s, _USUAL.prefill_s)
_SIZE = len(_UNITS)
_MEMORY = 2000  # observations; older ones fade
_NOISE = 0.003  # squared relative error of one observation
_SPREAD = 1.0  # squared relative difference of one scale from that of all, before the first
_MIN_SHARE, _MAX_SHARE = 1 / 64, 64.0  # bounds of a scale, relative to that of all
_SWEEPS = 100  # of the minimisation, one scale at a time; a few are enough
_OBSERVE_EVERY, _OBSERVE_FIRST = 8, 64  # steps; counting what they read takes time
_SOLVE_EVERY = 32  # observations; errors are weighed by the estimate, so it must not be old


@dataclass(slots=True)
class StepTotals:
    """The number of an engine's steps so far, and the sums of their sequences and prompt tokens."""

    num_steps: int = 0
    num_sequences: int = 0
    num_prompt_tokens: int = 0

    def add(self, num_steps: int, num_sequences: int, num_prompt_tokens: int) -> None:
        """Count steps, each with these."""
        self.num_steps += num_steps
        self.num_sequences += num_steps * num_sequences
        self.num_prompt_tokens += num_steps * num_prompt_tokens


class StepCostMeter:
    """Measures the costs of an engine's steps, all of the first and then some of them, unless the
    runner knows them."""

    def __init__(self, info: RunnerInfo) -> None:
        self._known = info.costs
        self._fit = StepCostFit()
        self._unique_kv = UniqueKv(info.block_size)
        self._num_steps = 0
        self._recent: StepCosts | None = None
        self._recent_until = 0  # steps

    def recent(self) -> StepCosts | None:
        """The costs as they were some steps ago, which takes no time; None before the first."""
        if self._recent is None or self._num_steps >= self._recent_until:
            self._recent = self.costs()
            self._recent_until = self._num_steps + _SOLVE_EVERY
        return self._recent

    def count(
        self,
        sequences: Sequence[SequenceStep],
        num_prompt_tokens: int,
        step_seconds: Sequence[float],
    ) -> None:
        """Take in steps like this one that have run."""
        if self._known is not None:
            self._num_steps += len(step_seconds)
            return
        for seconds in step_seconds:
            self._num_steps += 1
            if self._num_steps <= _OBSERVE_FIRST or self._num_steps % _OBSERVE_EVERY == 0:
                self._fit.observe(
                    seconds,
                    num_sequences=len(sequences),
                    num_tokens=self._unique_kv.count(sequences),
                    num_prompt_tokens=num_prompt_tokens,
                )

    def costs(self) -> StepCosts | None:
        """The costs; None before the first step. May be called from another thread."""
        return self._known or self._fit.costs()

    def prefill_s(self) -> float | None:
        """The `recent` cost of a prompt token; None before the first step."""
        costs = self.recent()
        return None if costs is None else costs.prefill_s


class StepCostFit:
    """Observes steps and estimates their costs. `costs` may be called from another thread."""

    def __init__(self) -> None:
        self._scales = [1.0] * _SIZE
        # Sums of the observations, in one list so that another thread never sees half of one:
        # products of features (row by row), of features and time, all features, all time.
        self._sums = [0.0] * (_SIZE * _SIZE + _SIZE + 2)
        self.num_observed = 0

    def observe(
        self,
        seconds: float,
        *,
        num_sequences: float,
        num_tokens: float,
        num_prompt_tokens: float,
        num_steps: float = 1.0,
    ) -> None:
        """Take in how long steps took. The counts are sums over these steps; tokens that several
        sequences of a step share are read once."""
        counts = (num_steps, num_sequences, num_tokens, num_prompt_tokens)
        parts = [count * unit for count, unit in zip(counts, _UNITS, strict=True)]
        predicted = sum([s * part for s, part in zip(self._scales, parts, strict=True)])
        if seconds <= 0 or predicted <= 0:
            return
        # Relative to the larger one, so that a wild observation in either direction moves little.
        weight = 1 / max(seconds, predicted if self.num_observed else seconds)
        features, target = [part * weight for part in parts], seconds * weight
        new = [a * b for a in features for b in features]
        new += [a * target for a in features]
        new += [sum(features), target]
        fade = 1 - 1 / _MEMORY
        self._sums = [fade * old + value for old, value in zip(self._sums, new, strict=True)]
        self.num_observed += 1
        # The first ones change much: after 1, 2, 4...
        is_power = self.num_observed & (self.num_observed - 1) == 0
        if self.num_observed % _SOLVE_EVERY == 0 or is_power:
            self._scales = self._solve()

    def costs(self) -> StepCosts | None:
        """The costs, all positive; None before the first observation."""
        if not self.num_observed:
            return None
        step_s, sequence_s, token_s, prefill_s = [
            scale * unit for scale, unit in zip(self._solve(), _UNITS, strict=True)
        ]
        return StepCosts(step_s=step_s, sequence_s=sequence_s, token_s=token_s, prefill_s=prefill_s)

    def _solve(self) -> list[float]:
        """Minimise, one scale at a time, within bounds."""
        sums = self._sums
        products = [sums[i * _SIZE : (i + 1) * _SIZE] for i in range(_SIZE)]
        targets = sums[_SIZE * _SIZE : -2]
        common = sums[-1] / sums[-2]
        prior = _NOISE / (_SPREAD * common * common)
        scales = [common] * _SIZE
        for _ in range(_SWEEPS):
            before = list(scales)
            for i in range(_SIZE):
                others = _dot(products[i], scales) - products[i][i] * scales[i]
                best = (targets[i] - others + prior * common) / (products[i][i] + prior)
                scales[i] = min(max(best, _MIN_SHARE * common), _MAX_SHARE * common)
            if max(abs(a - b) for a, b in zip(before, scales, strict=True)) < 1e-6 * common:
                break
        return scales


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum([x * y for x, y in zip(a, b, strict=True)])


class UniqueKv:
    """Counts tokens of KV, those in shared blocks once. From step to step only what changed is
    counted again: while the same sequences decode, that is next to nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._refs: Counter[int] = Counter()
        self._tables: dict[int, Sequence[int]] = {}  # by context id

    def count(self, sequences: Sequence[SequenceStep]) -> int:
        """Tokens that the attention of this step reads. Only the last block of a sequence may be
        partly filled, and nobody shares a block that is being written."""
        tables: dict[int, Sequence[int]] = {}
        unfilled, size = 0, self._block_size
        for sequence in sequences:
            tables[sequence.context_id] = sequence.block_ids
            unfilled += len(sequence.block_ids) * size - sequence.end
        for context_id in self._tables.keys() - tables.keys():
            self._drop(self._tables.pop(context_id), 0)
        for context_id, table in tables.items():
            self._update(context_id, table)
        return len(self._refs) * size - unfilled

    def _update(self, context_id: int, table: Sequence[int]) -> None:
        known = self._tables.get(context_id, table[:0])
        if table == known:
            return
        self._tables[context_id] = table
        same = len(known)
        if table[:same] != known:  # it gave blocks away, or copied one to write to it
            pairs = enumerate(zip(known, table, strict=False))
            same = next((n for n, (old, new) in pairs if old != new), len(table))
            self._drop(known, same)
        for block in table[same:]:
            self._refs[block] += 1

    def _drop(self, table: Sequence[int], first: int) -> None:
        for block in table[first:]:
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
