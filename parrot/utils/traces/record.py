"""The facts of a span."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parrot.utils.traces.traceparent import TraceParent

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
