"""Metrics in Prometheus' text format: plain numbers become families only when somebody scrapes."""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import TypeVar

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
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

# Counters that ServeCore and engines have, by vLLM's names.
REUSE_COUNTERS = {
    "prefix_cache_queries": "Prompt tokens that were looked up.",
    "prefix_cache_hits": "Prompt tokens whose KV was there already.",
    "spec_decode_num_draft_tokens": "Drafted tokens that were verified.",
    "spec_decode_num_accepted_tokens": "Drafted tokens that became output.",
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

    def add(self, other: "Histogram") -> None:
        """Take over the observations of another one with the same bounds."""
        self._counts = [a + b for a, b in zip(self._counts, other._counts, strict=True)]
        self._sum += other._sum

    def add_to(self, family: HistogramMetricFamily, labels: Sequence[str]) -> None:
        bounds = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        totals = accumulate(self._counts)
        buckets = [(bound, float(total)) for bound, total in zip(bounds, totals, strict=True)]
        family.add_metric(labels, buckets=buckets, sum_value=self._sum)


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def render_metrics(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def counter(name: str, text: str, counts: Mapping[L, float], *labels: str) -> CounterMetricFamily:
    """A counter with one series for each tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def histogram(
    name: str, text: str, series: Mapping[L, Histogram], *labels: str
) -> HistogramMetricFamily:
    """A histogram with one series for each tuple of label values."""
    family = HistogramMetricFamily(name, text, labels=labels)
    for values, one in series.items():
        one.add_to(family, values)
    return family
