"""A trace: all requests of programs to a ServeCore and their results, one JSON object per line.

A trace does not contain texts. Each text is replaced by its length and by ids of its prefixes.
Within one trace, equal prefixes have equal ids. Times are seconds since the recording began. Lines
are in order of time. The first line is a `TraceHeader`."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.public import CompletionInfo

TRACE_VERSION = 1
CHUNK_CHARS = 256
WITHDRAWN = "withdrawn"  # The `error` of a read whose reader disconnected.


class TraceEvent(BaseModel):
    """Base of all lines. Unknown fields, from newer versions, are ignored."""

    model_config = ConfigDict(extra="ignore")

    event: str
    at: float


class TraceHeader(TraceEvent):
    event: Literal["trace"] = "trace"
    version: int = TRACE_VERSION
    at: float = 0.0


class EngineLine(TraceEvent):
    event: Literal["engine"] = "engine"
    engine: EngineInfo


class SessionEvent(TraceEvent):
    session_id: int


class SessionLine(SessionEvent):
    event: Literal["session"] = "session"
    tenant: str = Field(description="an anonymous id")
    on_demand: bool = False


class TraceText(BaseModel):
    """A text. `ids` are those of its prefixes of `CHUNK_CHARS`, 2 * `CHUNK_CHARS`, ... characters
    and of the whole text."""

    chars: int
    ids: list[str]

    def lengths(self) -> Iterator[int]:
        """Yield the number of characters that each prefix adds to the previous one."""
        for start in range(0, self.chars, CHUNK_CHARS):
            yield min(CHUNK_CHARS, self.chars - start)


class TraceParameter(BaseModel):
    """A parameter of a call."""

    name: str
    var_id: str
    is_output: bool = False
    was_bound: bool = False  # The request named the variable.
    value: TraceText | None = None  # The value of an input that was given as text.
    sampling_config: dict[str, Any] | None = None


class CallLine(SessionEvent):
    """A semantic call. `pieces` is the template: texts, and names of placeholders. `options` are
    the request's other fields with values other than the defaults."""

    event: Literal["call"] = "call"
    request_id: int
    pieces: list[TraceText | str]
    parameters: list[TraceParameter]
    options: dict[str, Any] = {}


class NativeLine(SessionEvent):
    event: Literal["native"] = "native"
    request_id: int
    func_name: str
    parameters: list[TraceParameter]
    options: dict[str, Any] = {}


class VariableLine(SessionEvent):
    event: Literal["variable"] = "variable"
    var_id: str
    name: str
    value: TraceText | None = None


class SetLine(SessionEvent):
    event: Literal["set"] = "set"
    var_id: str
    value: TraceText


class ReadLine(SessionEvent):
    """A read of one variable (`k` null), or of the first `k` variables to be ready."""

    event: Literal["read"] = "read"
    read_id: int
    var_ids: list[str]
    k: int | None = None
    is_stream: bool = False
    options: dict[str, Any] = {}


class AnswerLine(SessionEvent):
    """The answer of a read. `error` is the error's type, or `withdrawn` after a disconnect."""

    event: Literal["answer"] = "answer"
    read_id: int
    error: str | None = None


class CancelLine(SessionEvent):
    """A program cancelled a variable or a whole call."""

    event: Literal["cancel"] = "cancel"
    var_id: str | None = None
    request_id: int | None = None


class DeleteLine(SessionEvent):
    """A program deleted its session."""

    event: Literal["delete"] = "delete"


class EndLine(SessionEvent):
    """The session ended. `calls`: its calls with tokens and times, in seconds since the session
    began. `native_texts`: the outputs of native calls, by var_id."""

    event: Literal["end"] = "end"
    calls: list[CompletionInfo]
    native_texts: dict[str, TraceText] = {}


class TraceEnded(TraceEvent):
    """ServeCore stopped. All counts are in tokens. `hit`: cached prompt tokens. `recomputed`:
    computed again. `evicted`: freed because the KV cache was full."""

    event: Literal["ended"] = "ended"
    hit: int = 0
    recomputed: int = 0
    evicted: int = 0


AnyTraceEvent = Annotated[
    TraceHeader
    | EngineLine
    | SessionLine
    | CallLine
    | NativeLine
    | VariableLine
    | SetLine
    | ReadLine
    | AnswerLine
    | CancelLine
    | DeleteLine
    | EndLine
    | TraceEnded,
    Field(discriminator="event"),
]

TraceSink = Callable[[TraceEvent], None]
