"""How many tokens are worth drafting: by what each sequence's drafts came to lately, and by what a
step costs with them."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from parrot.protocol.engine_api import StepCosts

_MEMORY = 0.97  # of a token or a rejection, for each that comes after it
_FIRST_HITS, _FIRST_MISSES = 2.0, 1.0
_FORGETTING = 0.996  # of misses, for each token that is generated without a draft
_MIN_GAIN = 1.02  # what it must bring at least: its costs are estimates
_ROUNDS = 3


class Acceptance:
    """How likely the next token of a sequence's drafts is right. Misses are forgotten in time, so
    that a sequence whose drafts did not pay tries again, ever more seldom if they still do not."""

    def __init__(self) -> None:
        self._hits = _FIRST_HITS
        self._misses = _FIRST_MISSES

    @property
    def rate(self) -> float:
        return self._hits / (self._hits + self._misses)

    def count(self, num_drafted: int, num_accepted: int) -> None:
        """Take in what became of a draft."""
        fade = _MEMORY ** (num_accepted + 1)
        self._hits = fade * self._hits + num_accepted
        self._misses = fade * self._misses + (num_accepted < num_drafted)

    def skip(self, num_tokens: int) -> None:
        """These were generated without a draft."""
        self._misses = max(_FIRST_MISSES, self._misses * _FORGETTING**num_tokens)


class Candidate(NamedTuple):
    """A draft that could be verified: its length at most, and its acceptance."""

    length: int
    rate: float


class StepFacts(NamedTuple):
    """The step that drafts would be added to. `seconds`: what it takes without them.
    `turnaround_s`: what it takes longer since it cannot be launched ahead. `max_tokens`: of all
    drafts."""

    num_sequences: int
    seconds: float
    turnaround_s: float
    max_tokens: int


def share_out(candidates: Sequence[Candidate], facts: StepFacts, costs: StepCosts) -> list[int]:
    """The tokens to verify of each draft, for the most tokens per second; all 0 if drafts do not
    pay.

    A token is worth its cost as long as it is accepted more often than the step makes tokens in the
    time that it takes. That rate is known only once all are chosen, so it is found in rounds."""
    chosen = [0] * len(candidates)
    plain = facts.num_sequences / facts.seconds
    best = plain * _MIN_GAIN
    for _ in range(_ROUNDS):
        least = best * costs.prefill_s  # the acceptance of a token that is worth its time
        lengths = _fitted([_length(c, least) for c in candidates], facts.max_tokens)
        gained = sum([_expected(c.rate, n) for c, n in zip(candidates, lengths, strict=True)])
        seconds = facts.seconds + facts.turnaround_s + costs.prefill_s * sum(lengths)
        rate = (facts.num_sequences + gained) / seconds
        if rate <= best:
            break
        chosen, best = lengths, rate
    return chosen


def _length(candidate: Candidate, least: float) -> int:
    """The tokens that are accepted at least that often: token n is, if all before it are."""
    if candidate.rate <= least or least >= 1.0:
        return 0
    if candidate.rate >= 1.0 or least <= 0.0:
        return candidate.length
    return min(candidate.length, int(math.log(least) / math.log(candidate.rate)))


def _expected(rate: float, length: int) -> float:
    """The tokens that are accepted of so many: rate + rate^2 + ..."""
    return float(length) if rate >= 1.0 else rate * (1.0 - rate**length) / (1.0 - rate)


def _fitted(lengths: list[int], limit: int) -> list[int]:
    """Cut the longest first, so that together they are within the limit."""
    excess = sum(lengths) - limit
    if excess <= 0:
        return lengths
    low, high = 0, max(lengths)
    while low < high:  # the largest cap that fits
        cap = (low + high + 1) // 2
        if sum([min(n, cap) for n in lengths]) <= limit:
            low = cap
        else:
            high = cap - 1
    return [min(n, low) for n in lengths]
