"""Exports an engine's part of a trace: one span per request that generates."""

import os
import time
from typing import Self

from parrot.engine.config import EngineConfig
from parrot.engine.metrics import Ended
from parrot.utils.spans import SpanExport, TraceSampler, Value, sampler_of
from parrot.utils.traceparent import TraceParent, span_id_of


class EngineTracer:
    """Exports a span for each request with a `traceparent`. Spans contain no prompts or outputs."""

    def __init__(
        self, export: SpanExport, engine_name: str, model: str, sampler: TraceSampler
    ) -> None:
        self._export = export
        self._sampler = sampler
        self._engine_name = engine_name
        self._model = model

    @classmethod
    def to(cls, endpoint: str, config: EngineConfig) -> Self:
        """Raises `ConfigError` if the environment names an unknown sampler."""
        sampler = sampler_of(None, os.environ)
        export = SpanExport.to(endpoint, config.engine_name)
        return cls(export, config.engine_name, config.served_model, sampler)

    def close(self) -> None:
        self._export.close()

    def ended(self, ended: Ended) -> None:
        """Export the span of a request that has a parent span, if the trace is sampled."""
        parent = ended.parent
        if parent is None or not self._sampler.takes(parent.trace_id, parent):
            return
        span_id = span_id_of(parent.trace_id, int(parent.span_id, 16), time.time_ns())
        attributes: dict[str, Value | None] = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "parrot",
            "gen_ai.request.model": self._model,
            "parrot.engine": self._engine_name,
            "parrot.task_id": ended.request.task_id,
        }
        if (response := ended.response) is not None:
            usage = response.usage
            attributes |= {
                "gen_ai.usage.input_tokens": usage.cached_tokens + usage.computed_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.output_tokens": usage.output_tokens,
                "gen_ai.response.finish_reasons": [response.finish_reason.value],
                "parrot.queue_s": usage.queue_s,
                "parrot.prefill_s": usage.prefill_s,
                "parrot.decode_s": usage.decode_s,
                "parrot.steps": usage.steps,
            }
        self._export.send(
            f"generate {self._model}",
            TraceParent(parent.trace_id, span_id),
            parent,
            (ended.began, ended.began + ended.seconds),
            attributes,
            is_server=True,
            error=ended.error_type,
        )
