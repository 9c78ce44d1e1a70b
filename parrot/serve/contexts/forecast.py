"""Forecasts of the uses that contexts will have: who is going to use them, and when.

    template       "Read " {{book}} " and " {{notes}} " and answer: " {{answer}}
    book is ready  |-- ready prefix -----|  missing

A wanted completion waits while an input is missing. Its *ready prefix* is everything before the
first missing piece, in the order of its prompt; it only grows. Whoever keeps contexts learns from
it that they will be needed; whoever fills contexts can compute it ahead.

The next use of a context is predicted in seconds. Each reason why somebody may use it has a rate:
one over the seconds until it is expected to come true. The rates add up; the next use is expected
after one over their sum.

    queued runs                 now
    completions that wait       when their inputs are predicted to be there
    the session's next call     the rest of the usual think time (see `ThinkTimes`)
    reuse so far                the mean time between uses, or the time since the last if longer
    anybody else                in a while, the later the longer nobody came

The times that sessions think before they continue a call, learnt per function, and per cache
salt: a tenant's, or that of some who share their caches.

    call ends        ... the program runs a tool, a person thinks ...      its successor is ready
        |------------------------- think time -----------------------------------|
        |------ elapsed ------|-- what is predicted: the rest, if there is one --|

The model is an empirical survival model with two kinds of ends. Let T be the think time of a call,
infinite if it is never continued, e the time that has elapsed, and c the fraction of calls that are
continued at all. Of those, S(e) = P(T > e | T finite) is the weight of the observed think times
longer than e over that of all. Then by Bayes' rule the call is still going to be continued with
probability

    p(e) = c S(e) / (c S(e) + 1 - c)

which falls with e: what has lasted longer than ever before is hardly continued any more. If it is,
it takes m(e) = E[T - e | T > e] more seconds: the sum of the rests of the longer observed times
over their weight. The next use is a rate (see `forecast`), and a use that comes with probability p
after m seconds has the rate p / m. So what is returned is m(e) / p(e).

Three priors keep it sane where little was seen: the salt's other functions count like
`_SALT_PRIOR` observations; `_TAIL_PRIOR` of an observation says that T goes on as long again as it
has lasted; and c begins at one half. Old observations fade by halves.
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

_FIRST_BOUND_S = 0.02
_BOUND_RATIO = 1.1
_BOUNDS_S = (
    0.0,
    *(_FIRST_BOUND_S * _BOUND_RATIO**i for i in range(130)),
)  # up to 4,400 s, and beyond
_MAX_WEIGHT = 256.0  # of observations; older ones fade
_MAX_HISTOGRAMS = 8192  # functions and salts; those unused for longest are forgotten
_SALT_PRIOR = 2.0  # what the salt's other functions say counts like so many observations
_TAIL_PRIOR = 0.5  # likewise, that it goes on as long again as it has lasted
_MIN_TAIL_S = 10.0  # taken to have elapsed at least, in that
_MIN_PROBABILITY = 1e-4


Forecast = Callable[[], float]
"""When a completion that waits will have its inputs, on the clock's scale; infinite if nobody
knows."""
GROUP_SIZE = 16  # links in one group
_MIN_NEXT_USE_S = 0.5  # what is due or overdue is expected within this
_MAX_INPUT_WAIT_S = 60.0  # what waits for the program itself, of which nothing is known


class _Histogram:
    """The think times of some calls, and how many calls were never continued."""

    def __init__(self) -> None:
        self._counts = [0.0] * len(_BOUNDS_S)
        self._tails: list[tuple[float, float]] | None = None  # weight and time from each bucket on
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
        """The weight of the observed think times that were longer, and the sum of their rests."""
        if not self.num_continued:
            return 0.0, 0.0
        if self._tails is None:
            self._tails = self._sum_tails()
        bucket = bisect_right(_BOUNDS_S, elapsed_s) - 1
        weight, seconds = self._tails[bucket + 1]
        rest_s = seconds - weight * elapsed_s
        if bucket + 1 < len(_BOUNDS_S):  # the part of its own bucket that is still to come
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
    """Learns from calls that end, and from those that continue them or never do."""

    def __init__(self) -> None:
        self._known: LruDict[Source | str, _Histogram] = LruDict(_MAX_HISTOGRAMS)  # and of salts
        self._open: dict[int, Counter[Source]] = {}  # ended and not continued, by session

    @property
    def num_open(self) -> int:
        """Calls of live sessions that have ended and were not continued."""
        return sum(pending.total() for pending in self._open.values())

    def ended(self, session_id: int, source: Source) -> None:
        """A call has ended, and may be continued from now on."""
        self._open.setdefault(session_id, Counter())[source] += 1

    def submitted(self, completion: Completion, now: float) -> None:
        """A call is ready. If it continues another one, that was thought about until now."""
        before = completion.previous
        if before is not None and before.times.finished is not None:
            think_s = now - before.times.finished
            self.continued(completion.session_id, Source.of(before), think_s)

    def continued(self, session_id: int, source: Source, think_s: float) -> None:
        """A call that continues one of the source's is ready."""
        if (pending := self._open.get(session_id)) is not None and pending[source] > 0:
            pending[source] -= 1
        for histogram in self._histograms(source):
            histogram.observe(think_s)

    def session_ended(self, session_id: int) -> None:
        for source, count in self._open.pop(session_id, Counter[Source]()).items():
            if count:
                for histogram in self._histograms(source):
                    histogram.abandon(count)

    def expected_s(self, source: Source, elapsed_s: float) -> float:
        """Expected seconds until a call that ended `elapsed_s` ago is continued, over the chance
        that it is continued at all."""
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
        """Yield that of the function and that of its salt, new or not."""
        for key in (source, source.salt):
            if (histogram := self._known.get(key)) is None:
                self._known.put(key, histogram := _Histogram())
            yield histogram


def _continue_probability(own: _Histogram, others: _Histogram) -> float:
    """The probability that a call is continued at all."""
    usual = (others.num_continued + 1) / (others.num_continued + others.num_abandoned + 2)
    num_known = own.num_continued + own.num_abandoned
    return (own.num_continued + _SALT_PRIOR * usual) / (num_known + _SALT_PRIOR)


_UNEXPECTED_USE_S = 600.0  # a context that nobody is known to want


@dataclass(slots=True)
class _Expectation:
    """Who will use a prefix. Of `waiting`, the first to wait comes first."""

    num_queued: int = 0
    waiting: dict[Forecast, None] = field(default_factory=dict)


class Expectations:
    """The prefix keys that queued and waiting completions will use, and when."""

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
        """When the first of them is used; None if none is expected to be."""
        soonest = None
        for boundary in boundaries:
            expectation = self._expected.get(boundary.key)
            if expectation is not None:
                when = now if expectation.num_queued else next(iter(expectation.waiting))()
                soonest = when if soonest is None else min(soonest, when)
        return soonest

    def check_integrity(self, counts: Mapping[bytes, int]) -> None:
        """`counts`: how many completions, queued or waiting, would use each key."""
        own = {key: e.num_queued + len(e.waiting) for key, e in self._expected.items()}
        assert own == counts, (own, counts)

    def _remove_if_unused(self, key: bytes) -> None:
        expectation = self._expected[key]
        if not expectation.num_queued and not expectation.waiting:
            del self._expected[key]


def next_use(
    expectations: Expectations, think_times: ThinkTimes, context: LedgerContext, now: float
) -> float:
    """When the context is expected to be used, on the clock's scale, by what is expected and what
    was learnt."""
    idle_s = now - context.last_used
    rate = 1 / (_UNEXPECTED_USE_S + idle_s)
    when = expectations.soonest(context.boundaries, now)
    if when is not None:
        rate += 1 / min(max(when - now, _MIN_NEXT_USE_S), _MAX_INPUT_WAIT_S)
    num_forks = context.num_forks
    if context.expected_call is not None:
        source, since = context.expected_call
        rate += 1 / max(think_times.expected_s(source, now - since), _MIN_NEXT_USE_S)
        num_forks -= 1  # the session's own next call
    if num_forks > 0:
        between_s = (context.last_used - context.opened_at) / num_forks
        rate += 1 / max(between_s, idle_s, _MIN_NEXT_USE_S)
    return now + 1 / rate


@dataclass(slots=True, eq=False)
class ReadyPrefix:
    """The known beginning of a prompt, with one prefix key for each segment. It only grows.
    `forecast`: when the rest will be there. `num_own`: pieces of the completion's own fill in it;
    `end`: its key."""

    segments: list[Segment]
    keys: list[bytes]
    end: bytes
    forecast: Forecast
    num_own: int = 0

    def grow(self, completion: Completion) -> None:
        """Take in what has become ready."""
        for segment in fill_segments(completion, self.num_own):
            self.end = extend_key(self.end, segment)
            self.segments.append(segment)
            self.keys.append(self.end)
            self.num_own += 1


class ReadyPrefixes:
    """Keeps the ready prefix of every waiting completion. `expect` costs what it adds; a completion
    that continues another one that is not done has no prefix apart from that one's, so a long chain
    that waits costs nothing."""

    def __init__(self, expectations: Expectations, hasher: PrefixHasher | None = None) -> None:
        self._hasher = hasher or PrefixHasher()
        self._expectations = expectations
        self._waiting: dict[Completion, ReadyPrefix] = {}
        self._links: WeakKeyDictionary[Completion, PrefixLink] = WeakKeyDictionary()
        self._groups: WeakKeyDictionary[Completion, PrefixLink] = (
            WeakKeyDictionary()
        )  # by their last

    def __len__(self) -> int:
        return len(self._waiting)

    def expect(self, completion: Completion, forecast: Forecast) -> ReadyPrefix | None:
        """A wanted completion waits; `forecast`: when its inputs will be there (that of the first
        call holds). Returns its prefix if that has grown since the last call."""
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
        """It waits no more. Returns the prefix that it had, if any. Safe in any state."""
        prefix = self._waiting.pop(completion, None)
        if prefix is not None:
            self._expectations.remove_waiting(prefix.keys, prefix.forecast)
        return prefix

    def prompt(self, completion: Completion) -> tuple[list[Segment], tuple[bytes, ...]]:
        """The segments and keys of the whole prompt. Its inputs are ready now; it waits no more."""
        whole = self.drop(completion) or self._new_prefix(completion, _ready_now)
        whole.grow(completion)
        return whole.segments, tuple(whole.keys)

    def check_integrity(self) -> Counter[bytes]:
        """Recount. Returns how often each key is expected; raises AssertionError with what
        differs."""
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
        """The links behind the prefix key `end`, with the old ones of a long conversation in
        groups: hundreds would be looked at for each of its turns. A chat's segments have markup
        between them, so they cannot be one."""
        at = 0
        while at < len(completions):
            stop = at + 1
            if may_group and at % GROUP_SIZE == 1 and at + 2 * GROUP_SIZE <= len(completions):
                stop = at + GROUP_SIZE
            link = self._link(completions[at:stop], end)
            yield link
            at, end = stop, link.keys[-1]

    def _link(self, completions: Sequence[Completion], end: bytes) -> PrefixLink:
        """One link, or a group of them as one."""
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
    """Whether it has yet to hear of an input that is settled."""
    return completion.missing > sum(not variable.is_settled for variable in completion.inputs)


def _ready_now() -> float:
    return 0.0


def _has_prefix(completion: Completion) -> bool:
    before = completion.previous
    return before is None or before.output.state is VariableState.READY
