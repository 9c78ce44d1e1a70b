"""W3C trace context: the trace and the parent span of some work."""

import hashlib
import re
import secrets
import sys
from typing import NamedTuple, Self

_FORM = re.compile(r"(?!ff)[0-9a-f]{2}-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 1


class TraceParent(NamedTuple):
    """Ids in lower-case hexadecimal: 32 digits for the trace, 16 for the span."""

    trace_id: str
    span_id: str
    is_sampled: bool = True

    @classmethod
    def parse(cls, text: str | None) -> Self | None:
        """Parse a `traceparent` header. None if it is invalid: the standard says to ignore it."""
        match = _FORM.fullmatch(text or "")
        if match is None or not int(match[1], 16) or not int(match[2], 16):
            return None
        return cls(match[1], match[2], bool(int(match[3], 16) & _SAMPLED))

    def __str__(self) -> str:
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def new_trace_id() -> str:
    return secrets.token_hex(16)


def span_id_of(trace_id: str, *path: int) -> str:
    """The span id of an object with these numbers. It is a hash, so other code can compute the same
    id before the span is exported."""
    name = "/".join([trace_id, *map(str, path)])
    return hashlib.blake2b(name.encode(), digest_size=8).hexdigest()


class SessionSpans:
    """The ids of a session's spans. `trace_id` is empty if the session is not sampled. `is_joined`:
    at least one task belongs to its caller's trace."""

    __slots__ = ("_base", "_header", "is_joined", "session_id", "trace_id")

    def __init__(self, trace_id: str, session_id: int) -> None:
        self.trace_id = trace_id
        self.session_id = session_id
        self.is_joined = False
        self._base = _base(trace_id, session_id) if trace_id else 0
        self._header = f"00-{trace_id}-"

    @property
    def session(self) -> TraceParent:
        """The session's own span. Raises `ValueError` if the session is not sampled."""
        if not self.trace_id:
            raise ValueError(f"session {self.session_id} is not sampled")
        return TraceParent(self.trace_id, f"{self._base:016x}")

    def header(self, caller: str, task_id: int) -> str:
        """The `traceparent` header for the engine that runs a task: `str` of `task`, or empty.
        Optimized, because each traced call needs one."""
        if not caller:
            return self._header + f"{self._base ^ task_id:016x}-01" if self.trace_id else ""
        span = self.task(caller, task_id)
        self.is_joined |= span is not None and span.is_sampled
        return str(span or "")

    def task(self, caller: str, task_id: int) -> TraceParent | None:
        """The span of a task: in the caller's trace if `caller` is valid, else in the session's
        trace. None if there is neither."""
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
    """The number from which a session's span ids in a trace are derived. A task's span id is this
    number XOR the task id, which is cheap to compute for each call."""
    return int(span_id_of(trace_id, session_id), 16)


def current_traceparent() -> str | None:
    """The current OpenTelemetry span of the caller, or None. Imports nothing: a program with spans
    has already imported the package."""
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        return None
    context = api.get_current_span().get_span_context()
    if not context.is_valid:
        return None
    trace_id, span_id = f"{context.trace_id:032x}", f"{context.span_id:016x}"
    return str(TraceParent(trace_id, span_id, bool(context.trace_flags & _SAMPLED)))
