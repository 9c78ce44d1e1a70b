"""Exports spans by OTLP over HTTP: `python -m parrot.utils.otel ENDPOINT SERVICE`.

Reads span records, a JSON list of them a line, until its input ends; other modules that run `main`
from parrot.utils.span_export import SpanRecord
read other facts. Needs the extra `otel`: nothing else of Parrot imports OpenTelemetry."""

import logging
import os
import queue
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import orjson
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from parrot.utils.span_export import SpanRecord
from parrot.utils.traceparent import TraceParent

logger = logging.getLogger(__name__)

_BATCH = 512  # spans in one request of the exporter, unless one line has more
_MAX_LINES = 64  # read ahead
_FLUSH_S = 4.0
_NS = 1_000_000_000
_NICENESS = 10  # servers that share its cores go first

Read = Callable[[Any], list[SpanRecord]]
"""Spans, of the decoded JSON of a line."""


class OtelSink:
    """Writes spans by an exporter of OpenTelemetry."""

    def __init__(self, exporter: SpanExporter, service: str) -> None:
        self._exporter = exporter
        self._resource = Resource.create({"service.name": service})

    def write(self, told: Sequence[Sequence[SpanRecord]]) -> None:
        records = list(chain.from_iterable(told))
        for start in range(0, len(records), _BATCH):
            self._exporter.export([self._span(one) for one in records[start : start + _BATCH]])

    def close(self, timeout_s: float) -> None:
        self._exporter.shutdown()

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


def read_records(facts: Any) -> list[SpanRecord]:
    """`SpanRecord`s as `OtlpProcess` writes them."""
    return [_record(**fields) for fields in facts]


def _record(
    own: Sequence[Any], parent: Sequence[Any] | None, links: Sequence[Sequence[Any]], **fields: Any
) -> SpanRecord:
    above = None if parent is None else TraceParent(*parent)
    return SpanRecord(
        own=TraceParent(*own), parent=above, links=[TraceParent(*one) for one in links], **fields
    )


def _write_all(lines: "queue.Queue[bytes | None]", read: Read, sink: OtelSink) -> None:
    """Write lines to `sink`, those that wait in one request, until None comes."""
    while (line := lines.get()) is not None:
        try:
            records = read(orjson.loads(line))
            while len(records) < _BATCH and not lines.empty():
                if (line := lines.get()) is None:
                    break
                records += read(orjson.loads(line))
            sink.write([records])
        except Exception:
            logger.exception("spans could not be exported")
        if line is None:
            return


def main(read: Read = read_records) -> None:
    os.nice(_NICENESS)
    for signum in (signal.SIGINT, signal.SIGTERM):  # it ends after whoever has spans
        signal.signal(signum, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING)
    endpoint, service = sys.argv[1:]
    sink = OtelSink(OTLPSpanExporter(endpoint=endpoint), service)
    lines: queue.Queue[bytes | None] = queue.Queue(_MAX_LINES)
    writer = threading.Thread(target=_write_all, args=(lines, read, sink), daemon=True)
    writer.start()
    for line in sys.stdin.buffer:
        lines.put(line)
    lines.put(None)
    writer.join(_FLUSH_S)
    sink.close(0.0)


if __name__ == "__main__":
    main()
