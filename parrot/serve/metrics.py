"""Counts of what ServeCore does, and the costs of it. Cheap to update: plain numbers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Generic, NamedTuple, Protocol, Self, TypeVar

from prometheus_client.core import GaugeMetricFamily, Metric

from parrot.serve.config import CoreConfig, TokenPrices
from parrot.serve.contexts.ledger import KvCounts
from parrot.serve.events import ContextEvicted, PrefixBroken, SessionEnded, Sink, TaskEnded
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.execution.fleet import EngineView
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    RunStats,
    VariableState,
    given_name,
)
from parrot.serve.sessions import CommandLog, Session
from parrot.serve.tenants.table import TenantTable
from parrot.utils.metrics import (
    FIRST_TOKEN_S,
    LATENCY_S,
    PER_TOKEN_S,
    REUSE_COUNTERS,
    TOKENS,
    Histogram,
    counter,
    histogram,
    render_metrics,
)

ANY_MODEL = "*"
_PER_PRICE = 1e6  # prices are those of a million tokens
OTHER = "other"
_MAX_CANDIDATES = 1024
UNNAMED = "unnamed"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTED_AT_ONCE = 64  # calls: less than a millisecond
_MAX_ENGINES = 256  # names with series of their own: engines that restart elsewhere get new ones

# Coarser than those of engines, since there are many series.
_CALL_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 960)
_CALL_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 5)

_CALL_HISTOGRAMS = {
    "e2e_seconds": ("Completions, from wanted to finished.", _CALL_S),
    "dependency_wait_seconds": ("From wanted until all inputs were ready.", _CALL_S),
    "queue_seconds": ("From all inputs ready to the start on an engine.", _CALL_S),
    "time_to_first_token_seconds": ("From all inputs ready to the first token.", _CALL_S),
    "time_per_output_token_seconds": ("Mean time between output tokens.", _CALL_TOKEN_S),
}
_ENGINE_HISTOGRAMS = {
    "e2e_request_latency_seconds": ("From all inputs ready to the end.", LATENCY_S),
    "request_queue_time_seconds": ("From all inputs ready to the start.", LATENCY_S),
    "request_prefill_time_seconds": ("From the start to the first token.", LATENCY_S),
    "request_decode_time_seconds": ("From the first token to the last.", LATENCY_S),
    "request_inference_time_seconds": ("From the start to the end.", LATENCY_S),
    "time_to_first_token_seconds": ("From all inputs ready to the first token.", FIRST_TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time between output tokens.", PER_TOKEN_S),
    "request_prompt_tokens": ("Prompt tokens of a completion.", TOKENS),
    "request_generation_tokens": ("Output tokens of a completion.", TOKENS),
}
_ENGINE_COUNTERS = {
    "prompt_tokens": "Prompt tokens of completions.",
    "generation_tokens": "Output tokens of completions.",
    **REUSE_COUNTERS,
}
_REASONS = {CompletionState.CANCELLED: "abort", CompletionState.FAILED: "error"}


class _Runs:
    """Durations of native functions, or of sessions."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.seconds = Histogram(bounds)

    def add(self, other: "_Runs") -> None:
        self.seconds.add(other.seconds)


class CoreMetrics:
    """Counts of what happens. Each tenant that has a key of the config has its own series, the
    others one; so have the functions and applications that are used most."""

    def __init__(
        self,
        config: CoreConfig,
        tenants: TenantTable,
        find_session: Callable[[int], Session | None],
    ) -> None:
        max_names = config.max_metric_names
        self.prices = PriceTable(config.prices) if config.prices else None
        self._find_session = find_session
        self._tenants = tenants
        self._accounts = Accounts(max_names)
        self._functions = SeriesByName(max_names, CallSeries)
        self._apps = SeriesByName(max_names, CallSeries)
        self._natives = SeriesByName(max_names, lambda: _Runs(_SHORT_S))
        self._sessions = SeriesByName(max_names, lambda: _Runs(LATENCY_S))
        self._engines: dict[tuple[str, str], EngineSeries] = {}
        self._uncounted: list[tuple[str, str, str, tuple[str, str], Measured]] = []
        """(tenant, function, application, engine and model, measures)"""
        self._num_reused = 0
        self._tasks: Counter[tuple[str, ...]] = Counter()  # (kind, state)
        self._breaks: Counter[tuple[str, ...]] = Counter()  # (reason)

    @property
    def sink(self) -> Sink:
        return {
            ContextEvicted: self._evicted,
            PrefixBroken: self._prefix_broken,
            SessionEnded: self._session_ended,
            TaskEnded: self._task_ended,
        }

    @property
    def accounts(self) -> "Accounts":
        self._count()
        return self._accounts

    def _prefix_broken(self, event: PrefixBroken) -> None:
        self._breaks[(event.reason,)] += 1

    def _session_ended(self, event: SessionEnded) -> None:
        self._sessions.use(app_of(event.session)).seconds.observe(event.lasted_s)

    def _task_ended(self, event: TaskEnded) -> None:
        task, session = event.task, event.session
        if not isinstance(task, Completion):
            self._tasks["native", task.state.value] += 1
            times = task.times
            if times.started is not None and times.finished is not None:
                taken_s = times.finished - times.started
                self._natives.use(given_name(task) or UNNAMED).seconds.observe(taken_s)
            return
        self._tasks["semantic", task.state.value] += 1
        self._num_reused += task.stats.is_reused
        call = Measured.of(task, self.prices)
        if call is None:
            return
        function, stats = given_name(task) or UNNAMED, task.stats
        tenant = session.tenant if self._tenants.is_named(session.tenant) else OTHER
        engine = (stats.engine_name or OTHER, stats.model or OTHER)
        self._uncounted.append((tenant, function, app_of(session), engine, call))
        if len(self._uncounted) >= _COUNTED_AT_ONCE:
            self._count()

    def _evicted(self, event: ContextEvicted) -> None:
        """A context that was kept for a whole tenant is no application's."""
        owner = event.owner
        session = self._find_session(owner) if isinstance(owner, int) else None
        app = OTHER if session is None else app_of(session)
        self._functions.use(event.function or UNNAMED, 0).num_evicted += event.num_tokens
        self._apps.use(app, 0).num_evicted += event.num_tokens

    def _count(self) -> None:
        """Many at once take half of the time: most are of few functions and engines."""
        uncounted, self._uncounted = self._uncounted, []
        functions, apps = (
            defaultdict[str, list[Measured]](list),
            defaultdict[str, list[Measured]](list),
        )
        engines = defaultdict[tuple[str, str], list[Measured]](list)
        for tenant, function, app, engine, call in uncounted:
            self._accounts.count(tenant, function, call)
            functions[function].append(call)
            apps[app].append(call)
            engines[engine].append(call)
        for function, calls in functions.items():
            self._functions.use(function, len(calls)).count(calls)
        for app, calls in apps.items():
            self._apps.use(app, len(calls)).count(calls)
        for engine, calls in engines.items():
            self._engine(engine).count(calls)

    def _engine(self, key: tuple[str, str]) -> "EngineSeries":
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


class Measured(NamedTuple):
    """A completion that has run: seconds, None where nothing was measured. `wait_s`: from wanted
    until all inputs were ready; `first_s`: from the start to the first token."""

    wait_s: float
    queue_s: float
    run_s: float
    first_s: float | None
    decode_s: float | None
    per_token_s: float | None
    num_cached: int
    num_computed: int
    num_recomputed: int
    num_output: int
    num_drafted: int
    num_accepted: int
    num_retries: int
    cost: float
    service_s: float
    reason: str

    @classmethod
    def of(cls, task: Completion, prices: "PriceTable | None") -> Self | None:
        """None if it has run nowhere, since it took the result of an identical one or ended before
        its turn came. Without `prices` the cost is 0."""
        times, stats = task.times, task.stats
        if stats.is_reused or times.started is None or times.finished is None:
            return None
        if times.activated is None or times.ready is None:
            return None
        run_s = max(0.0, times.finished - times.started)
        decode_s = None if stats.decode_s is None else min(stats.decode_s, run_s)
        per_token_s = None
        if decode_s is not None and stats.output_tokens > 1:
            per_token_s = decode_s / (stats.output_tokens - 1)
        reason = "stop" if stats.finish_reason is None else stats.finish_reason.value
        return cls(
            wait_s=max(0.0, times.ready - times.activated),
            queue_s=max(0.0, times.started - times.ready),
            run_s=run_s,
            first_s=None if decode_s is None else run_s - decode_s,
            decode_s=decode_s,
            per_token_s=per_token_s,
            num_cached=stats.cached_tokens,
            num_computed=stats.computed_tokens,
            num_recomputed=stats.recomputed_tokens,
            num_output=stats.output_tokens,
            num_drafted=stats.drafted_tokens,
            num_accepted=stats.accepted_tokens,
            num_retries=max(0, stats.attempts - 1),
            cost=0.0 if prices is None else prices.cost(stats),
            service_s=stats.service_s,
            reason=_REASONS.get(task.state, reason),
        )

    @property
    def num_prompt(self) -> int:
        return self.num_cached + self.num_computed


class CallSeries:
    """The completions of one function or application."""

    def __init__(self) -> None:
        self.seconds = {name: Histogram(about[1]) for name, about in _CALL_HISTOGRAMS.items()}
        self.tokens: Counter[str] = Counter()
        self.num_retries = 0
        self.num_evicted = 0  # tokens
        self.cost = 0.0

    def count(self, calls: Sequence[Measured]) -> None:
        seconds, tokens = self.seconds, self.tokens
        seconds["e2e_seconds"].observe(*[c.wait_s + c.queue_s + c.run_s for c in calls])
        seconds["dependency_wait_seconds"].observe(*[c.wait_s for c in calls])
        seconds["queue_seconds"].observe(*[c.queue_s for c in calls])
        seconds["time_to_first_token_seconds"].observe(*_to_first_tokens(calls))
        seconds["time_per_output_token_seconds"].observe(*_present([c.per_token_s for c in calls]))
        tokens["prompt"] += sum([c.num_prompt for c in calls])
        tokens["cached"] += sum([c.num_cached for c in calls])
        tokens["recomputed"] += sum([c.num_recomputed for c in calls])
        tokens["generation"] += sum([c.num_output for c in calls])
        self.num_retries += sum([c.num_retries for c in calls])
        self.cost += sum([c.cost for c in calls])

    def add(self, other: "CallSeries") -> None:
        for name, one in self.seconds.items():
            one.add(other.seconds[name])
        self.tokens.update(other.tokens)
        self.num_retries += other.num_retries
        self.num_evicted += other.num_evicted
        self.cost += other.cost


def call_families(
    prefix: str, label: str, items: Iterable[tuple[str, CallSeries]]
) -> Iterator[Metric]:
    """The families of the completions with each value of `label`."""
    series = dict(items)
    for name, (text, _) in _CALL_HISTOGRAMS.items():
        own = {(key,): one.seconds[name] for key, one in series.items()}
        yield histogram(f"{prefix}_{name}", text, own, label)
    yield counter(
        f"{prefix}_tokens",
        "Tokens of completions; of the prompts', `cached` are those whose KV was there, and "
        "`recomputed` those that some context had that was evicted or is elsewhere.",
        {(key, kind): n for key, one in series.items() for kind, n in one.tokens.items()},
        *(label, "direction"),
    )
    retries = {(key,): one.num_retries for key, one in series.items()}
    yield counter(f"{prefix}_retries", "Further attempts of completions.", retries, label)
    evicted = {(key,): one.num_evicted for key, one in series.items()}
    text = "Tokens of their contexts that were freed for want of room."
    yield counter(f"{prefix}_evicted_tokens", text, evicted, label)
    costs = {(key,): one.cost for key, one in series.items()}
    yield counter(f"{prefix}_cost", "Price of the tokens, by `prices`.", costs, label)


class EngineSeries:
    """The completions that one engine ran, under the field's names."""

    def __init__(self) -> None:
        self.seconds = {name: Histogram(about[1]) for name, about in _ENGINE_HISTOGRAMS.items()}
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()

    def count(self, calls: Sequence[Measured]) -> None:
        seconds, counts = self.seconds, self.counts
        prompts, outputs = [c.num_prompt for c in calls], [c.num_output for c in calls]
        runs_s = [c.run_s for c in calls]
        seconds["e2e_request_latency_seconds"].observe(*[c.queue_s + c.run_s for c in calls])
        seconds["request_queue_time_seconds"].observe(*[c.queue_s for c in calls])
        seconds["request_prefill_time_seconds"].observe(*_present([c.first_s for c in calls]))
        seconds["request_decode_time_seconds"].observe(*_present([c.decode_s for c in calls]))
        seconds["request_inference_time_seconds"].observe(*runs_s)
        seconds["time_to_first_token_seconds"].observe(*_to_first_tokens(calls))
        per_token_s = _present([c.per_token_s for c in calls])
        seconds["request_time_per_output_token_seconds"].observe(*per_token_s)
        seconds["request_prompt_tokens"].observe(*prompts)
        seconds["request_generation_tokens"].observe(*outputs)
        counts["prompt_tokens"] += sum(prompts)
        counts["generation_tokens"] += sum(outputs)
        counts["prefix_cache_queries"] += sum(prompts)
        counts["prefix_cache_hits"] += sum([c.num_cached for c in calls])
        counts["spec_decode_num_draft_tokens"] += sum([c.num_drafted for c in calls])
        counts["spec_decode_num_accepted_tokens"] += sum([c.num_accepted for c in calls])
        self.reasons.update([c.reason for c in calls])


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _to_first_tokens(calls: Iterable[Measured]) -> list[float]:
    return [c.queue_s + c.first_s for c in calls if c.first_s is not None]


def engine_call_families(series: Mapping[tuple[str, str], EngineSeries]) -> Iterator[Metric]:
    """`series`: by the names of the engine and of its model."""
    labels = ("engine", "model_name")
    for name, (text, _) in _ENGINE_HISTOGRAMS.items():
        own = {key: one.seconds[name] for key, one in series.items()}
        yield histogram(f"parrot_{name}", text, own, *labels)
    for name, text in _ENGINE_COUNTERS.items():
        counts = {key: one.counts[name] for key, one in series.items()}
        yield counter(f"parrot_{name}", text, counts, *labels)
    yield counter(
        "parrot_request_success",
        "Completions that ended on the engine, by the reason.",
        {(*key, reason): n for key, one in series.items() for reason, n in one.reasons.items()},
        *(*labels, "finished_reason"),
    )


class PriceTable:
    """Prices by model; those of `*` are for every model that is not named."""

    def __init__(self, prices: Mapping[str, TokenPrices]) -> None:
        self._prices = prices

    def cost(self, stats: RunStats) -> float:
        """In the prices' currency. Zero for a result that an identical call made, and for a model
        without a price."""
        prices = self._prices.get(stats.model or "") or self._prices.get(ANY_MODEL)
        if prices is None or stats.is_reused:
            return 0.0
        return (
            prices.input * stats.computed_tokens
            + prices.cached * stats.cached_tokens
            + prices.output * stats.output_tokens
        ) / _PER_PRICE


@dataclass(slots=True)
class TenantUsage:
    """The completions that ran, and their tokens; those of prompts that were there are in `cached`
    and in `prompt`. `cost`: in the prices' currency. `service_s`: of engines' time."""

    calls: int = 0
    prompt: int = 0
    cached: int = 0
    generation: int = 0
    cost: float = 0.0
    service_s: float = 0.0

    def count(self, call: Measured) -> None:
        self.calls += 1
        self.prompt += call.num_prompt
        self.cached += call.num_cached
        self.generation += call.num_output
        self.cost += call.cost
        self.service_s += call.service_s

    def add(self, other: "TenantUsage") -> None:
        self.calls += other.calls
        self.prompt += other.prompt
        self.cached += other.cached
        self.generation += other.generation
        self.cost += other.cost
        self.service_s += other.service_s


class Accounts:
    """The use of each tenant, by function. The functions of a tenant that are used least are
    counted as one, `other`."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._usage: dict[str, SeriesByName[TenantUsage]] = {}

    def count(self, tenant: str, function: str, call: Measured) -> None:
        if (functions := self._usage.get(tenant)) is None:
            functions = self._usage[tenant] = SeriesByName(self._max_names, TenantUsage)
        functions.use(function).count(call)

    def __iter__(self) -> Iterator[tuple[str, str, TenantUsage]]:
        """Yield tenants and their functions."""
        for tenant, functions in self._usage.items():
            for function, usage in functions.items():
                yield tenant, function, usage

    def families(self) -> Iterator[Metric]:
        tenants: defaultdict[str, TenantUsage] = defaultdict(TenantUsage)
        for tenant, _, usage in self:
            tenants[tenant].add(usage)
        directions = ("prompt", "cached", "generation")
        tokens = {(t, name): getattr(u, name) for t, u in tenants.items() for name in directions}
        text = "Tokens of completions; `cached` are of the prompts'."
        yield counter("parrot_tenant_tokens", text, tokens, "tenant", "direction")
        costs = {(tenant,): usage.cost for tenant, usage in tenants.items()}
        yield counter("parrot_tenant_cost", "Price of the tokens, by `prices`.", costs, "tenant")
        service = {(tenant,): usage.service_s for tenant, usage in tenants.items()}
        text = "Engines' time that completions had, by what their tokens cost: what is shared."
        yield counter("parrot_tenant_service_seconds", text, service, "tenant")


class Series(Protocol):
    def add(self, other: Self) -> None:
        """Take over the counts of another."""
        ...


S = TypeVar("S", bound=Series)


class SeriesByName(Generic[S]):
    """At most `limit` names have series of their own, and `other` has the rest.

    A name that is used more than twice as much as the least used of those takes its place. What was
    counted stays counted: the series of a displaced name is added to `other`, and that of a new one
    begins with nothing, so no counter ever falls."""

    def __init__(self, limit: int, make: Callable[[], S]) -> None:
        self._limit = limit
        self._make = make
        self._own: dict[str, S] = {}
        self._uses: Counter[str] = Counter()  # of names that have their own
        self._candidates: Counter[str] = Counter()  # of others: no less than uses minus the cut
        self._other: S | None = None

    def use(self, name: str, times: int = 1) -> S:
        """The series in which so many uses of this name are counted."""
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
        """Count in bounded memory: too many names take one use from each other (Misra-Gries)."""
        self._candidates[name] += times
        if len(self._candidates) > _MAX_CANDIDATES:
            self._candidates = Counter({n: c - 1 for n, c in self._candidates.items() if c > 1})
        return self._candidates[name]
