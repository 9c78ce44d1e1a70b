"""Counters of ServeCore's work and of its cost. An update only changes plain numbers."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import NamedTuple, Self

from prometheus_client.core import Metric

from parrot.serve.command_log import CommandLog
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
from parrot.serve.sessions import Session
from parrot.serve.tenants.table import TenantTable
from parrot.utils.metrics import (
    FIRST_TOKEN_S,
    LATENCY_S,
    OTHER,
    PER_TOKEN_S,
    REUSE_COUNTERS,
    TOKENS,
    Counters,
    Histograms,
    Series,
    SeriesByName,
    counter,
    counters,
    gauge,
    histograms,
    render_metrics,
)

ANY_MODEL = "*"
_PER_PRICE = 1e6  # Prices are per million tokens.
UNNAMED = "unnamed"
_SHORT_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
_COUNTED_AT_ONCE = 64  # Calls that are counted together. Counting them takes less than 1 ms.
_MAX_ENGINES = 256  # Engine names with their own series. Later names are counted as `other`.

# Coarser than the engines' buckets, because there is a series for each function.
_CALL_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300, 960)
_CALL_TOKEN_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1, 5)

_CALL_HISTOGRAMS: Histograms = {
    "e2e_seconds": ("Completions, from activation to the end.", _CALL_S),
    "dependency_wait_seconds": ("From activation until all inputs were ready.", _CALL_S),
    "queue_seconds": ("From all inputs ready to the start on an engine.", _CALL_S),
    "time_to_first_token_seconds": ("From all inputs ready to the first token.", _CALL_S),
    "time_per_output_token_seconds": ("Mean time between output tokens.", _CALL_TOKEN_S),
}
_ENGINE_HISTOGRAMS: Histograms = {
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
_CALL_COUNTERS: Counters = {
    "tokens": (
        "Tokens of completions. `cached`: prompt tokens whose KV was reused. `recomputed`: prompt "
        "tokens that were in a context before, which was evicted or is on another engine.",
        "direction",
    ),
    "retries": ("Further attempts of completions.", ""),
    "evicted_tokens": ("Tokens of evicted contexts of these completions.", ""),
    "cost": ("Price of the tokens, by `prices`.", ""),
}
_ENGINE_COUNTERS: Counters = {
    "prompt_tokens": ("Prompt tokens of completions.", ""),
    "generation_tokens": ("Output tokens of completions.", ""),
    **REUSE_COUNTERS,
    "request_success": (
        "Completions that ended on the engine, by the reason.",
        "finished_reason",
    ),
}
_SESSION_HISTOGRAMS: Histograms = {"e2e_seconds": ("Life of ended sessions.", LATENCY_S)}
_NATIVE_HISTOGRAMS: Histograms = {"seconds": ("Native functions that ran.", _SHORT_S)}
_REASONS = {CompletionState.CANCELLED: "abort", CompletionState.FAILED: "error"}


class EngineTotals(NamedTuple):
    """Sums over the completions of one engine name."""

    prompt: float  # tokens, including cached ones
    cached: float
    generation: float
    first_tokens: tuple[int, ...]  # completions by time to the first token, see `FIRST_TOKEN_S`

    def plus(self, other: Self, sign: int = 1) -> Self:
        counts = zip(self.first_tokens, other.first_tokens, strict=True)
        return type(self)(
            self.prompt + sign * other.prompt,
            self.cached + sign * other.cached,
            self.generation + sign * other.generation,
            tuple(a + sign * b for a, b in counts),
        )

    def since(self, before: Self) -> Self:
        """The difference to earlier totals."""
        return self.plus(before, -1)


NO_TOTALS = EngineTotals(0, 0, 0, (0,) * (len(FIRST_TOKEN_S) + 1))


class CoreMetrics:
    """Counts events. Each tenant with a key in the configuration has its own series, and all other
    tenants share one. The most used functions and applications also have their own series."""

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
        self._functions = SeriesByName(max_names, partial(Series, _CALL_HISTOGRAMS))
        self._apps = SeriesByName(max_names, partial(Series, _CALL_HISTOGRAMS))
        self._natives = SeriesByName(max_names, partial(Series, _NATIVE_HISTOGRAMS))
        self._sessions = SeriesByName(max_names, partial(Series, _SESSION_HISTOGRAMS))
        self._engines: dict[tuple[str, str], Series] = {}
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

    def engine_totals(self) -> dict[str, EngineTotals]:
        """The totals of each engine name."""
        self._count()
        totals: dict[str, EngineTotals] = {}
        for (name, _), series in self._engines.items():
            counts = series.counts
            own = EngineTotals(
                counts["prompt_tokens", ""],
                counts["prefix_cache_hits", ""],
                counts["generation_tokens", ""],
                series.histograms["time_to_first_token_seconds"].counts,
            )
            totals[name] = totals.get(name, NO_TOTALS).plus(own)
        return totals

    def _prefix_broken(self, event: PrefixBroken) -> None:
        self._breaks[(event.reason,)] += 1

    def _session_ended(self, event: SessionEnded) -> None:
        self._sessions.use(app_of(event.session)).observe("e2e_seconds", [event.lasted_s])

    def _task_ended(self, event: TaskEnded) -> None:
        task, session = event.task, event.session
        if not isinstance(task, Completion):
            self._tasks["native", task.state] += 1
            times = task.times
            if times.started is not None and times.finished is not None:
                taken_s = times.finished - times.started
                self._natives.use(given_name(task) or UNNAMED).observe("seconds", [taken_s])
            return
        self._tasks["semantic", task.state] += 1
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
        """Count an evicted context. A context that a tenant's sessions share has no application."""
        owner = event.owner
        session = self._find_session(owner) if isinstance(owner, int) else None
        app = OTHER if session is None else app_of(session)
        for series in (self._functions.use(event.function or UNNAMED, 0), self._apps.use(app, 0)):
            series.count("evicted_tokens", event.num_tokens)

    def _count(self) -> None:
        """Count the collected calls. Counting them together takes half of the time, because most
        have the same functions and engines."""
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
            _count_calls(self._functions.use(function, len(calls)), calls)
        for app, calls in apps.items():
            _count_calls(self._apps.use(app, len(calls)), calls)
        for engine, calls in engines.items():
            _count_engine_calls(self._engine(engine), calls)

    def _engine(self, key: tuple[str, str]) -> Series:
        if (series := self._engines.get(key)) is not None:
            return series
        if len(self._engines) >= _MAX_ENGINES:
            key = (OTHER, OTHER)
        return self._engines.setdefault(key, Series(_ENGINE_HISTOGRAMS))

    def render(
        self, sessions: Iterable[Session], dispatcher: Dispatcher, journal: CommandLog | None
    ) -> Iterator[bytes]:
        """Yield all metric families, also those of the current sessions and engines."""
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
        labels = ("engine", "model_name")
        yield from histograms("parrot", _ENGINE_HISTOGRAMS, self._engines, *labels)
        yield from counters("parrot", _ENGINE_COUNTERS, self._engines, *labels)
        for prefix, label, named in (
            ("parrot_call", "function", self._functions),
            ("parrot_app_call", "app", self._apps),
        ):
            series = {(name,): one for name, one in named.items()}
            yield from histograms(prefix, _CALL_HISTOGRAMS, series, label)
            yield from counters(prefix, _CALL_COUNTERS, series, label)
        sessions = {(name,): one for name, one in self._sessions.items()}
        yield from histograms("parrot_session", _SESSION_HISTOGRAMS, sessions, "app")
        natives = {(name,): one for name, one in self._natives.items()}
        yield from histograms("parrot_function", _NATIVE_HISTOGRAMS, natives, "function")
        yield counter("parrot_calls", "Tasks that ended.", self._tasks, "kind", "state")
        reused = {(): self._num_reused}
        yield counter("parrot_calls_reused", "Completions that took another's result.", reused)
        yield from self.accounts.families()
        breaks = "Prompts that do not start with their program's previous prompt."
        yield counter("parrot_prefix_breaks", breaks, self._breaks, "reason")


def app_of(session: Session) -> str:
    """The application's name: the first of the session's names."""
    return session.apps[0] if session.apps else UNNAMED


def _journal_family(journal: CommandLog | None) -> Metric:
    text = "1 while the journal cannot be written; changes are rejected with 507."
    is_failing = journal is not None and bool(journal.shortage)
    return gauge("parrot_journal_unwritable", text, {(): is_failing})


def _dispatcher_families(dispatcher: Dispatcher) -> Iterable[Metric]:
    queued = dispatcher.num_queued
    yield gauge("parrot_num_requests_waiting", "Completions queued.", {(): queued})
    yield from _engine_families(dispatcher.fleet.views())
    yield from _kv_families(dispatcher.kv_stats.total)
    yield counter(
        "parrot_eager_fill_tokens",
        "Prompt tokens computed while their calls waited for inputs, by outcome.",
        {(outcome,): n for outcome, n in asdict(dispatcher.prefetch_counts).items()},
        "outcome",
    )


def _session_families(sessions: Sequence[Session]) -> Iterable[Metric]:
    yield gauge("parrot_sessions", "Live sessions.", {(): len(sessions)})
    counts = {
        (state.value,): sum(session.graph.num_variables(state) for session in sessions)
        for state in VariableState
    }
    yield gauge("parrot_variables", "Variables of live sessions.", counts, "state")


def _kv_usage(engine: EngineView) -> float | None:
    runtime = engine.runtime
    if runtime is None or not runtime.num_max_blocks:
        return None
    return 1 - runtime.num_free_blocks / runtime.num_max_blocks


_ENGINE_GAUGES: dict[str, tuple[str, Callable[[EngineView], float | None]]] = {
    "parrot_engine_up": ("The engine is live.", lambda e: 1),
    "parrot_engine_heartbeat_age_seconds": ("Since its last heartbeat.", lambda e: e.silent_s),
    "parrot_num_requests_running": ("Completions on the engine.", lambda e: e.num_running),
    "parrot_engine_contexts": ("Contexts on the engine.", lambda e: e.num_contexts),
    "parrot_kv_cache_usage_perc": ("Used share of the KV blocks, 0 to 1.", _kv_usage),
}


def _engine_families(engines: Sequence[EngineView]) -> Iterable[Metric]:
    for name, (text, value_of) in _ENGINE_GAUGES.items():
        known = {(e.info.engine_name, e.info.model): value_of(e) for e in engines}
        told = {labels: value for labels, value in known.items() if value is not None}
        yield gauge(name, text, told, "engine", "model_name")


def _kv_families(counts: KvCounts) -> Iterable[Metric]:
    hit = "Prompt tokens that were found in a context."
    yield counter("parrot_kv_hit_tokens", hit, {(): counts.hit})
    recomputed = "Prompt tokens that were computed again, by the reason why their context was lost."
    freed = "Tokens of freed contexts, by the reason."
    for name, text, by_reason in (
        ("parrot_kv_recomputed_tokens", recomputed, counts.recomputed),
        ("parrot_kv_freed_tokens", freed, counts.freed),
    ):
        yield counter(name, text, {(key,): n for key, n in by_reason.items()}, "reason")


class Measured(NamedTuple):
    """A completion that has run. Times are in seconds; None: not measured."""

    wait_s: float  # from activated until all inputs were ready
    queue_s: float  # from then until the start on an engine
    run_s: float
    first_s: float | None  # from the start to the first token
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
        """None if the completion has not run: it took an identical completion's result, or ended
        in the queue. Without `prices` the cost is 0."""
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
        reason = "stop" if stats.finish_reason is None else stats.finish_reason
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

    @property
    def to_first_token_s(self) -> float | None:
        return None if self.first_s is None else self.queue_s + self.first_s


def _count_calls(series: Series, calls: Sequence[Measured]) -> None:
    """Count completions of one function or application."""
    series.observe("e2e_seconds", [c.wait_s + c.queue_s + c.run_s for c in calls])
    series.observe("dependency_wait_seconds", [c.wait_s for c in calls])
    series.observe("queue_seconds", [c.queue_s for c in calls])
    series.observe("time_to_first_token_seconds", [c.to_first_token_s for c in calls])
    series.observe("time_per_output_token_seconds", [c.per_token_s for c in calls])
    series.count("tokens", sum([c.num_prompt for c in calls]), "prompt")
    series.count("tokens", sum([c.num_cached for c in calls]), "cached")
    series.count("tokens", sum([c.num_recomputed for c in calls]), "recomputed")
    series.count("tokens", sum([c.num_output for c in calls]), "generation")
    series.count("retries", sum([c.num_retries for c in calls]))
    series.count("cost", sum([c.cost for c in calls]))


def _count_engine_calls(series: Series, calls: Sequence[Measured]) -> None:
    """Count completions that one engine ran."""
    prompts, outputs = [c.num_prompt for c in calls], [c.num_output for c in calls]
    series.observe("e2e_request_latency_seconds", [c.queue_s + c.run_s for c in calls])
    series.observe("request_queue_time_seconds", [c.queue_s for c in calls])
    series.observe("request_prefill_time_seconds", [c.first_s for c in calls])
    series.observe("request_decode_time_seconds", [c.decode_s for c in calls])
    series.observe("request_inference_time_seconds", [c.run_s for c in calls])
    series.observe("time_to_first_token_seconds", [c.to_first_token_s for c in calls])
    series.observe("request_time_per_output_token_seconds", [c.per_token_s for c in calls])
    series.observe("request_prompt_tokens", prompts)
    series.observe("request_generation_tokens", outputs)
    series.count("prompt_tokens", sum(prompts))
    series.count("generation_tokens", sum(outputs))
    series.count("prefix_cache_queries", sum(prompts))
    series.count("prefix_cache_hits", sum([c.num_cached for c in calls]))
    series.count("spec_decode_num_draft_tokens", sum([c.num_drafted for c in calls]))
    series.count("spec_decode_num_accepted_tokens", sum([c.num_accepted for c in calls]))
    for call in calls:
        series.count("request_success", 1, call.reason)


class PriceTable:
    """Prices by model. The prices of `*` apply to all other models."""

    def __init__(self, prices: Mapping[str, TokenPrices]) -> None:
        self._prices = prices

    def cost(self, stats: RunStats) -> float:
        """The cost in the prices' currency. It is 0 for a reused result, and for a model without a
        price."""
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
    """The completions of a tenant's function, and their tokens."""

    calls: int = 0
    prompt: int = 0  # including cached tokens
    cached: int = 0
    generation: int = 0
    cost: float = 0.0  # in the prices' currency
    service_s: float = 0.0  # engine time, from the tokens' cost

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
    """The usage of each tenant, by function. The least used functions of a tenant are counted
    together as `other`."""

    def __init__(self, max_names: int) -> None:
        self._max_names = max_names
        self._usage: dict[str, SeriesByName[TenantUsage]] = {}

    def count(self, tenant: str, function: str, call: Measured) -> None:
        if (functions := self._usage.get(tenant)) is None:
            functions = self._usage[tenant] = SeriesByName(self._max_names, TenantUsage)
        functions.use(function).count(call)

    def __iter__(self) -> Iterator[tuple[str, str, TenantUsage]]:
        """Yield each tenant, function and usage."""
        for tenant, functions in self._usage.items():
            for function, usage in functions.items():
                yield tenant, function, usage

    def families(self) -> Iterator[Metric]:
        tenants: defaultdict[str, TenantUsage] = defaultdict(TenantUsage)
        for tenant, _, usage in self:
            tenants[tenant].add(usage)
        directions = ("prompt", "cached", "generation")
        tokens = {(t, name): getattr(u, name) for t, u in tenants.items() for name in directions}
        text = "Tokens of completions. `cached` tokens are part of `prompt`."
        yield counter("parrot_tenant_tokens", text, tokens, "tenant", "direction")
        costs = {(tenant,): usage.cost for tenant, usage in tenants.items()}
        yield counter("parrot_tenant_cost", "Price of the tokens, by `prices`.", costs, "tenant")
        service = {(tenant,): usage.service_s for tenant, usage in tenants.items()}
        text = "Engine time of completions, from the cost of their tokens. Fair sharing uses it."
        yield counter("parrot_tenant_service_seconds", text, service, "tenant")
