"""Export and sampling of spans with OpenTelemetry's SDK.

Only servers with an `otlp_endpoint` import this module. It needs the extra `otel`."""

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Self

from parrot.utils.config import ConfigError
from parrot.utils.installation import install_line
from parrot.utils.traceparent import TraceParent, new_trace_id

try:
    from opentelemetry.context import Context
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import Event, ReadableSpan
    from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
    from opentelemetry.sdk.trace.sampling import (
        ALWAYS_OFF,
        ALWAYS_ON,
        Decision,
        ParentBased,
        Sampler,
        TraceIdRatioBased,
    )
    from opentelemetry.trace import (
        Link,
        NonRecordingSpan,
        SpanContext,
        SpanKind,
        Status,
        StatusCode,
        TraceFlags,
        set_span_in_context,
    )
except ImportError as error:
    raise ConfigError(
        f"otlp_endpoint: {error.name} is not installed: {install_line('otel')}"
    ) from None

logger = logging.getLogger(__name__)

# Maximum number of finished spans that wait for their export. The SDK drops and logs further ones.
# A session with up to this number of calls is exported completely. A span takes about 2 KB.
_MAX_QUEUED = 16_384
_FLUSH_S = 5.0  # Longest time, in seconds, for which `close` waits for the last export.
_NS = 1_000_000_000

_SAMPLER, _ARGUMENT = "OTEL_TRACES_SAMPLER", "OTEL_TRACES_SAMPLER_ARG"
_PARENT_BASED = "parentbased_"
_KINDS = ("always_on", "always_off", "traceidratio")

Value = str | int | float | bool | Sequence[str]


class SpanExport:
    """Queues finished spans. A thread of the SDK exports the spans in batches."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        self._processor = BatchSpanProcessor(exporter, max_queue_size=_MAX_QUEUED)
        self._resource = Resource.create({"service.name": service})

    @classmethod
    def to(cls, endpoint: str, service: str) -> Self:
        """Export to `endpoint` by OTLP over HTTP."""
        return cls(OTLPSpanExporter(endpoint=endpoint), service)

    def send(
        self,
        name: str,
        own: TraceParent,
        parent: TraceParent | None,
        times: tuple[float, float],
        attributes: Mapping[str, Value | None],
        *,
        events: Sequence[tuple[str, float | None]] = (),
        links: Sequence[TraceParent] = (),
        is_server: bool = False,
        error: str | None = None,
    ) -> None:
        """Queue a finished span. `times` are start and end. They and the times of `events` are Unix
        seconds. Attributes and events with the value None are omitted. `links` are the spans whose
        results this span used."""
        present = {key: value for key, value in attributes.items() if value is not None}
        if error is not None:
            present["error.type"] = error
        start, end = times
        self._processor.on_end(
            ReadableSpan(
                name=name,
                context=_context(own),
                parent=None if parent is None else _context(parent, is_remote=True),
                resource=self._resource,
                attributes=present,
                events=[Event(name, {}, int(at * _NS)) for name, at in events if at is not None],
                links=[Link(_context(link)) for link in links],
                kind=SpanKind.SERVER if is_server else SpanKind.INTERNAL,
                status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR),
                start_time=int(start * _NS),
                end_time=int(end * _NS),
            )
        )

    def close(self) -> None:
        """Export the queued spans, for at most 5 s."""
        closing = threading.Thread(target=self._processor.shutdown, name="spans", daemon=True)
        closing.start()
        closing.join(_FLUSH_S)
        if closing.is_alive():
            logger.warning("the last spans could not be exported in %g s", _FLUSH_S)


class TraceSampler:
    """Decides with a sampler of the SDK which traces are exported."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler

    def takes(self, trace_id: str, caller: TraceParent | None) -> bool:
        """Whether the trace is exported. `caller` is the parent span, if any."""
        context = Context()
        if caller is not None:
            context = set_span_in_context(NonRecordingSpan(_context(caller)), context)
        decision = self._sampler.should_sample(context, int(trace_id, 16), "").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def trace_of(self, traceparent: str | None) -> str:
        """The trace id of a session: the caller's or a new one. Empty if the trace is not
        exported."""
        caller = TraceParent.parse(traceparent)
        trace_id = new_trace_id() if caller is None else caller.trace_id
        return trace_id if self.takes(trace_id, caller) else ""

    def judged(self, caller: TraceParent) -> TraceParent:
        """The caller's span, marked as sampled if its child spans are exported."""
        return caller._replace(is_sampled=self.takes(caller.trace_id, caller))


def sampler_of(ratio: float | None, environ: Mapping[str, str]) -> TraceSampler:
    """A sampler that exports this ratio of new traces and follows the callers' decisions. If
    `ratio` is None, the environment variable selects the sampler. Raises `ConfigError` for an
    unknown name, which the SDK would silently replace by its default."""
    if ratio is not None:
        return TraceSampler(ParentBased(TraceIdRatioBased(ratio)))
    name = environ.get(_SAMPLER) or f"{_PARENT_BASED}always_on"
    kind = name.removeprefix(_PARENT_BASED)
    if kind not in _KINDS:
        known = ", ".join([*_KINDS, *(_PARENT_BASED + kind for kind in _KINDS)])
        raise ConfigError(f"{_SAMPLER}: {name!r:.80} is not one of {known}")
    root: Sampler = ALWAYS_ON if kind == "always_on" else ALWAYS_OFF
    if kind == "traceidratio":
        root = TraceIdRatioBased(_ratio(environ))
    return TraceSampler(ParentBased(root) if name.startswith(_PARENT_BASED) else root)


def _ratio(environ: Mapping[str, str]) -> float:
    text = environ.get(_ARGUMENT) or "1"
    try:
        ratio = float(text)
    except ValueError:
        ratio = -1.0
    if not 0 <= ratio <= 1:
        raise ConfigError(f"{_ARGUMENT}: {text!r:.80} is not a number from 0 to 1")
    return ratio


def _context(one: TraceParent, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if one.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(one.trace_id, 16), int(one.span_id, 16), is_remote, flags)
