"""Counts of what ServeCore does, in Prometheus' text format. Cheap to update: plain numbers, which
become metric families only when somebody scrapes."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.graph.variable import VariableState
from parrot.serve.sessions import Session

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

OTHER_TENANTS = "other"

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)


class Histogram:
    """Counts of observations up to each bound, and their sum."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def family(self) -> Metric:
        labels = [str(float(bound)) for bound in self._bounds] + ["+Inf"]
        totals = accumulate(self._counts)
        buckets = [(label, float(total)) for label, total in zip(labels, totals, strict=True)]
        return HistogramMetricFamily(self._name, self._text, buckets=buckets, sum_value=self._sum)


_HISTOGRAMS = {
    "session": ("parrot_session_e2e_seconds", "Life of ended sessions.", _LATENCY_S),
    "call": (
        "parrot_e2e_request_latency_seconds",
        "Completions, from wanted to finished.",
        _LATENCY_S,
    ),
    "dependency": (
        "parrot_call_dependency_wait_seconds",
        "From wanted until all inputs ready.",
        _SHORT_S,
    ),
    "queue": (
        "parrot_call_queue_seconds",
        "From all inputs ready to the start on an engine.",
        _SHORT_S,
    ),
    "native": ("parrot_function_seconds", "Run of native functions in the sandbox.", _SHORT_S),
}


class CoreMetrics:
    """Counts of what happens. Of `tenants` each has its own series, the others one."""

    def __init__(self, tenants: Container[str]) -> None:
        self._tenants = tenants
        self._seconds = {key: Histogram(*spec) for key, spec in _HISTOGRAMS.items()}
        self._tasks: Counter[tuple[str, ...]] = Counter()  # (kind, state)
        self._tokens: Counter[tuple[str, ...]] = Counter()  # (tenant, direction)
        self._num_cached_tokens = 0
        self._num_reused = 0
        self._num_retries = 0

    def session_ended(self, seconds: float) -> None:
        self._seconds["session"].observe(seconds)

    def task_finished(self, task: Task, tenant: str) -> None:
        times = task.times
        is_semantic = isinstance(task, Completion)
        self._tasks["semantic" if is_semantic else "native", task.state.value] += 1
        if isinstance(task, Completion) and task.stats.is_reused:
            self._num_reused += 1
        if times.started is None or times.finished is None:
            return
        if not isinstance(task, Completion):
            self._seconds["native"].observe(times.finished - times.started)
            return
        if times.activated is not None and times.ready is not None:
            self._seconds["dependency"].observe(times.ready - times.activated)
            self._seconds["queue"].observe(max(0.0, times.started - times.ready))
            self._seconds["call"].observe(times.finished - times.activated)
        stats = task.stats
        label = tenant if tenant in self._tenants else OTHER_TENANTS
        self._tokens[label, "prompt"] += stats.cached_tokens + stats.computed_tokens
        self._tokens[label, "generation"] += stats.output_tokens
        self._num_cached_tokens += stats.cached_tokens
        self._num_retries += max(0, stats.attempts - 1)

    def families(self) -> Iterable[Metric]:
        for histogram in self._seconds.values():
            yield histogram.family()
        yield _counter("parrot_calls", "Tasks that ended.", self._tasks, "kind", "state")
        yield _counter(
            "parrot_tenant_tokens", "Tokens served.", self._tokens, "tenant", "direction"
        )
        cached = "Prompt tokens whose KV was there already."
        yield _counter("parrot_prefix_shared_tokens", cached, {(): self._num_cached_tokens})
        reused = "Completions that took the result of an identical one."
        yield _counter("parrot_calls_reused", reused, {(): self._num_reused})
        retries = "Further attempts of completions."
        yield _counter("parrot_call_retries", retries, {(): self._num_retries})


class CoreCollector(Collector):
    """Adds what is only looked up when scraped: live sessions and engines."""

    def __init__(
        self, metrics: CoreMetrics, sessions: Iterable[Session], dispatcher: Dispatcher
    ) -> None:
        self._metrics = metrics
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        yield from _session_families(list(self._sessions))
        queued = self._dispatcher.num_queued
        yield GaugeMetricFamily("parrot_num_requests_waiting", "Completions queued.", value=queued)
        yield from _engine_families(self._dispatcher.fleet.views())
        yield from _kv_families(self._dispatcher.kv_counts)
        yield _counter(
            "parrot_eager_fill_tokens",
            "Prompt tokens computed while their calls waited for inputs, and what became of them.",
            {
                (outcome,): count
                for outcome, count in asdict(self._dispatcher.prefetch_counts).items()
            },
            "outcome",
        )

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return []


def _counter(
    name: str, text: str, counts: Mapping[tuple[str, ...], int], *labels: str
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, count in counts.items():
        family.add_metric(values, count)
    return family


def _session_families(sessions: Sequence[Session]) -> Iterable[Metric]:
    yield GaugeMetricFamily("parrot_sessions", "Live sessions.", value=len(sessions))
    variables = GaugeMetricFamily(
        "parrot_variables", "Variables of live sessions.", labels=["state"]
    )
    for state in VariableState:
        count = sum(session.graph.num_variables(state) for session in sessions)
        variables.add_metric([state.value], count)
    yield variables


def _kv_usage(engine: EngineView) -> float | None:
    runtime = engine.runtime
    if runtime is None or not runtime.num_max_blocks:
        return None
    return 1 - runtime.num_free_blocks / runtime.num_max_blocks


_ENGINE_GAUGES: tuple[tuple[str, str, Callable[[EngineView], float | None]], ...] = (
    ("parrot_engine_up", "The engine is live.", lambda engine: 1),
    (
        "parrot_engine_heartbeat_age_seconds",
        "Since its last sign of life.",
        lambda engine: engine.silent_s,
    ),
    (
        "parrot_num_requests_running",
        "Completions on the engine.",
        lambda engine: engine.num_running,
    ),
    (
        "parrot_engine_contexts",
        "Contexts that ServeCore keeps there.",
        lambda engine: engine.num_contexts,
    ),
    ("parrot_kv_cache_usage_perc", "Used part of its KV blocks, 0 to 1.", _kv_usage),
)


def _engine_families(engines: Sequence[EngineView]) -> Iterable[Metric]:
    for name, text, value_of in _ENGINE_GAUGES:
        family = GaugeMetricFamily(name, text, labels=["engine", "model_name"])
        for engine in engines:
            if (value := value_of(engine)) is not None:
                family.add_metric([engine.info.engine_name, engine.info.model], value)
        yield family


def _kv_families(counts: KvCounts) -> Iterable[Metric]:
    hit = "Prompt tokens that a context had."
    yield _counter("parrot_kv_hit_tokens", hit, {(): counts.hit})
    recomputed = "Prompt tokens computed again, by what became of the context that had them."
    freed = "Tokens of freed contexts, by the reason."
    for name, text, by_reason in (
        ("parrot_kv_recomputed_tokens", recomputed, counts.recomputed),
        ("parrot_kv_freed_tokens", freed, counts.freed),
    ):
        yield _counter(name, text, {(key,): n for key, n in by_reason.items()}, "reason")
