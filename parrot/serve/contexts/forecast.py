"""Forecasts: when a context will be used next, and which prefixes of waiting prompts are ready.

    template       "Read " {{book}} " and " {{notes}} " and answer: " {{answer}}
    book is ready  |-- ready prefix -----|  missing

A wanted completion waits while an input is missing. Its *ready prefix* is its prompt up to the
first missing input, and can only grow. Eviction spares the contexts that hold a ready prefix, and
prefetching computes it ahead.

**Next use.** Each possible use of a context has a rate: 1 / (seconds until the use is expected).
The rates are added, and the context is expected to be used after 1 / sum. Example: a context was
used just now. A waiting completion will use it in 20 s, and its session's next call in 30 s. The
sum is 1/20 + 1/30 + 1/600 = 0.085, so the next use is expected in 11.8 s.

    use                         expected time
    queued runs                 now
    waiting completions         when their inputs are predicted to be ready
    the session's next call     after the rest of the think time (see `ThinkTimes`)
    repeated forks              after the mean time between forks, or the idle time if longer
    unknown programs            after `_UNEXPECTED_USE_S` plus the idle time

**Think time.** The time between the end of a call and the session's next call:

    call ends           ... the program runs a tool, or a person thinks ...     next call is ready
        |------------------------------ think time ------------------------------------|
        |------ elapsed ------|------------------ predicted rest ----------------------|

Think times are learnt per function and per cache salt. A call may also never be continued. Let c be
the fraction of calls that are continued, and e the elapsed time. S(e) is the fraction of observed
think times longer than e. By Bayes' rule, the call is still continued with the probability

    p(e) = c S(e) / (c S(e) + 1 - c)

It falls with e. m(e) is the mean rest of the observed think times longer than e. A use that happens
with probability p after m seconds has the rate p / m, so the prediction is m(e) / p(e).

Three priors stabilise predictions from few observations. The salt's other functions count like
`_SALT_PRIOR` observations. `_TAIL_PRIOR` observations say that the rest is as long as the elapsed
time. c starts at 1/2. Old observations lose weight by halving.
"""

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from weakref import WeakKeyDictionary

from parrot.serve.contexts.index import Boundary, LedgerContext, Source
from parrot.serve.graph.nodes import Completion, CompletionState, VariableState
from parrot.serve.prompts.segments import (
    PrefixHasher,
    PrefixLink,
    Segment,
    extend_key,
    fill_segments,
    link_of,
    merged,
    preceding,
)
from parrot.utils.heaps import LruDict

_FIRST_BOUND_S = 0.02  # Upper bound of the first histogram bucket, in seconds.
_BOUND_RATIO = 1.1  # Ratio of the bounds of neighbouring buckets. A larger value is less exact.
# Lower bounds of the buckets, in seconds. The last bucket starts at 4,400 s.
_BOUNDS_S = (0.0, *(_FIRST_BOUND_S * _BOUND_RATIO**i for i in range(130)))
# Weight of all observations of a histogram at which it is halved. With a larger value, predictions
# adapt more slowly to new think times.
_MAX_WEIGHT = 256.0
# Number of functions and salts with a histogram. The least recently used are forgotten.
_MAX_HISTOGRAMS = 8192
# Weight of the histogram of the whole salt, in observations. With a larger value, a new function's
# own think times matter later.
_SALT_PRIOR = 2.0
# Weight, in observations, of the assumption that the rest is as long as the elapsed time.
_TAIL_PRIOR = 0.5
_MIN_TAIL_S = 10.0  # The smallest rest that this assumption predicts, in seconds.
# Smallest probability of a next call in predictions. It keeps the predicted time finite.
_MIN_PROBABILITY = 1e-4

Forecast = Callable[[], float]
"""Returns when a waiting completion will have its inputs, in seconds of the clock; infinite if
that cannot be predicted, because the program itself sets an input."""

GROUP_SIZE = 16
"""Number of old turns of a conversation that are stored as one link."""

# A use that is due or overdue is expected after this time, in seconds.
_MIN_NEXT_USE_S = 0.5
# A use by a waiting completion is expected after at most this time, in seconds. So this is the
# prediction for inputs that the program itself sets.
_MAX_INPUT_WAIT_S = 60.0


class _Histogram:
    """Observed think times in buckets of 10% width, and the number of calls never continued."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(_BOUNDS_S)
        # For each bucket, the weight and the summed seconds from this bucket on. None: outdated.
        self._tails: list[tuple[float, float]] | None = None
        self.num_continued = 0.0
        self.num_abandoned = 0.0

    def observe(self, think_s: float) -> None:
        self._counts[bisect_right(_BOUNDS_S, think_s) - 1] += 1
        self.num_continued += 1
        self._tails = None
        self._halve_if_full()

    def abandon(self, count: int) -> None:
        self.num_abandoned += count
        self._halve_if_full()

    def tail(self, elapsed_s: float) -> tuple[float, float]:
        """The weight of the think times longer than `elapsed_s`, and the sum of their rests."""
        if not self.num_continued:
            return 0.0, 0.0
        if self._tails is None:
            self._tails = self._sum_tails()
        bucket = bisect_right(_BOUNDS_S, elapsed_s) - 1
        weight, seconds = self._tails[bucket + 1]
        rest_s = seconds - weight * elapsed_s
        if bucket + 1 < len(_BOUNDS_S):  # Add the part of this bucket above `elapsed_s`.
            low, high = _BOUNDS_S[bucket], _BOUNDS_S[bucket + 1]
            part = self._counts[bucket] * (high - elapsed_s) / (high - low)
            weight += part
            rest_s += part * (high - elapsed_s) / 2
        return weight, rest_s

    def _sum_tails(self) -> list[tuple[float, float]]:
        times = [count * _middle(i) for i, count in enumerate(self._counts)]
        weights = list(accumulate(reversed(self._counts), initial=0.0))
        sums = accumulate(reversed(times), initial=0.0)
        return list(zip(weights, sums, strict=True))[::-1]

    def _halve_if_full(self) -> None:
        if self.num_continued + self.num_abandoned <= _MAX_WEIGHT:
            return
        self._counts = [count / 2 for count in self._counts]
        self.num_continued /= 2
        self.num_abandoned /= 2
        self._tails = None


def _middle(bucket: int) -> float:
    low = _BOUNDS_S[bucket]
    return low * (1 + _BOUND_RATIO) / 2 if bucket else _FIRST_BOUND_S / 2


_EMPTY = _Histogram()


class ThinkTimes:
    """Learns and predicts the time between a call and the session's next call."""

    def __init__(self) -> None:
        # By function and salt, and by salt alone.
        self._known: LruDict[Source | str, _Histogram] = LruDict(_MAX_HISTOGRAMS)
        self._open: dict[int, dict[Source, int]] = {}  # Calls that may be continued, by session.

    @property
    def num_open(self) -> int:
        """Number of finished calls of live sessions that were not continued so far."""
        return sum(sum(pending.values()) for pending in self._open.values())

    def ended(self, session_id: int, source: Source) -> None:
        """A call has finished, and may be continued from now on."""
        pending = self._open.setdefault(session_id, {})
        pending[source] = pending.get(source, 0) + 1

    def submitted(self, completion: Completion, now: float) -> None:
        """A call is ready. If it continues another call, observe the think time between them."""
        before = completion.previous
        if before is not None and before.times.finished is not None:
            think_s = now - before.times.finished
            self.continued(completion.session_id, Source.of(before), think_s)

    def continued(self, session_id: int, source: Source, think_s: float) -> None:
        """Observe the think time before a call that continues a call of `source`."""
        if (pending := self._open.get(session_id)) is not None and pending.get(source, 0) > 0:
            pending[source] -= 1
        for histogram in self._histograms(source):
            histogram.observe(think_s)

    def session_ended(self, session_id: int) -> None:
        for source, count in self._open.pop(session_id, {}).items():
            if count:
                for histogram in self._histograms(source):
                    histogram.abandon(count)

    def expected_s(self, source: Source, elapsed_s: float) -> float:
        """Expected seconds until a call that finished `elapsed_s` ago is continued, divided by the
        probability that it is continued. This is m(e) / p(e) in the module's docstring."""
        own = self._known.peek(source) or _EMPTY
        others = self._known.peek(source.salt) or _EMPTY
        share = _SALT_PRIOR / max(others.num_continued, _SALT_PRIOR)
        own_weight, own_s = own.tail(elapsed_s)
        others_weight, others_s = others.tail(elapsed_s)
        weight = own_weight + share * others_weight
        doubt_s = _TAIL_PRIOR * max(elapsed_s, _MIN_TAIL_S)
        rest_s = (own_s + share * others_s + doubt_s) / (weight + _TAIL_PRIOR)
        num_seen = own.num_continued + share * others.num_continued
        lasting = (weight + _TAIL_PRIOR) / (num_seen + _TAIL_PRIOR)
        usual = _continue_probability(own, others)
        chance = usual * lasting
        return rest_s / max(chance / (chance + 1 - usual), _MIN_PROBABILITY)

    def _histograms(self, source: Source) -> Iterator[_Histogram]:
        """Yield the histograms of the function and of its salt. Missing ones are created."""
        for key in (source, source.salt):
            if (histogram := self._known.get(key)) is None:
                self._known.put(key, histogram := _Histogram())
            yield histogram


def _continue_probability(own: _Histogram, others: _Histogram) -> float:
    """The probability that a call is continued."""
    usual = (others.num_continued + 1) / (others.num_continued + others.num_abandoned + 2)
    num_known = own.num_continued + own.num_abandoned
    return (own.num_continued + _SALT_PRIOR * usual) / (num_known + _SALT_PRIOR)


# Seconds until the next use of a context that was used just now, if no use is expected. With a
# larger value, contexts without an expected use are evicted earlier.
_UNEXPECTED_USE_S = 600.0


@dataclass(slots=True)
class _Expectation:
    """The expected uses of one prefix."""

    num_queued: int = 0  # Number of queued runs whose prompt has the prefix.
    waiting: dict[Forecast, None] = field(default_factory=dict)  # In the order of arrival.


class Expectations:
    """The prefixes that queued and waiting completions will use, and when."""

    def __init__(self) -> None:
        self._expected: defaultdict[bytes, _Expectation] = defaultdict(_Expectation)

    def add_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._expected[key].num_queued += 1

    def remove_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._expected[key].num_queued -= 1
            self._remove_if_unused(key)

    def add_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._expected[key].waiting[forecast] = None

    def remove_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._expected[key].waiting.pop(forecast)
            self._remove_if_unused(key)

    def soonest(self, boundaries: Iterable[Boundary], now: float) -> float | None:
        """When the first of these prefixes is used; None if no use is expected."""
        soonest = None
        for boundary in boundaries:
            expectation = self._expected.get(boundary.key)
            if expectation is not None:
                when = now if expectation.num_queued else next(iter(expectation.waiting))()
                soonest = when if soonest is None else min(soonest, when)
        return soonest

    def check_integrity(self, counts: Mapping[bytes, int]) -> None:
        """`counts`: the number of queued and waiting completions per prefix key."""
        own = {key: e.num_queued + len(e.waiting) for key, e in self._expected.items()}
        assert own == counts, (own, counts)

    def _remove_if_unused(self, key: bytes) -> None:
        expectation = self._expected[key]
        if not expectation.num_queued and not expectation.waiting:
            del self._expected[key]


def next_use(
    expectations: Expectations, think_times: ThinkTimes, context: LedgerContext, now: float
) -> float:
    """When the context is expected to be used next, in seconds of the clock."""
    idle_s = now - context.last_used
    rate = 1 / (_UNEXPECTED_USE_S + idle_s)
    when = expectations.soonest(context.boundaries, now)
    if when is not None:
        rate += 1 / min(max(when - now, _MIN_NEXT_USE_S), _MAX_INPUT_WAIT_S)
    num_forks = context.num_forks
    if context.expected_call is not None:
        source, since = context.expected_call
        rate += 1 / max(think_times.expected_s(source, now - since), _MIN_NEXT_USE_S)
        # The session's own next call is predicted above.
        num_forks -= 1
    if num_forks > 0:
        between_s = (context.last_used - context.opened_at) / num_forks
        rate += 1 / max(between_s, idle_s, _MIN_NEXT_USE_S)
    return now + 1 / rate


@dataclass(slots=True, eq=False)
class ReadyPrefix:
    """The segments of a prompt up to the first missing input. It can only grow."""

    segments: list[Segment]
    keys: list[bytes]  # One prefix key per segment.
    end: bytes  # The last key; without segments, the hasher's root.
    forecast: Forecast  # When the missing inputs will be ready.
    num_own: int = 0  # Number of segments from the completion's own template.

    def grow(self, completion: Completion) -> None:
        """Append the segments whose inputs have become ready."""
        for segment in fill_segments(completion, self.num_own):
            self.end = extend_key(self.end, segment)
            self.segments.append(segment)
            self.keys.append(self.end)
            self.num_own += 1


class ReadyPrefixes:
    """Keeps the ready prefix of each waiting completion.

    A completion whose `previous` is unfinished has no ready prefix, so a long waiting chain is
    free. Otherwise `expect` takes time in proportion to the new segments."""

    def __init__(self, expectations: Expectations, hasher: PrefixHasher | None = None) -> None:
        self._hasher = hasher or PrefixHasher()
        self._expectations = expectations
        self._waiting: dict[Completion, ReadyPrefix] = {}
        self._links: WeakKeyDictionary[Completion, PrefixLink] = WeakKeyDictionary()
        # Groups of `GROUP_SIZE` links, by the last completion of each group.
        self._groups: WeakKeyDictionary[Completion, PrefixLink] = WeakKeyDictionary()

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, completion: Completion, forecast: Forecast) -> ReadyPrefix | None:
        """Update a waiting completion. Returns its ready prefix if that has grown since the last
        call. Only the first call's `forecast` is used."""
        prefix, num_known = self._waiting.get(completion), 0
        if prefix is not None:
            num_known = len(prefix.keys)
        elif _has_prefix(completion):
            prefix = self._waiting[completion] = self._new_prefix(completion, forecast)
        else:
            return None
        prefix.grow(completion)
        if len(prefix.keys) == num_known:
            return None
        self._expectations.add_waiting(prefix.keys[num_known:], prefix.forecast)
        return prefix

    def drop(self, completion: Completion) -> ReadyPrefix | None:
        """Forget a completion that no longer waits, and return its ready prefix, if any."""
        prefix = self._waiting.pop(completion, None)
        if prefix is not None:
            self._expectations.remove_waiting(prefix.keys, prefix.forecast)
        return prefix

    def prompt(self, completion: Completion) -> tuple[list[Segment], tuple[bytes, ...]]:
        """Forget a completion whose inputs are ready. Returns its prompt's segments and keys."""
        whole = self.drop(completion) or self._new_prefix(completion, _ready_now)
        whole.grow(completion)
        return whole.segments, tuple(whole.keys)

    def check_integrity(self) -> Counter[bytes]:
        """Recount. Returns the number of waiting completions per prefix key. Raises AssertionError
        with the difference."""
        counts: Counter[bytes] = Counter()
        for completion, prefix in self._waiting.items():
            assert completion.state is CompletionState.WAITING, completion
            fresh = self._new_prefix(completion, prefix.forecast)
            fresh.grow(completion)
            if not _has_pending_notice(completion):
                assert fresh.segments == prefix.segments, (completion, prefix)
                assert fresh.keys == prefix.keys, (completion, prefix)
            assert prefix.forecast() >= 0, completion
            counts.update(prefix.keys)
        return counts

    def _new_prefix(self, completion: Completion, forecast: Forecast) -> ReadyPrefix:
        options = completion.options
        end = self._hasher.root(options.cache_salt, options.chat)
        segments: list[Segment] = []
        keys: list[bytes] = []
        for link in self._chain(preceding(completion), end, may_group=not options.chat):
            segments += link.segments
            keys += link.keys
        return ReadyPrefix(segments, keys, keys[-1] if keys else end, forecast)

    def _chain(
        self, completions: Sequence[Completion], end: bytes, *, may_group: bool
    ) -> Iterator[PrefixLink]:
        """Yield the links after the prefix key `end`. Old turns of a long conversation are grouped,
        because each new turn would visit hundreds of links. `may_group` is False for chats: their
        segments are separated by markup and cannot be merged."""
        at = 0
        while at < len(completions):
            stop = at + 1
            if may_group and at % GROUP_SIZE == 1 and at + 2 * GROUP_SIZE <= len(completions):
                stop = at + GROUP_SIZE
            link = self._link(completions[at:stop], end)
            yield link
            at, end = stop, link.keys[-1]

    def _link(self, completions: Sequence[Completion], end: bytes) -> PrefixLink:
        """The cached link of one completion, or the merged link of a group."""
        is_group = len(completions) > 1
        known = self._groups if is_group else self._links
        link = known.get(completions[-1])
        if link is None:
            if is_group:
                links: list[PrefixLink] = []
                for completion in completions:
                    links.append(self._link([completion], links[-1].keys[-1] if links else end))
                link = merged(links)
            else:
                link = link_of(completions[0], end)
            known[completions[-1]] = link
        return link


def _has_pending_notice(completion: Completion) -> bool:
    """Whether an input is settled but not yet counted as such by the completion."""
    return completion.missing > sum(not variable.is_settled for variable in completion.inputs)


def _ready_now() -> float:
    return 0.0


def _has_prefix(completion: Completion) -> bool:
    before = completion.previous
    return before is None or before.output.state is VariableState.READY
