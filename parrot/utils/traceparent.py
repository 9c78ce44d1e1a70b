"""W3C trace context: which trace some work belongs to, and which span is above it."""

import hashlib
import re
import secrets
import sys
from typing import NamedTuple, Self

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """Ids in lower-case hexadecimal: 32 digits of the trace, 16 of the span."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """None if it is no `traceparent`: such a header is ignored, says the standard."""
        match = _FORM.fullmatch(text or "")
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        return cls(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def new_trace_id() -> str:
    return secrets.token_hex(16)


def span_id_of(trace_id: str, *path: int) -> str:
    """The id of the span of something with these numbers: whoever knows them finds the same one,
    before the span is written and after."""
    name = "/".join([trace_id, *map(str, path)])
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


class SessionSpans:
    """The ids of a session's spans. `trace_id`: empty if the session is not sampled. `is_joined`:
    some of its tasks belong to traces of their callers'."""

    __slots__ = ("_base", "_header", "is_joined", "session_id", "trace_id")

    def __init__(self, trace_id: str, session_id: int) -> None:
        self.trace_id = trace_id
        self.session_id = session_id
        self.is_joined = False
        self._base = _base(trace_id, session_id) if trace_id else 0
        self._header = f"00-{trace_id}-"

    @property
    def session(self) -> TraceParent:
        """The session's own span. Raises `ValueError` if it has none."""
        if not self.trace_id:
            raise ValueError(f"session {self.session_id} is not sampled")
        return TraceParent(self.trace_id, f"{self._base:016x}")

    def told(self, caller: str, task_id: int) -> str:
        """The header that tells who computes a task of its span: `str` of `task`, or empty. Called
        for each call that is traced."""
        if not caller:
            return self._header + f"{self._base ^ task_id:016x}-01" if self.trace_id else ""
        span = self.task(caller, task_id)
        self.is_joined |= span is not None and span.is_sampled
        return str(span or "")

    def task(self, caller: str, task_id: int) -> TraceParent | None:
        """The span of a task: in its caller's trace, if that names one, or else in the session's.
        None if neither is there."""
        if not caller:
            if not self.trace_id:
                return None
            return TraceParent(self.trace_id, f"{self._base ^ task_id:016x}")
        above = TraceParent.parse(caller)
        if above is None:
            return self.task("", task_id)
        base = _base(above.trace_id, self.session_id)
        return above._replace(span_id=f"{base ^ task_id:016x}")


def _base(trace_id: str, session_id: int) -> int:
    """The number on which a session's span ids in a trace are based; a task's differ from it by
    the task's number alone, since they are made for each call."""
    return int(span_id_of(trace_id, session_id), 16)


def current_traceparent() -> str | None:
    """The caller's current span in OpenTelemetry; None without one. Imports nothing: a program that
    has spans has the package already."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    trace_id, span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return str(TraceParent(trace_id, span_id, bool(context.trace_flags & _SAMPLED)))
