"""Counts of what ServeCore does. Cheap to update: plain numbers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict

from prometheus_client.core import GaugeMetricFamily, Metric

from parrot.serve.config import CoreConfig
from parrot.serve.contexts.index import Context
from parrot.serve.contexts.kv_log import KvCounts
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import Completion, Task, given_name
from parrot.serve.graph.variable import VariableState
from parrot.serve.sessions import CommandLog, Session
from parrot.serve.telemetry.by_name import OTHER, SeriesByName
from parrot.serve.telemetry.calls import (
    CallSeries,
    EngineSeries,
    Measured,
    call_families,
    engine_call_families,
)
from parrot.serve.telemetry.costs import Accounts, PriceTable
from parrot.serve.tenants.table import TenantTable
from parrot.utils.metrics import LATENCY_S, Histogram, counter, histogram, render_metrics

UNNAMED = "unnamed"

_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTED_AT_ONCE = 64  # calls: less than a millisecond
_MAX_ENGINES = 256  # names with series of their own: engines that restart elsewhere get new ones


class _Runs:
    """Durations of native functions, or of sessions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.seconds = Histogram(bounds)

    def add(self, other: "_Runs") -> None:
        self.seconds.add(other.seconds)


class CoreMetrics:
    """Counts of what happens. Each tenant that has a key of the config has its own series, the
    others one; so have the functions and applications that are used most."""

    def __init__(self, config: CoreConfig) -> None:
        max_names = config.max_metric_names
        self.prices = PriceTable(config.prices)
        self.tenants = TenantTable(config)
        self.accounts = Accounts(self.tenants, max_names)
        self._functions = SeriesByName(max_names, CallSeries)
        self._apps = SeriesByName(max_names, CallSeries)
        self._natives = SeriesByName(max_names, lambda: _Runs(_SHORT_S))
        self._sessions = SeriesByName(max_names, lambda: _Runs(LATENCY_S))
        self._engines: dict[tuple[str, str], EngineSeries] = {}
        self._uncounted: list[tuple[str, str, tuple[str, str], Measured]] = []
        """(function, application, engine and model, measures)"""
        self._num_reused = 0
        self._tasks: Counter[tuple[str, ...]] = Counter()  # (kind, state)
        self._breaks: Counter[tuple[str, ...]] = Counter()  # (reason)

    def prefix_broken(self, reason: str) -> None:
        self._breaks[(reason,)] += 1

    def session_ended(self, session: Session, seconds: float) -> None:
        self._sessions.use(app_of(session)).seconds.observe(seconds)

    def task_finished(self, task: Task, session: Session) -> None:
        if not isinstance(task, Completion):
            self._tasks["native", task.state.value] += 1
            times = task.times
            if times.started is not None and times.finished is not None:
                taken_s = times.finished - times.started
                self._natives.use(given_name(task) or UNNAMED).seconds.observe(taken_s)
            return
        self._tasks["semantic", task.state.value] += 1
        self._num_reused += task.stats.is_reused
        call = Measured.of(task, self.prices.cost(task.stats))
        if call is None:
            return
        function, stats = given_name(task) or UNNAMED, task.stats
        self.accounts.count(session.tenant, function, call)
        engine = (stats.engine_name or OTHER, stats.model or OTHER)
        self._uncounted.append((function, app_of(session), engine, call))
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            self._count()

    def evicted(self, context: Context, num_tokens: int, session: Session | None) -> None:
        """`session`: whose it was; None: it was kept for a whole tenant."""
        app = OTHER if session is None else app_of(session)
        self._functions.use(context.function or UNNAMED, 0).num_evicted += num_tokens
        self._apps.use(app, 0).num_evicted += num_tokens

    def _count(self) -> None:
        """Many at once take half of the time: most are of few functions and engines."""
        uncounted, self._uncounted = self._uncounted, []
        functions, apps = (
            defaultdict[str, list[Measured]](list),
            defaultdict[str, list[Measured]](list),
        )
        engines = defaultdict[tuple[str, str], list[Measured]](list)
        for function, app, engine, call in uncounted:
            functions[function].append(call)
            apps[app].append(call)
            engines[engine].append(call)
        for function, calls in functions.items():
            self._functions.use(function, len(calls)).count(calls)
        for app, calls in apps.items():
            self._apps.use(app, len(calls)).count(calls)
        for engine, calls in engines.items():
            self._engine(engine).count(calls)

    def _engine(self, key: tuple[str, str]) -> EngineSeries:
        if (series := self._engines.get(key)) is not None:
            return series
        if len(self._engines) >= _MAX_ENGINES:
            key = (OTHER, OTHER)
        return self._engines.setdefault(key, EngineSeries())

    def render(
        self, sessions: Iterable[Session], dispatcher: Dispatcher, journal: CommandLog | None
    ) -> Iterator[bytes]:
        """Yield all counts, and what is only looked up now: live sessions and engines."""
        for family in self.families(sessions, dispatcher, journal):
            yield render_metrics([family])

    def families(
        self, sessions: Iterable[Session], dispatcher: Dispatcher, journal: CommandLog | None = None
    ) -> Iterator[Metric]:
        yield from self._own_families()
        yield from _session_families(list(sessions))
        yield from _dispatcher_families(dispatcher)
        yield _journal_family(journal)

    def _own_families(self) -> Iterator[Metric]:
        self._count()
        yield from engine_call_families(self._engines)
        yield from call_families("parrot_call", "function", self._functions.items())
        yield from call_families("parrot_app_call", "app", self._apps.items())
        for name, text, label, runs in (
            ("parrot_session_e2e_seconds", "Life of ended sessions.", "app", self._sessions),
            ("parrot_function_seconds", "Native functions that ran.", "function", self._natives),
        ):
            yield histogram(name, text, {(key,): r.seconds for key, r in runs.items()}, label)
        yield counter("parrot_calls", "Tasks that ended.", self._tasks, "kind", "state")
        reused = {(): self._num_reused}
        yield counter("parrot_calls_reused", "Completions that took another's result.", reused)
        yield from self.accounts.families()
        breaks = "Prompts that left their program's prefix."
        yield counter("parrot_prefix_breaks", breaks, self._breaks, "reason")


def app_of(session: Session) -> str:
    """The application's name: the first that the program gave."""
    return session.apps[0] if session.apps else UNNAMED


def _journal_family(journal: CommandLog | None) -> Metric:
    text = "1 while the journal cannot be written, and what would be is refused with 507."
    is_failing = journal is not None and bool(journal.trouble)
    return GaugeMetricFamily("parrot_journal_unwritable", text, value=is_failing)


def _dispatcher_families(dispatcher: Dispatcher) -> Iterable[Metric]:
    queued = dispatcher.num_queued
    yield GaugeMetricFamily("parrot_num_requests_waiting", "Completions queued.", value=queued)
    yield from _engine_families(dispatcher.fleet.views())
    yield from _kv_families(dispatcher.kv_log.total)
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
