"""Prometheus metrics of an engine's state and of its requests, with vLLM's metric names."""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client.core import Metric

from parrot.protocol.engine_api import (
    GenerateRequest,
    GenerateResponse,
    HostTierInfo,
    RuntimeInfo,
    ServerLoad,
    WindowSlots,
)
from parrot.utils.logs import CALLS, log_call
from parrot.utils.metrics import (
    CONTENT_TYPE,
    FIRST_TOKEN_S,
    LATENCY_S,
    PER_TOKEN_S,
    REUSE_COUNTERS,
    TOKENS,
    Counters,
    Histograms,
    Series,
    counter,
    counters,
    gauge,
    histograms,
    render_metrics,
)
from parrot.utils.traceparent import TraceParent

_MIB = 2**20
_NS = 1e-9
_LABELS = ("engine", "model_name")
_HISTOGRAMS: Histograms = {
    "e2e_request_latency_seconds": ("From the arrival to the end of a request.", LATENCY_S),
    "request_queue_time_seconds": ("From the arrival to the first step.", LATENCY_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", LATENCY_S),
    "request_decode_time_seconds": ("From the first token to the last.", LATENCY_S),
    "time_to_first_token_seconds": ("From the arrival to the first token.", FIRST_TOKEN_S),
    "request_time_per_output_token_seconds": ("Mean time between output tokens.", PER_TOKEN_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", TOKENS),
    "request_generation_tokens": ("Output tokens of a request.", TOKENS),
}
_COUNTERS: Counters = {
    "prompt_tokens": ("Prompt tokens of requests.", ""),
    "generation_tokens": ("Output tokens of requests.", ""),
    **REUSE_COUNTERS,
}
_REASONS: Counters = {
    "request_success": ("Finished requests, by finish reason.", "finished_reason")
}


@dataclass(frozen=True, slots=True)
class Ended:
    """A request that has finished, failed or been aborted."""

    request: GenerateRequest
    began: float  # Unix time.
    seconds: float
    response: GenerateResponse | None
    error: BaseException | None

    @property
    def parent(self) -> TraceParent | None:
        """The parent span."""
        return TraceParent.parse(self.request.traceparent)

    @property
    def error_type(self) -> str | None:
        error = self.error
        return None if error is None else getattr(error, "type", type(error).__name__)

    @property
    def reason(self) -> str:
        """The finish reason, in vLLM's terms."""
        if isinstance(self.error, Exception):
            return "error"
        # A client that disconnects cancels the request. `CancelledError` is no `Exception`.
        return "abort" if self.response is None else self.response.finish_reason.value


@contextmanager
def observe_request(
    request: GenerateRequest, listeners: Sequence[Callable[[Ended], None]]
) -> Iterator[Callable[[GenerateResponse], None]]:
    """Context that serves a request and then passes its `Ended` to the listeners.

    The block calls the yielded function with the response, or raises."""
    began_at, began = time.time(), time.perf_counter()
    response: GenerateResponse | None = None
    ended_at = failure = None

    def answered(given: GenerateResponse) -> None:
        nonlocal response, ended_at
        response, ended_at = given, time.perf_counter()

    try:
        yield answered
    except BaseException as error:
        failure = error
        raise
    finally:
        seconds = (ended_at or time.perf_counter()) - began
        ended = Ended(request, began_at, seconds, response, failure)
        for listener in listeners:
            listener(ended)


def log_ended(ended: Ended) -> None:
    """Log the request if call logging is enabled."""
    if not CALLS.isEnabledFor(logging.INFO):
        return
    parent, facts = ended.parent, {}
    if ended.response is not None:
        usage = ended.response.usage
        facts = {
            "finish_reason": ended.response.finish_reason.value,
            "cached_tokens": usage.cached_tokens,
            "computed_tokens": usage.computed_tokens,
            "output_tokens": usage.output_tokens,
        }
    log_call(
        "request ended",
        session_id=ended.request.session_id,
        call_id=ended.request.task_id,
        trace_id=None if parent is None else parent.trace_id,
        seconds=ended.seconds,
        **facts,
        error=ended.error_type,
    )


class EngineMetrics:
    """Metrics of the requests that generate, and of the engine's state."""

    content_type = CONTENT_TYPE

    def __init__(self, engine_name: str, model: str) -> None:
        self._labels = (engine_name, model)
        self._series = Series(_HISTOGRAMS)

    def count(self, ended: Ended) -> None:
        self._series.count("request_success", 1, ended.reason)
        if ended.response is not None:
            self._answered(ended.response, ended.seconds)

    def _answered(self, response: GenerateResponse, seconds: float) -> None:
        usage, observed, counts = response.usage, self._series.histograms, self._series.counts
        num_prompt = usage.cached_tokens + usage.computed_tokens
        observed["e2e_request_latency_seconds"].observe(seconds)
        observed["request_prompt_tokens"].observe(num_prompt)
        observed["request_generation_tokens"].observe(usage.output_tokens)
        if usage.steps:
            observed["request_queue_time_seconds"].observe(usage.queue_s)
            observed["request_prefill_time_seconds"].observe(usage.prefill_s)
            observed["request_decode_time_seconds"].observe(usage.decode_s)
            observed["time_to_first_token_seconds"].observe(usage.queue_s + usage.prefill_s)
            if (num_more := usage.output_tokens - 1) > 0:
                observed["request_time_per_output_token_seconds"].observe(usage.decode_s / num_more)
        counts["prompt_tokens", ""] += num_prompt
        counts["generation_tokens", ""] += usage.output_tokens
        counts["prefix_cache_queries", ""] += num_prompt
        counts["prefix_cache_hits", ""] += usage.cached_tokens
        counts["spec_decode_num_draft_tokens", ""] += usage.drafted_tokens
        counts["spec_decode_num_accepted_tokens", ""] += usage.accepted_tokens

    def render(self, info: RuntimeInfo) -> bytes:
        return render_metrics(self.families(info))

    def families(self, info: RuntimeInfo) -> Iterator[Metric]:
        gauges = _gauges(info) | ({} if info.host_tier is None else _host_gauges(info.host_tier))
        gauges |= {} if info.window_slots is None else _slot_gauges(info.window_slots)
        gauges |= {} if info.server_load is None else _server_gauges(info.server_load)
        for name, (text, value) in gauges.items():
            yield gauge(f"parrot_engine_{name}", text, {self._labels: value}, *_LABELS)
        steps = {self._labels: info.num_steps or 0}
        yield counter("parrot_engine_steps", "Steps run.", steps, *_LABELS)
        series = {self._labels: self._series}
        yield from counters("parrot_engine", _COUNTERS, series, *_LABELS)
        yield from histograms("parrot_engine", _HISTOGRAMS, series, *_LABELS)
        sources = info.prompt_tokens.model_dump().items()
        yield self._by(
            "prompt_tokens_by_source",
            "Prompt tokens, by where their KV was.",
            "source",
            dict(sources),
        )
        if (host := info.host_tier) is not None:
            copied = {"host": host.stored_bytes, "device": host.returned_bytes}
            text = "KV copied between GPU and CPU memory."
            yield self._by("kv_copied_bytes", text, "to", copied)
            failed = {self._labels: host.failed_transfers}
            yield counter("parrot_engine_kv_copies_failed", "Copies that failed.", failed, *_LABELS)
        yield from counters("parrot_engine", _REASONS, series, *_LABELS)

    def _by(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        series = {(*self._labels, value): count for value, count in counts.items()}
        return counter(f"parrot_engine_{name}", text, series, *_LABELS, label)


def _gauges(info: RuntimeInfo) -> dict[str, tuple[str, float]]:
    num_blocks, num_waiting = info.num_max_blocks, info.num_total_jobs - info.num_running_jobs
    usage = 1 - info.num_free_blocks / num_blocks if num_blocks else 0.0
    return {
        "num_requests_running": ("Admitted requests, which have KV blocks.", info.num_running_jobs),
        "num_requests_waiting": ("Requests that wait for KV blocks.", max(0, num_waiting)),
        "kv_cache_usage_perc": ("Used share of the KV blocks, 0 to 1.", usage),
        "kv_blocks": ("Blocks of the KV pool.", num_blocks),
        "kv_blocks_free": ("Free blocks of the KV pool.", info.num_free_blocks),
        "kv_block_size_tokens": ("Tokens in one block.", info.block_size),
        "cached_tokens": ("Tokens of the blocks in use.", info.num_cached_tokens),
        "cache_bytes": ("Memory of the KV pool.", info.cache_mem * _MIB),
        "model_bytes": ("Memory of the weights.", info.model_mem * _MIB),
        "ranks": ("Processes of the model (tensor parallelism).", info.num_ranks),
        "step_seconds": ("Recent average time of a step.", info.recent_average_latency * _NS),
    }


def _host_gauges(host: HostTierInfo) -> dict[str, tuple[str, float]]:
    return {
        "host_kv_blocks": ("KV blocks that fit in CPU memory.", host.num_max_blocks),
        "host_kv_blocks_free": ("Free KV blocks in CPU memory.", host.num_free_blocks),
    }


def _slot_gauges(slots: WindowSlots) -> dict[str, tuple[str, float]]:
    return {
        "window_slots": ("KV blocks of layers with sliding windows.", slots.num_slots),
        "window_slots_held": ("Such blocks that running requests need.", slots.num_held),
        "window_slots_kept": (
            "Such blocks at points where another request may continue.",
            slots.num_kept,
        ),
    }


def _server_gauges(load: ServerLoad) -> dict[str, tuple[str, float]]:
    return {
        "server_requests_running": ("Requests that the foreign server runs.", load.num_running),
        "server_requests_waiting": ("Requests that wait at the foreign server.", load.num_waiting),
        "server_requests_of_others": (
            "Requests at the foreign server that other clients sent.",
            load.num_others,
        ),
        "server_kv_usage": (
            "Used share of its KV cache, 0 to 1, if it reports it.",
            load.kv_usage or 0.0,
        ),
    }
