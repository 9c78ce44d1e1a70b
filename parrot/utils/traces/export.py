"""Spans of OpenTelemetry, written after the fact and exported by a thread of their own.

Needs the extra `otel`: only a process that exports spans imports this module."""

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from itertools import islice

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from parrot.utils.traces.record import SpanRecord
from parrot.utils.traces.traceparent import TraceParent

logger = logging.getLogger(__name__)

_MAX_PENDING = 256  # things whose spans are yet to be written
_BATCH = 512  # spans in one request of the exporter
_FLUSH_S = 5.0
_NS = 1_000_000_000


class SpanExport:
    """Export without holding up whoever has something to tell. What comes faster than it can be
    exported is left out, and the log says so."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        self._exporter = exporter
        self._resource = Resource.create({"service.name": service})
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="spans")
        self._room = threading.BoundedSemaphore(_MAX_PENDING)
        self.num_left_out = 0

    def send(self, make: Callable[[], Iterable[SpanRecord]]) -> None:
        """Export what `make` gives when it is called, in the exporting thread."""
        if self._room.acquire(blocking=False):
            self._thread.submit(self._export, make)
            return
        if self.num_left_out == 0:
            logger.warning("spans come faster than they can be exported: some are left out")
        self.num_left_out += 1

    def close(self) -> None:
        """Export what is pending, for a few seconds at most."""
        done = self._thread.submit(lambda: None)
        try:
            done.result(_FLUSH_S)
        except TimeoutError:
            logger.warning("the last spans could not be exported in %g s", _FLUSH_S)
        self._exporter.shutdown()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _export(self, make: Callable[[], Iterable[SpanRecord]]) -> None:
        try:
            records = iter(make())
            while batch := [self._span(record) for record in islice(records, _BATCH)]:
                self._exporter.export(batch)
        except Exception:
            logger.exception("spans could not be exported")
        finally:
            self._room.release()

    def _span(self, record: SpanRecord) -> ReadableSpan:
        error = record.error
        attributes = {key: value for key, value in record.attributes.items() if value is not None}
        if error is not None:
            attributes["error.type"] = error
        return ReadableSpan(
            name=record.name,
            context=_context(record.own),
            parent=None if record.parent is None else _context(record.parent, is_remote=True),
            resource=self._resource,
            attributes=attributes,
            events=[Event(name, {}, int(at * _NS)) for name, at in record.events if at is not None],
            links=[Link(_context(link)) for link in record.links],
            kind=SpanKind.SERVER if record.is_server else SpanKind.INTERNAL,
            status=Status(StatusCode.UNSET if error is None else StatusCode.ERROR),
            start_time=int(record.start * _NS),
            end_time=int(record.end * _NS),
        )


def _context(one: TraceParent, *, is_remote: bool = False) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if one.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(int(one.trace_id, 16), int(one.span_id, 16), is_remote, flags)
