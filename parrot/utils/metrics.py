"""Metrics in Prometheus' text format. They are stored as plain numbers and become Prometheus
families only during a scrape."""

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Generic, Protocol, Self, TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

L = TypeVar("L", bound=tuple[str, ...])  # the values of a series' labels

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The bounds of vLLM's histograms of the same names, in seconds and in tokens.
LATENCY_S = (
    *(0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120),
    *(240, 480, 960, 1920, 7680),
)
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80, 160, 640, 2560),
)
PER_TOKEN_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5),
    *(10, 20, 40, 80),
)
TOKENS = tuple(digit * 10**exponent for exponent in range(6) for digit in (1, 2, 5))

OTHER = "other"
"""The label value of all names that have no series of their own."""
_MAX_CANDIDATES = 1024  # Names whose uses are counted although they have no series of their own.

Histograms = Mapping[str, tuple[str, Sequence[float]]]
"""The help text and the bounds of each histogram, by its name."""
Counters = Mapping[str, tuple[str, str]]
"""The help text and the extra label of each counter. Empty label: the counter has one value."""

# Counters of both ServeCore and engines, with vLLM's names.
REUSE_COUNTERS: Counters = {
    "prefix_cache_queries": ("Prompt tokens that were looked up.", ""),
    "prefix_cache_hits": ("Prompt tokens whose KV was there already.", ""),
    "spec_decode_num_draft_tokens": ("Drafted tokens that were verified.", ""),
    "spec_decode_num_accepted_tokens": ("Drafted tokens that became output.", ""),
}


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, *values: float) -> None:
        bounds, counts = self._bounds, self._counts
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of observations in each bucket. The last one is above all bounds."""
        return tuple(self._counts)

    def add(self, other: "Histogram") -> None:
        """Add the observations of another histogram with the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        totals = accumulate(self._counts)
        buckets = [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class Series:
    """The histograms and counters that have one set of label values."""

    __slots__ = ("counts", "histograms")

    def __init__(self, histograms: Histograms) -> None:
        self.histograms = {name: Histogram(bounds) for name, (_, bounds) in histograms.items()}
        self.counts: defaultdict[tuple[str, str], float] = defaultdict(float)
        """Values by counter name and value of the extra label ("" without the label)."""

    def observe(self, name: str, values: Iterable[float | None]) -> None:
        """Add the values to a histogram. None means "not measured" and is skipped."""
        self.histograms[name].observe(*[value for value in values if value is not None])

    def count(self, name: str, number: float, part: str = "") -> None:
        self.counts[name, part] += number

    def add(self, other: "Series") -> None:
        for name, one in self.histograms.items():
            one.add(other.histograms[name])
        for key, number in other.counts.items():
            self.counts[key] += number


class Addable(Protocol):
    def add(self, other: Self) -> None:
        """Add the counts of `other`."""
        ...


S = TypeVar("S", bound=Addable)


class SeriesByName(Generic[S]):
    """Series for at most `limit` names. All other names share the series `other`.

    A name with more than twice the uses of the least used series replaces that series. The replaced
    series is added to `other`, and the new one begins at 0, so no counter of `other` decreases."""

    def __init__(self, limit: int, make: Callable[[], S]) -> None:
        self._limit = limit
        self._make = make
        self._own: dict[str, S] = {}
        self._uses: Counter[str] = Counter()  # Uses of names with own series.
        # Estimated uses of other names (Misra-Gries): never above the real number.
        self._candidates: Counter[str] = Counter()
        self._other: S | None = None

    def use(self, name: str, times: int = 1) -> S:
        """Count `times` uses of the name and return its series."""
        if (series := self._own.get(name)) is None and name != OTHER:
            series = self._admitted(name, times)
        if series is not None:
            self._uses[name] += times
            return series
        if self._other is None:
            self._other = self._make()
        return self._other

    def items(self) -> Iterator[tuple[str, S]]:
        yield from self._own.items()
        if self._other is not None:
            yield OTHER, self._other

    def _admitted(self, name: str, times: int) -> S | None:
        if len(self._own) >= self._limit:
            uses = self._count(name, times)
            least = min(self._uses, key=self._uses.__getitem__)
            if uses <= 2 * self._uses[least]:
                return None
            if self._other is None:
                self._other = self._make()
            self._other.add(self._own.pop(least))
            del self._uses[least]
            self._uses[name] = self._candidates.pop(name)
        return self._own.setdefault(name, self._make())

    def _count(self, name: str, times: int) -> int:
        """Count in bounded memory (Misra-Gries): above 1,024 names, each name loses one use."""
        self._candidates[name] += times
        if len(self._candidates) > _MAX_CANDIDATES:
            self._candidates = Counter({n: c - 1 for n, c in self._candidates.items() if c > 1})
        return self._candidates[name]


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def render_metrics(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def histograms(
    prefix: str, about: Histograms, series: Mapping[L, Series], *labels: str
) -> Iterator[HistogramMetricFamily]:
    """The histograms, each with one series per tuple of label values."""
    for name, (text, _) in about.items():
        family = HistogramMetricFamily(f"{prefix}_{name}", text, labels=labels)
        for values, one in series.items():
            one.histograms[name].add_to(family, values)
        yield family


def counters(
    prefix: str, about: Counters, series: Mapping[L, Series], *labels: str
) -> Iterator[CounterMetricFamily]:
    """The counters, each with one series per tuple of label values. A counter with an extra label
    has one series for each of its values."""
    for name, (text, label) in about.items():
        family = CounterMetricFamily(
            f"{prefix}_{name}", text, labels=[*labels, label] if label else labels
        )
        for values, one in series.items():
            if not label:
                family.add_metric(values, one.counts[name, ""])
                continue
            for (counted, part), number in one.counts.items():
                if counted == name:
                    family.add_metric([*values, part], number)
        yield family


def gauge(name: str, text: str, numbers: Mapping[L, float], *labels: str) -> GaugeMetricFamily:
    """A gauge with one series per tuple of label values."""
    family = GaugeMetricFamily(name, text, labels=labels)
    for values, number in numbers.items():
        family.add_metric(values, number)
    return family


def counter(name: str, text: str, counts: Mapping[L, float], *labels: str) -> CounterMetricFamily:
    """A counter with one series per tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family
