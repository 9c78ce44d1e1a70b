"""Reads a trace and estimates the number of tokens of its texts."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from pydantic import TypeAdapter, ValidationError

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.public import CompletionInfo
from parrot.protocol.trace import (
    TRACE_VERSION,
    AnswerLine,
    AnyTraceEvent,
    CallLine,
    EndLine,
    EngineLine,
    SessionEvent,
    SessionLine,
    SetLine,
    TraceEnded,
    TraceEvent,
    TraceHeader,
    TraceText,
    VariableLine,
)
from parrot.utils.config import ConfigError

_ADAPTER: TypeAdapter[AnyTraceEvent] = TypeAdapter(AnyTraceEvent)
_TOKENS_PER_CHAR = 0.25  # Estimate for a trace without usable calls.


@dataclass(slots=True)
class TracedSession:
    """The requests of one session in order. `calls` are their results. It is empty if the session
    did not end during the recording."""

    began: SessionLine
    events: list[SessionEvent] = field(default_factory=list)
    calls: list[CompletionInfo] = field(default_factory=list)
    native_texts: dict[str, TraceText] = field(default_factory=dict)

    def add(self, event: SessionEvent) -> None:
        if isinstance(event, EndLine):
            self.calls, self.native_texts = event.calls, event.native_texts
        else:
            self.events.append(event)

    @property
    def answers(self) -> list[AnswerLine]:
        return [event for event in self.events if isinstance(event, AnswerLine)]

    @property
    def jct_s(self) -> float | None:
        """Seconds from the session's start to the last successful answer. None without one."""
        answered = [answer.at for answer in self.answers if answer.error is None]
        return max(answered) - self.began.at if answered else None


@dataclass(slots=True)
class Trace:
    engines: list[EngineInfo] = field(default_factory=list)
    sessions: list[TracedSession] = field(default_factory=list)
    ended: TraceEnded | None = None
    _by_id: dict[int, TracedSession] = field(default_factory=dict)

    def add(self, event: TraceEvent) -> None:
        """Add an event (a `TraceSink`). Events of sessions that began before the recording are
        ignored."""
        match event:
            case TraceHeader():
                pass
            case TraceEnded():
                self.ended = event
            case EngineLine(engine=new):
                others = [e for e in self.engines if e.engine_name != new.engine_name]
                self.engines = [*others, new]
            case SessionLine():
                session = self._by_id[event.session_id] = TracedSession(event)
                self.sessions.append(session)
            case SessionEvent():
                if (known := self._by_id.get(event.session_id)) is not None:
                    known.add(event)


def load_trace(path: Path) -> Trace:
    """Read a trace file. An incomplete last line is ignored. Raises `ConfigError` for a file that
    is not a trace."""
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    trace = Trace()
    for number, event in enumerate(_parse(lines, str(path))):
        if number == 0 and not (isinstance(event, TraceHeader) and event.version == TRACE_VERSION):
            raise ConfigError(f"{path}: not a trace of version {TRACE_VERSION}; record it again")
        trace.add(event)
    if not trace.sessions:
        raise ConfigError(f"{path}: contains no session; run a program while ServeCore records")
    return trace


def _parse(lines: list[bytes], source: str) -> Iterator[AnyTraceEvent]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            yield _ADAPTER.validate_json(line)
        except ValidationError as error:
            if number == len(lines):  # No line end: ServeCore was killed during the write.
                return
            message = error.errors()[0]["msg"]
            raise ConfigError(
                f"{source}, line {number}: {message}; a trace is what ServeCore writes to its "
                "`trace_path`"
            ) from None


class TokenCounts:
    """Estimates the number of tokens of a trace's texts. The trace has only the token count of
    each prompt. The tokens of generated inputs are subtracted, and the rest is divided among the
    other texts by their length in characters."""

    def __init__(self, sessions: Iterable[TracedSession]) -> None:
        self._by_id: defaultdict[str, list[float]] = defaultdict(list)
        ratios = [ratio for session in sessions for ratio in self._learn(session)]
        self._mean = fmean(ratios) if ratios else _TOKENS_PER_CHAR

    def of(self, text_id: str, num_chars: int) -> int:
        """Estimated tokens of the chunk with this id and length."""
        ratios = self._by_id.get(text_id)
        return max(1, round(num_chars * (fmean(ratios) if ratios else self._mean)))

    def _learn(self, session: TracedSession) -> Iterator[float]:
        first_row = {row.request_id: row for row in reversed(session.calls)}
        generated = {
            row.output_var_id: row.output_tokens for row in session.calls if row.kind == "semantic"
        }
        given = _given_chars(session)
        for event in session.events:
            if not isinstance(event, CallLine) or event.request_id not in first_row:
                continue
            ratio = _ratio(event, first_row[event.request_id], generated, given)
            if ratio is not None:
                yield ratio
                for text_id in {i for text in _first_texts(event) for i in text.ids}:
                    self._by_id[text_id].append(ratio)


def _given_chars(session: TracedSession) -> dict[str, int]:
    """Number of characters of each variable that no model generated."""
    given = {var_id: text.chars for var_id, text in session.native_texts.items()}
    for event in session.events:
        if isinstance(event, VariableLine | SetLine) and event.value is not None:
            given[event.var_id] = event.value.chars
    return given


def _ratio(
    call: CallLine, row: CompletionInfo, generated: dict[str, int], given: dict[str, int]
) -> float | None:
    """Tokens per character of a call's texts before its first output. None if unknown."""
    num_tokens = row.cached_tokens + row.computed_tokens
    if not num_tokens or "successor_of" in call.options:
        return None
    parameters = {parameter.name: parameter for parameter in call.parameters}
    num_chars = sum(text.chars for text in _first_texts(call))
    for piece in _first_pieces(call):
        if isinstance(piece, str):
            var_id = parameters[piece].var_id
            num_tokens -= generated.get(var_id, 0)
            num_chars += given.get(var_id, 0)
    return num_tokens / num_chars if num_chars and num_tokens > 0 else None


def _first_pieces(call: CallLine) -> Iterator[TraceText | str]:
    """The pieces of the template before the first output."""
    outputs = {parameter.name for parameter in call.parameters if parameter.is_output}
    for piece in call.pieces:
        if isinstance(piece, str) and piece in outputs:
            return
        yield piece


def _first_texts(call: CallLine) -> Iterator[TraceText]:
    values = {parameter.name: parameter.value for parameter in call.parameters}
    for piece in _first_pieces(call):
        text = values.get(piece) if isinstance(piece, str) else piece
        if text is not None:
            yield text
