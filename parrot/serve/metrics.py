"""Counts of what ServeCore does. Cheap to update: plain numbers."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import asdict
from itertools import accumulate

from prometheus_client.core import GaugeMetricFamily, HistogramMetricFamily, Metric

from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.graph.variable import VariableState
from parrot.serve.sessions import Session
from parrot.utils.metrics import counter, render_metrics

OTHER_TENANTS = "other"

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_LATENCY_S = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_HISTOGRAMS = {
    "parrot_session_e2e_seconds": ("Life of ended sessions.", _LATENCY_S),
    "parrot_e2e_request_latency_seconds": ("Completions, from wanted to finished.", _LATENCY_S),
    "parrot_call_dependency_wait_seconds": ("From wanted until all inputs ready.", _SHORT_S),
    "parrot_call_queue_seconds": ("From all inputs ready to the start on an engine.", _SHORT_S),
    "parrot_function_seconds": ("Run of native functions in the sandbox.", _SHORT_S),
}
_TOTALS = {
    "parrot_prefix_shared_tokens": "Prompt tokens whose KV was there already.",
    "parrot_drafted_tokens": "Output tokens that engines drafted, to verify several in a step.",
    "parrot_accepted_tokens": "Of the drafted tokens, those that became output.",
    "parrot_calls_reused": "Completions that took the result of an identical one.",
    "parrot_call_retries": "Further attempts of completions.",
}


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
    """Counts of what happens. Of `tenants` each has its own series, the others one."""

    def __init__(self, tenants: Container[str]) -> None:
        self._tenants = tenants
        self._seconds = {
            name: Histogram(name, text, bounds) for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self._totals = Counter(dict.fromkeys(_TOTALS, 0))
        self._tasks: Counter[tuple[str, ...]] = Counter()  # (kind, state)
        self._breaks: Counter[tuple[str, ...]] = Counter()  # (reason)
        self._tokens: Counter[tuple[str, ...]] = Counter()  # (tenant, direction)

    def prefix_broken(self, reason: str) -> None:
        self._breaks[(reason,)] += 1

    def session_ended(self, seconds: float) -> None:
        self._seconds["parrot_session_e2e_seconds"].observe(seconds)

    def task_finished(self, task: Task, tenant: str) -> None:
        times = task.times
        if not isinstance(task, Completion):
            self._tasks["native", task.state.value] += 1
            if times.started is not None and times.finished is not None:
                taken_s = times.finished - times.started
                self._seconds["parrot_function_seconds"].observe(taken_s)
            return
        self._tasks["semantic", task.state.value] += 1
        stats = task.stats
        self._totals["parrot_calls_reused"] += stats.is_reused
        if times.started is None or times.finished is None:
            return
        if times.activated is not None and times.ready is not None:
            seconds = self._seconds
            queued_s = max(0.0, times.started - times.ready)
            total_s = times.finished - times.activated
            seconds["parrot_call_dependency_wait_seconds"].observe(times.ready - times.activated)
            seconds["parrot_call_queue_seconds"].observe(queued_s)
            seconds["parrot_e2e_request_latency_seconds"].observe(total_s)
        label = tenant if tenant in self._tenants else OTHER_TENANTS
        self._tokens[label, "prompt"] += stats.cached_tokens + stats.computed_tokens
        self._tokens[label, "generation"] += stats.output_tokens
        self._totals["parrot_prefix_shared_tokens"] += stats.cached_tokens
        self._totals["parrot_drafted_tokens"] += stats.drafted_tokens
        self._totals["parrot_accepted_tokens"] += stats.accepted_tokens
        self._totals["parrot_call_retries"] += max(0, stats.attempts - 1)

    def render(self, sessions: Iterable[Session], dispatcher: Dispatcher) -> bytes:
        """All counts, and what is only looked up when scraped: live sessions and engines."""
        return render_metrics(
            [
                *self._families(),
                *_session_families(list(sessions)),
                *_dispatcher_families(dispatcher),
            ]
        )

    def _families(self) -> Iterable[Metric]:
        for histogram in self._seconds.values():
            yield histogram.family()
        yield counter("parrot_calls", "Tasks that ended.", self._tasks, "kind", "state")
        yield counter("parrot_tenant_tokens", "Tokens served.", self._tokens, "tenant", "direction")
        yield counter(
            "parrot_prefix_breaks",
            "Prompts that left their program's prefix.",
            self._breaks,
            "reason",
        )
        for name, total in self._totals.items():
            yield counter(name, _TOTALS[name], {(): total})


def _dispatcher_families(dispatcher: Dispatcher) -> Iterable[Metric]:
    queued = dispatcher.num_queued
    yield GaugeMetricFamily("parrot_num_requests_waiting", "Completions queued.", value=queued)
    yield from _engine_families(dispatcher.fleet.views())
    yield from _kv_families(dispatcher.kv_counts)
    yield counter(
        "parrot_eager_fill_tokens",
        "Prompt tokens computed while their calls waited for inputs, and what became of them.",
        {(outcome,): n for outcome, n in asdict(dispatcher.prefetch_counts).items()},
        "outcome",
    )


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


_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineView], float | None]]] = {
    "parrot_engine_up": ("The engine is live.", lambda e: 1),
    "parrot_engine_heartbeat_age_seconds": ("Since its last sign of life.", lambda e: e.silent_s),
    "parrot_num_requests_running": ("Completions on the engine.", lambda e: e.num_running),
    "parrot_engine_contexts": ("Contexts that ServeCore keeps there.", lambda e: e.num_contexts),
    "parrot_kv_cache_usage_perc": ("Used part of its KV blocks, 0 to 1.", _kv_usage),
}


def _engine_families(engines: Sequence[EngineView]) -> Iterable[Metric]:
    for name, (text, value_of) in _ENGINE_GAUGES.items():
        family = GaugeMetricFamily(name, text, labels=["engine", "model_name"])
        for engine in engines:
            if (value := value_of(engine)) is not None:
                family.add_metric([engine.info.engine_name, engine.info.model], value)
        yield family


def _kv_families(counts: KvCounts) -> Iterable[Metric]:
    hit = "Prompt tokens that a context had."
    yield counter("parrot_kv_hit_tokens", hit, {(): counts.hit})
    recomputed = "Prompt tokens computed again, by what became of the context that had them."
    freed = "Tokens of freed contexts, by the reason."
    for name, text, by_reason in (
        ("parrot_kv_recomputed_tokens", recomputed, counts.recomputed),
        ("parrot_kv_freed_tokens", freed, counts.freed),
    ):
        yield counter(name, text, {(key,): n for key, n in by_reason.items()}, "reason")
