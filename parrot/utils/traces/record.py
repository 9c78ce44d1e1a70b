"""The facts of a span, and where spans go, if anywhere: nothing of OpenTelemetry is imported before
that is known."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from parrot.utils.config import ConfigError
from parrot.utils.traces.traceparent import TraceParent

if TYPE_CHECKING:
    from parrot.utils.traces.export import SpanExport


Value = str | int | float | bool | Sequence[str]


@dataclass(slots=True)
class SpanRecord:
    """`start` and `end` in seconds of Unix time, as those of `events`. An attribute that is None is
    left out. `links`: spans whose results this one took."""

    name: str
    own: TraceParent
    parent: TraceParent | None
    start: float
    end: float
    attributes: Mapping[str, Value | None]
    events: Sequence[tuple[str, float | None]] = ()
    links: Sequence[TraceParent] = ()
    is_server: bool = False
    error: str | None = None


def span_export(endpoint: str, service: str) -> "SpanExport":
    """Spans go to `endpoint` by OTLP over HTTP. Raises `ConfigError` if what that needs is not
    installed."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        from parrot.utils.traces.export import SpanExport
    except ImportError as error:
        raise ConfigError(f"otlp_endpoint: {error}: pip install 'parrot[otel]'") from None
    return SpanExport(OTLPSpanExporter(endpoint=endpoint), service)
