"""How many tokens are worth drafting: by what each sequence's drafts came to lately, and by what a
step costs with them."""

import math
from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

_MEMORY = 0.97  # of a token or a rejection, for each that comes after it
_FIRST_HITS, _FIRST_MISSES = 1.0, 1.0
_FORGETTING = 0.996  # of misses, for each token that is generated without a draft
_MIN_GAIN = 1.03  # what it must bring at least: its costs are estimates
_SMOOTHING = 0.1
_SLOW_SMOOTHING = 0.02


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


class DraftCosts:
    """The times of steps without drafts, and how much longer they are with them.

    `sizes`: numbers of tokens, ascending; steps with drafts up to one of them cost about the same,
    and have no more than the last. What a size costs is measured once it has been used; before, a
    draft's token counts as one of a prompt, `token_s`."""

    def __init__(self, sizes: Sequence[int], plain_s: float, turnaround_s: float) -> None:
        self.sizes = sizes
        self.plain_s = plain_s
        self.turnaround_s = turnaround_s
        self.token_s = 0.0
        self._added_s: dict[int, float] = {}
        self._num_plain = 0

    def added_s(self, num_tokens: int, num_drafts: int) -> float:
        """How much longer drafts make a step of `num_tokens`, with them."""
        size = self._size(num_tokens)
        if (measured := self._added_s.get(size)) is not None:
            return measured
        smaller = [added_s for known, added_s in self._added_s.items() if known < size]
        return max([num_drafts * self.token_s, *smaller])

    def stepped(self, seconds: float, num_sequences: int, num_drafts: int, num_others: int) -> None:
        """A step has run that computed `num_others` prompt tokens besides."""
        if seconds <= 0:
            return
        num_tokens = num_sequences + num_drafts
        added_s = self.added_s(num_tokens, num_drafts) if num_drafts else 0.0
        plain_s = max(0.1 * seconds, seconds - added_s - num_others * self.token_s)
        if num_drafts and not num_others:
            found = max(0.0, seconds - self.plain_s)
            known = self._added_s.setdefault(self._size(num_tokens), found)
            self._added_s[self._size(num_tokens)] = known + _SMOOTHING * (found - known)
        self._num_plain += not num_drafts
        smoothing = max(_SMOOTHING, 1 / self._num_plain) if not num_drafts else _SLOW_SMOOTHING
        self.plain_s += smoothing * (plain_s - self.plain_s)

    def turned(self, seconds: float) -> None:
        """It took so long from the end of a step to the launch of the next, which was not planned
        ahead."""
        self.turnaround_s += _SMOOTHING * (seconds - self.turnaround_s)

    def _size(self, num_tokens: int) -> int:
        at = bisect_left(self.sizes, num_tokens)
        return self.sizes[min(at, len(self.sizes) - 1)]


class Candidate(NamedTuple):
    """A draft that could be verified: its length at most, and its acceptance."""

    length: int
    rate: float


def share_out(candidates: Sequence[Candidate], num_sequences: int, costs: DraftCosts) -> list[int]:
    """The tokens to verify of each draft, for the most tokens per second; all 0 if drafts do not
    pay.

    A token is worth its cost as long as it is accepted more often than the step makes tokens in the
    time that it takes. That is tried for each size of step."""
    chosen = [0] * len(candidates)
    best = num_sequences / costs.plain_s * _MIN_GAIN
    for size in costs.sizes:
        if size <= num_sequences:
            continue
        least = best * costs.token_s
        lengths = _fitted([_length(c, least) for c in candidates], size - num_sequences)
        num_drafts = sum(lengths)
        if not num_drafts:
            break
        gained = sum([_expected(c.rate, n) for c, n in zip(candidates, lengths, strict=True)])
        added_s = costs.turnaround_s + costs.added_s(num_sequences + num_drafts, num_drafts)
        rate = (num_sequences + gained) / (costs.plain_s + added_s)
        if rate > best:
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
    if sum(lengths) <= limit:
        return lengths
    low, high = 0, max(lengths)
    while low < high:  # the largest cap that fits
        cap = (low + high + 1) // 2
        if sum([min(n, cap) for n in lengths]) <= limit:
            low = cap
        else:
            high = cap - 1
    return [min(n, low) for n in lengths]
