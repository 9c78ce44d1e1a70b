"""Metrics in Prometheus' text format: plain numbers become families only when somebody scrapes."""

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Families(Collector):
    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families


def render_metrics(families: Iterable[Metric]) -> bytes:
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return generate_latest(registry)


def counter(
    name: str, text: str, counts: Mapping[tuple[str, ...], int], *labels: str
) -> CounterMetricFamily:
    """A counter with one series for each tuple of label values."""
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family
