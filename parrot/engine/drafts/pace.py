"""Computes how many draft tokens pay, from recent acceptance and the cost of longer steps."""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

# Lengths, in tokens, that divide matches into classes: below 8, 8 to 15, from 16 on.
_MATCH_LENGTHS = (8, 16)
_INITIAL_RATES = (0.5, 0.7, 0.97)  # Acceptance of each class before the first observation.
_INITIAL_WEIGHT = 4.0  # Weight of the initial rates, in tokens. A larger value learns more slowly.
_DECAY = 0.97  # Factor on an output's earlier observations for each new token.
_SHARED_DECAY = 0.998  # The same factor for the observations of all outputs.
# Least gain in tokens per second at which drafts are used. It allows for errors of the costs.
_MIN_SPEEDUP = 1.1
_SMOOTHING = 0.1  # Weight of the newest step in the average costs. Larger adapts faster.
# Assumed least cost of drafts before it is measured, as a fraction of a step without drafts.
_FIRST_ADDED_SHARE = 0.1
_INITIAL_SLOWNESS = 2.0  # Assumed factor on the turnaround with drafts before it is measured.
_MAX_SLOWNESS = 5.0  # Largest measured factor that counts.
_COST_HALF_LIFE = 2000  # Steps after which a measured cost has half its weight.


class Acceptance:
    """The probability that the next token of a found text is right, by the length of the match.

    All tokens after a match are observed, drafted or not. An output starts with the rates of
    `shared`, which covers all outputs, and also records its observations there."""

    def __init__(self, shared: "Acceptance | None" = None) -> None:
        self._shared = shared
        self._decay = _SHARED_DECAY if shared is None else _DECAY
        rates = _INITIAL_RATES if shared is None else [shared.rate(n) for n in (0, *_MATCH_LENGTHS)]
        self._hits = [_INITIAL_WEIGHT * rate for rate in rates]
        self._misses = [_INITIAL_WEIGHT * (1 - rate) for rate in rates]

    def rate(self, length: int) -> float:
        """The acceptance after a match of `length` tokens."""
        kind = bisect_right(_MATCH_LENGTHS, length)
        return self._hits[kind] / (self._hits[kind] + self._misses[kind])

    def count(self, length: int, num_right: int, is_lost: bool) -> None:
        """Record the tokens after a match (see `Followed`)."""
        end = length + num_right
        if length >= _MATCH_LENGTHS[-1]:  # Most tokens take this path.
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
        fade = self._decay ** (num_right + num_wrong)
        self._hits[kind] = fade * self._hits[kind] + num_right
        self._misses[kind] = fade * self._misses[kind] + num_wrong


class DraftCosts:
    """The time of steps without drafts, and the time that drafts add.

    `sizes` are ascending numbers of tokens. Steps with drafts between two sizes cost about the
    same. Until a size is measured, a draft token costs as much as a prompt token."""

    def __init__(self, sizes: Sequence[int], plain_s: float, turnaround_s: float) -> None:
        self.sizes = sizes  # A step with drafts has at most `sizes[-1]` tokens.
        self.plain_s = plain_s  # Average time of a step without drafts.
        # CPU time from the end of a step to the next launch, without drafts.
        self.turnaround_s = turnaround_s
        self.token_s = 0.0  # Cost of a prompt token.
        # Added time of each size, and the number of the step that measured it last.
        self._added_s: dict[int, tuple[float, int]] = {}
        self._num_plain = 0
        self._num_steps = 0
        self._num_turns = 0
        self._num_waits = 0
        self._slowness = _INITIAL_SLOWNESS

    @property
    def wait_s(self) -> float:
        """Time that the GPU waits for the CPU next to a step with drafts."""
        return self._slowness * self.turnaround_s

    def added_s(self, num_tokens: int, num_drafts: int) -> float:
        """The time that `num_drafts` draft tokens add to a step of `num_tokens` tokens in all."""
        size = self._size(num_tokens)
        guessed = max(num_drafts * self.token_s, _FIRST_ADDED_SHARE * self.plain_s)
        known = [self._aged_s(known, guessed) for known in self._added_s if known < size]
        if size in self._added_s:
            return self._aged_s(size, guessed)
        return max([guessed, *known])

    def record_step(
        self, seconds: float, num_sequences: int, num_drafts: int, num_others: int
    ) -> None:
        """Record a step that took the GPU `seconds`, with `num_others` prompt tokens.

        Steps with prompts are ignored once a step without prompts was recorded."""
        self._num_steps += 1
        if seconds <= 0 or (num_others and self._num_plain):
            return
        if not num_drafts:
            self._num_plain += not num_others
            seconds = max(0.1 * seconds, seconds - num_others * self.token_s)
            if self._num_plain > 1 / _SMOOTHING:
                seconds = min(seconds, 2 * self.plain_s)  # Limit the effect of outliers.
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
        """Record the CPU time from the end of a step to the launch of the next step."""
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
        """The time that `size` adds: the measured value, which fades to `guessed` with its age."""
        added_s, number = self._added_s[size]
        weight = math.exp2((number - self._num_steps) / _COST_HALF_LIFE)
        return guessed + weight * (added_s - guessed)

    def _size(self, num_tokens: int) -> int:
        at = bisect_left(self.sizes, num_tokens)
        return self.sizes[min(at, len(self.sizes) - 1)]


class Candidate(NamedTuple):
    """A draft that could be verified."""

    length: int
    rate: float  # Probability that a token is accepted if all tokens before it are.


def choose_draft_lengths(
    candidates: Sequence[Candidate], num_sequences: int, costs: DraftCosts, num_turns: int = 1
) -> list[int]:
    """The length of each draft that gives the most tokens per second; all 0 if drafts do not pay.

    `num_turns`: times that the GPU waits for the CPU because of drafts. For each step size, a draft
    token pays if its acceptance exceeds the tokens that the step makes in the token's time."""
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
            continue  # The size is too small for one token of each draft.
        gained = sum([_expected(c.rate, n) for c, n in zip(candidates, lengths, strict=True)])
        added_s = costs.added_s(num_sequences + num_drafts, num_drafts)
        rate = (num_sequences + gained) / (fixed_s + added_s)
        if rate > best:
            chosen, best = lengths, rate
        if lengths == wanted:
            break  # A larger step would verify the same drafts.
    return chosen


def _profitable_length(candidate: Candidate, least: float) -> int:
    """The number of tokens whose acceptance, rate^n for token n, is at least `least`."""
    if candidate.rate <= least or least >= 1.0:
        return 0
    if candidate.rate >= 1.0 or least <= 0.0:
        return candidate.length
    return min(candidate.length, int(math.log(least) / math.log(candidate.rate)))


def _expected(rate: float, length: int) -> float:
    """The expected number of accepted tokens: rate + rate^2 + ... + rate^length."""
    return float(length) if rate >= 1.0 else rate * (1.0 - rate**length) / (1.0 - rate)


def _capped(lengths: list[int], limit: int) -> list[int]:
    """Shorten the longest drafts to a common cap, so that the sum is at most `limit`."""
    if sum(lengths) <= limit:
        return lengths
    low, high = 0, max(lengths)
    while low < high:  # Bisect for the largest cap.
        cap = (low + high + 1) // 2
        if sum([min(n, cap) for n in lengths]) <= limit:
            low = cap
        else:
            high = cap - 1
    return [min(n, low) for n in lengths]
