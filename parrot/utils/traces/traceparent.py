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


def span_within(trace_id: str, caller: str | None, *path: int) -> TraceParent:
    """The span of something with these numbers: in its caller's trace, if that names one, or else
    in this one."""
    if caller and (above := TraceParent.parse(caller)) is not None:
        span_id = span_id_of(above.trace_id, *path)
        return TraceParent(above.trace_id, span_id, above.is_sampled)
    return TraceParent(trace_id, span_id_of(trace_id, *path))


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
