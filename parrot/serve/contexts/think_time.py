"""The times that sessions think before they continue a call, learnt per function, and per cache
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
`_OTHERS_WEIGHT` observations; `_DOUBT` of an observation says that T goes on as long again as it
has lasted; and c begins at one half. Old observations fade by halves."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator
from itertools import accumulate
from typing import NamedTuple

from parrot.serve.graph.nodes import Completion, given_name
from parrot.utils.heaps import LruDict

_FIRST_S = 0.02
_RATIO = 1.1
_BOUNDS_S = (0.0, *(_FIRST_S * _RATIO**i for i in range(130)))  # up to 4,400 s, and beyond
_MAX_WEIGHT = 256.0  # of observations; older ones fade
_MAX_KNOWN = 8192  # functions and salts; those unused for longest are forgotten
_OTHERS_WEIGHT = 2.0  # what the salt's other functions say counts like so many observations
_DOUBT = 0.5  # likewise, that it goes on as long again as it has lasted
_USUAL_S = 10.0  # taken to have elapsed at least, in that
_MIN_CHANCE = 1e-4


class Source(NamedTuple):
    """The calls of one function with one cache salt, which are taken to be continued alike; so are
    all calls whose functions have no name."""

    salt: str
    func_name: str

    @classmethod
    def of(cls, completion: Completion) -> "Source":
        return cls(completion.options.cache_salt, given_name(completion))


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
        self._fade()

    def abandon(self, count: int) -> None:
        self.num_abandoned += count
        self._fade()

    def beyond(self, elapsed_s: float) -> tuple[float, float]:
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

    def _fade(self) -> None:
        if self.num_continued + self.num_abandoned <= _MAX_WEIGHT:
            return
        self._counts = [count / 2 for count in self._counts]
        self.num_continued /= 2
        self.num_abandoned /= 2
        self._tails = None


def _middle(bucket: int) -> float:
    low = _BOUNDS_S[bucket]
    return low * (1 + _RATIO) / 2 if bucket else _FIRST_S / 2


_UNKNOWN = _Histogram()


class ThinkTimes:
    """Learns from calls that end, and from those that continue them or never do."""

    def __init__(self) -> None:
        self._known: LruDict[Source | str, _Histogram] = LruDict(_MAX_KNOWN)  # and of salts
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
        own = self._known.peek(source) or _UNKNOWN
        others = self._known.peek(source.salt) or _UNKNOWN
        share = _OTHERS_WEIGHT / max(others.num_continued, _OTHERS_WEIGHT)
        own_weight, own_s = own.beyond(elapsed_s)
        others_weight, others_s = others.beyond(elapsed_s)
        weight = own_weight + share * others_weight
        doubt_s = _DOUBT * max(elapsed_s, _USUAL_S)
        rest_s = (own_s + share * others_s + doubt_s) / (weight + _DOUBT)
        num_seen = own.num_continued + share * others.num_continued
        lasting = (weight + _DOUBT) / (num_seen + _DOUBT)
        usual = _chance(own, others)
        chance = usual * lasting
        return rest_s / max(chance / (chance + 1 - usual), _MIN_CHANCE)

    def _histograms(self, source: Source) -> Iterator[_Histogram]:
        """Yield that of the function and that of its salt, new or not."""
        for key in (source, source.salt):
            if (histogram := self._known.get(key)) is None:
                self._known.put(key, histogram := _Histogram())
            yield histogram


def _chance(own: _Histogram, others: _Histogram) -> float:
    """The probability that a call is continued at all."""
    usual = (others.num_continued + 1) / (others.num_continued + others.num_abandoned + 2)
    num_known = own.num_continued + own.num_abandoned
    return (own.num_continued + _OTHERS_WEIGHT * usual) / (num_known + _OTHERS_WEIGHT)
