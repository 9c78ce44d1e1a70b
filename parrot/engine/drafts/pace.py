"""How many tokens are worth drafting: by what each sequence's drafts came to lately, and by what a
step costs with them."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

_MATCH_LENGTHS = (8, 16)  # tokens of matches; from each on they are told apart
_INITIAL_RATES = (0.5, 0.7, 0.97)
_INITIAL_WEIGHT = 4.0  # tokens that what a sequence begins with counts as
_DECAY, _SHARED_DECAY = 0.97, 0.998  # of a token, for each that comes after it
_MIN_SPEEDUP = 1.1  # what it must bring at least: its costs are estimates
_SMOOTHING = 0.1
_FIRST_ADDED_SHARE = 0.1  # of a step without drafts, at least, until it is measured
_INITIAL_SLOWNESS = 2.0  # of turns around drafts, until they are measured
_MAX_SLOWNESS = 5.0
_COST_HALF_LIFE = 2000  # steps after which half of what was measured is forgotten


class Acceptance:
    """How likely the next token of a text that was found is right, by the length of the match
    before it. All tokens that come tell, drafted or not, so that trying costs nothing.

    A sequence begins with what all of an engine have come to, its `shared` one, and tells it what
    it learns."""

    def __init__(self, shared: "Acceptance | None" = None) -> None:
        self._shared = shared
        self._memory = _SHARED_DECAY if shared is None else _DECAY
        rates = _INITIAL_RATES if shared is None else [shared.rate(n) for n in (0, *_MATCH_LENGTHS)]
        self._hits = [_INITIAL_WEIGHT * rate for rate in rates]
        self._misses = [_INITIAL_WEIGHT * (1 - rate) for rate in rates]

    def rate(self, length: int) -> float:
        """`length`: of the match, in tokens."""
        kind = bisect_right(_MATCH_LENGTHS, length)
        return self._hits[kind] / (self._hits[kind] + self._misses[kind])

    def count(self, length: int, num_right: int, is_lost: bool) -> None:
        """Take in what came behind a match."""
        end = length + num_right
        if length >= _MATCH_LENGTHS[-1]:  # mostly
            self._count(len(_MATCH_LENGTHS), num_right, 0)
        else:
            for kind, (first, last) in enumerate(pairwise((0, *_MATCH_LENGTHS, end + 1))):
                if (num := min(end, last) - max(length, first)) > 0:
                    self._count(kind, num, 0)
        if is_lost:
            self._count(bisect_right(_MATCH_LENGTHS, end), 0, 1)
        if self._shared is not None:
            self._shared.count(length, num_right, is_lost)

    def _count(self, kind: int, num_right: int, num_wrong: int) -> None:
        fade = self._memory ** (num_right + num_wrong)
        self._hits[kind] = fade * self._hits[kind] + num_right
        self._misses[kind] = fade * self._misses[kind] + num_wrong


class DraftCosts:
    """The times of steps without drafts, and how much longer they are with them.

    `sizes`: numbers of tokens, ascending; steps with drafts up to one of them cost about the same,
    and have no more than the last. What a size costs is measured once it has been used; before, a
    draft's token counts as one of a prompt, `token_s`. `turnaround_s`: of the host, from the end of
    a step to the launch of the next, if neither has drafts; mostly the device does not wait for it.
    With drafts it takes longer, by a factor that hardly depends on the batch, and the device
    waits: `wait_s`."""

    def __init__(self, sizes: Sequence[int], plain_s: float, turnaround_s: float) -> None:
        self.sizes = sizes
        self.plain_s = plain_s
        self.turnaround_s = turnaround_s
        self.token_s = 0.0
        self._added_s: dict[int, tuple[float, int]] = {}  # and the number of the step
        self._num_plain = 0
        self._num_steps = 0
        self._num_turns = 0
        self._num_waits = 0
        self._slowness = _INITIAL_SLOWNESS

    @property
    def wait_s(self) -> float:
        return self._slowness * self.turnaround_s

    def added_s(self, num_tokens: int, num_drafts: int) -> float:
        """How much longer drafts make a step of `num_tokens`, with them."""
        size = self._size(num_tokens)
        guessed = max(num_drafts * self.token_s, _FIRST_ADDED_SHARE * self.plain_s)
        known = [self._aged_s(known, guessed) for known in self._added_s if known < size]
        if size in self._added_s:
            return self._aged_s(size, guessed)
        return max([guessed, *known])

    def record_step(
        self, seconds: float, num_sequences: int, num_drafts: int, num_others: int
    ) -> None:
        """A step has run that computed `num_others` prompt tokens besides, and took the device so
        long. Those with prompts tell nothing once others are known."""
        self._num_steps += 1
        if seconds <= 0 or (num_others and self._num_plain):
            return
        if not num_drafts:
            self._num_plain += not num_others
            seconds = max(0.1 * seconds, seconds - num_others * self.token_s)
            if self._num_plain > 1 / _SMOOTHING:
                seconds = min(seconds, 2 * self.plain_s)  # the machine did something else
            smoothing = max(_SMOOTHING, 1 / max(1, self._num_plain))
            self.plain_s += smoothing * (seconds - self.plain_s)
        elif not num_others:
            num_tokens = num_sequences + num_drafts
            expected = self.added_s(num_tokens, num_drafts)
            size, is_known = self._size(num_tokens), self._size(num_tokens) in self._added_s
            found = max(0.0, seconds - self.plain_s)
            found = min(found, self.plain_s + 2 * num_drafts * self.token_s)
            smoothing = _SMOOTHING if is_known else 0.5
            self._added_s[size] = (expected + smoothing * (found - expected), self._num_steps)

    def record_turnaround(self, seconds: float, *, has_drafts: bool) -> None:
        """It took the host so long from the end of a step to the launch of the next."""
        if has_drafts and self.turnaround_s > 0:
            found = min(max(seconds / self.turnaround_s, 1.0), _MAX_SLOWNESS)
            self._num_waits += 1
            smoothing = max(_SMOOTHING, 1 / (1 + self._num_waits))
            self._slowness += smoothing * (found - self._slowness)
            return
        self._num_turns += 1
        smoothing = max(_SMOOTHING, 1 / self._num_turns)
        self.turnaround_s += smoothing * (min(seconds, self.plain_s) - self.turnaround_s)

    def _aged_s(self, size: int, guessed: float) -> float:
        """Seconds that a step of this size adds: as measured, as far as that is not forgotten."""
        added_s, number = self._added_s[size]
        weight = math.exp2((number - self._num_steps) / _COST_HALF_LIFE)
        return guessed + weight * (added_s - guessed)

    def _size(self, num_tokens: int) -> int:
        at = bisect_left(self.sizes, num_tokens)
        return self.sizes[min(at, len(self.sizes) - 1)]


class Candidate(NamedTuple):
    """A draft that could be verified: its length at most, and its acceptance."""

    length: int
    rate: float


def choose_draft_lengths(
    candidates: Sequence[Candidate], num_sequences: int, costs: DraftCosts, num_turns: int = 1
) -> list[int]:
    """The tokens to verify of each draft, for the most tokens per second; all 0 if drafts do not
    pay. The device waits for the host `num_turns` times that it otherwise would not.

    A token is worth its cost as long as it is accepted more often than the step makes tokens in the
    time that it takes. That is tried for each size of step."""
    chosen = [0] * len(candidates)
    best = num_sequences / costs.plain_s * _MIN_SPEEDUP
    fixed_s = costs.plain_s + num_turns * costs.wait_s
    most = sum([_expected(c.rate, c.length) for c in candidates if c.length])
    if num_sequences + most <= best * (fixed_s + costs.added_s(num_sequences + 1, 1)):
        return chosen
    for size in costs.sizes:
        if size <= num_sequences:
            continue
        least = best * costs.token_s
        wanted = [_profitable_length(c, least) for c in candidates]
        lengths = _capped(wanted, size - num_sequences)
        num_drafts = sum(lengths)
        if not num_drafts:
            continue  # this size has no room for one of each
        gained = sum([_expected(c.rate, n) for c, n in zip(candidates, lengths, strict=True)])
        added_s = costs.added_s(num_sequences + num_drafts, num_drafts)
        rate = (num_sequences + gained) / (fixed_s + added_s)
        if rate > best:
            chosen, best = lengths, rate
        if lengths == wanted:
            break  # a larger step would have no more of them
    return chosen


def _profitable_length(candidate: Candidate, least: float) -> int:
    """The tokens that are accepted at least that often: token n is, if all before it are."""
    if candidate.rate <= least or least >= 1.0:
        return 0
    if candidate.rate >= 1.0 or least <= 0.0:
        return candidate.length
    return min(candidate.length, int(math.log(least) / math.log(candidate.rate)))


def _expected(rate: float, length: int) -> float:
    """The tokens that are accepted of so many: rate + rate^2 + ..."""
    return float(length) if rate >= 1.0 else rate * (1.0 - rate**length) / (1.0 - rate)


def _capped(lengths: list[int], limit: int) -> list[int]:
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
