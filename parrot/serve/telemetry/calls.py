"""The measures of one completion, and their sums over those of a function, of an application
and of an engine."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Self

from prometheus_client.core import Metric

from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.utils.metrics import (
    FIRST_TOKEN_S,
    LATENCY_S,
    PER_TOKEN_S,
    REUSE_COUNTERS,
    TOKENS,
    Histogram,
    counter,
    histogram,
)

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
    def of(cls, task: Completion, cost: float) -> Self | None:
        """None if it has run nowhere, since it took the result of an identical one or ended before
        its turn came."""
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
            cost=cost,
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
