"""Counts of what ServeCore does, in Prometheus' text format. Cheap to update: plain numbers, which
become metric families only when somebody scrapes."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
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
from parrot.serve.execution.engines import EngineView
from parrot.serve.execution.prefetch import EagerCounts
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


class CoreMetrics:
    """What is counted as it happens. Of `tenants` each has its own series, the others one."""

    def __init__(self, tenants: Container[str]) -> None:
        self._tenants = tenants
        self.session_s = Histogram(
            "parrot_session_e2e_seconds", "Life of ended sessions.", _LATENCY_S
        )
        self.call_s = Histogram(
            "parrot_e2e_request_latency_seconds",
            "Completions, from wanted to finished.",
            _LATENCY_S,
        )
        self.dependency_s = Histogram(
            "parrot_call_dependency_wait_seconds", "From wanted until all inputs ready.", _SHORT_S
        )
        self.queue_s = Histogram(
            "parrot_call_queue_seconds",
            "From all inputs ready to the start on an engine.",
            _SHORT_S,
        )
        self.native_s = Histogram(
            "parrot_function_seconds", "Run of native functions in the sandbox.", _SHORT_S
        )
        self.calls: Counter[tuple[str, str]] = Counter()  # (kind, state)
        self.tokens: Counter[tuple[str, str]] = Counter()  # (tenant, direction)
        self.num_cached_tokens = 0
        self.num_reused = 0
        self.num_retries = 0

    def task_finished(self, task: Task, tenant: str) -> None:
        times = task.times
        is_semantic = isinstance(task, Completion)
        self.calls["semantic" if is_semantic else "native", task.state.value] += 1
        if isinstance(task, Completion) and task.stats.is_reused:
            self.num_reused += 1
        if times.started is None or times.finished is None:
            return
        if not isinstance(task, Completion):
            self.native_s.observe(times.finished - times.started)
            return
        if times.activated is not None and times.ready is not None:
            self.dependency_s.observe(times.ready - times.activated)
            self.queue_s.observe(max(0.0, times.started - times.ready))
            self.call_s.observe(times.finished - times.activated)
        stats = task.stats
        if tenant not in self._tenants:
            tenant = OTHER_TENANTS
        self.tokens[tenant, "prompt"] += stats.cached_tokens + stats.computed_tokens
        self.tokens[tenant, "generation"] += stats.output_tokens
        self.num_cached_tokens += stats.cached_tokens
        self.num_retries += max(0, stats.attempts - 1)

    def families(self) -> Iterable[Metric]:
        for histogram in (
            self.session_s,
            self.call_s,
            self.dependency_s,
            self.queue_s,
            self.native_s,
        ):
            yield histogram.family()
        calls = CounterMetricFamily("parrot_calls", "Tasks that ended.", labels=["kind", "state"])
        for (kind, state), count in self.calls.items():
            calls.add_metric([kind, state], count)
        yield calls
        tokens = CounterMetricFamily(
            "parrot_tenant_tokens", "Tokens served.", labels=["tenant", "direction"]
        )
        for (tenant, direction), count in self.tokens.items():
            tokens.add_metric([tenant, direction], count)
        yield tokens
        yield CounterMetricFamily(
            "parrot_prefix_shared_tokens",
            "Prompt tokens whose KV was there already.",
            value=self.num_cached_tokens,
        )
        yield CounterMetricFamily(
            "parrot_calls_reused",
            "Completions that took the result of an identical one.",
            value=self.num_reused,
        )
        yield CounterMetricFamily(
            "parrot_call_retries", "Further attempts of completions.", value=self.num_retries
        )


class CoreCollector(Collector):
    """Adds what is only looked up when scraped: live sessions and engines."""

    def __init__(
        self,
        metrics: CoreMetrics,
        sessions: Iterable[Session],
        engines: Callable[[], Sequence[EngineView]],
        num_queued: Callable[[], int],
        kv_counts: Callable[[], KvCounts],
        eager_counts: Callable[[], EagerCounts],
    ) -> None:
        self._metrics = metrics
        self._sessions = sessions
        self._engines = engines
        self._num_queued = num_queued
        self._kv_counts = kv_counts
        self._eager_counts = eager_counts
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def render(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterable[Metric]:
        yield from self._metrics.families()
        yield from self._session_families()
        yield from self._engine_families()
        yield from _kv_families(self._kv_counts())
        yield _eager_family(self._eager_counts())

    def describe(self) -> Iterable[Metric]:
        """Nothing, so that registering does not collect."""
        return []

    def _session_families(self) -> Iterable[Metric]:
        sessions = list(self._sessions)
        yield GaugeMetricFamily("parrot_sessions", "Live sessions.", value=len(sessions))
        variables = GaugeMetricFamily(
            "parrot_variables", "Variables of live sessions.", labels=["state"]
        )
        for state in VariableState:
            count = sum(session.graph.num_variables(state) for session in sessions)
            variables.add_metric([state.value], count)
        yield variables
        yield GaugeMetricFamily(
            "parrot_num_requests_waiting", "Completions queued.", value=self._num_queued()
        )

    def _engine_families(self) -> Iterable[Metric]:
        labels = ["engine", "model_name"]
        families = {
            "up": GaugeMetricFamily("parrot_engine_up", "The engine is live.", labels=labels),
            "age": GaugeMetricFamily(
                "parrot_engine_heartbeat_age_seconds", "Since its last sign of life.", labels=labels
            ),
            "running": GaugeMetricFamily(
                "parrot_num_requests_running", "Completions on the engine.", labels=labels
            ),
            "contexts": GaugeMetricFamily(
                "parrot_engine_contexts", "Contexts that ServeCore keeps there.", labels=labels
            ),
            "usage": GaugeMetricFamily(
                "parrot_kv_cache_usage_perc", "Used part of its KV blocks, 0 to 1.", labels=labels
            ),
        }
        for engine in self._engines():
            values = [engine.info.engine_name, engine.info.model]
            families["up"].add_metric(values, 1)
            families["age"].add_metric(values, engine.silent_s)
            families["running"].add_metric(values, engine.num_running)
            families["contexts"].add_metric(values, engine.num_contexts)
            runtime = engine.runtime
            if runtime is not None and runtime.num_max_blocks:
                used = 1 - runtime.num_free_blocks / runtime.num_max_blocks
                families["usage"].add_metric(values, used)
        yield from families.values()


def _eager_family(counts: EagerCounts) -> Metric:
    family = CounterMetricFamily(
        "parrot_eager_fill_tokens",
        "Prompt tokens computed while their calls waited for inputs, and what became of them.",
        labels=["outcome"],
    )
    family.add_metric(["filled"], counts.filled)
    family.add_metric(["used"], counts.used)
    family.add_metric(["wasted"], counts.wasted)
    return family


def _kv_families(counts: KvCounts) -> Iterable[Metric]:
    yield CounterMetricFamily(
        "parrot_kv_hit_tokens", "Prompt tokens that a context had.", value=counts.hit
    )
    recomputed = CounterMetricFamily(
        "parrot_kv_recomputed_tokens",
        "Prompt tokens computed again, by what became of the context that had them.",
        labels=["reason"],
    )
    freed = CounterMetricFamily(
        "parrot_kv_freed_tokens", "Tokens of freed contexts, by the reason.", labels=["reason"]
    )
    for family, by_reason in ((recomputed, counts.recomputed), (freed, counts.freed)):
        for reason, count in by_reason.items():
            family.add_metric([reason], count)
        yield family
