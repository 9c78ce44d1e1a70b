"""A trace: what programs asked of a ServeCore and what came of it, one JSON object a line.

Texts are not in it. Of each there are its length and ids of its beginnings, which are the same for
equal beginnings in one trace and mean nothing outside of it. Times are seconds since the recording
began; lines are in order of time. The first line is a `TraceHeader`."""

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.public import CompletionInfo

TRACE_VERSION = 1
CHUNK_CHARS = 256
WITHDRAWN = "withdrawn"  # the error of a read whose reader went away


class TraceEvent(BaseModel):
    """A newer version may have more fields; they are ignored."""

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
    tenant: str = Field(description="an id, as texts have")
    on_demand: bool = False


class TraceText(BaseModel):
    """`ids`: of the first `CHUNK_CHARS`, twice, three times ... as many, and of the whole."""

    chars: int
    ids: list[str]

    def lengths(self) -> Iterator[int]:
        """Characters that each id adds to the one before."""
        for start in range(0, self.chars, CHUNK_CHARS):
            yield min(CHUNK_CHARS, self.chars - start)


class TraceParameter(BaseModel):
    """`var_id` of every parameter; `was_bound`: the request named the variable. `value`: of an
    input that was given as text."""

    name: str
    var_id: str
    is_output: bool = False
    was_bound: bool = False
    value: TraceText | None = None
    sampling_config: dict[str, Any] | None = None


class CallLine(SessionEvent):
    """`pieces`: the template, with a name for each placeholder. `options`: the request's other
    fields that are not their defaults."""

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
    """`k`: the first so many of the variables; null: the one."""

    event: Literal["read"] = "read"
    read_id: int
    var_ids: list[str]
    k: int | None = None
    is_stream: bool = False
    options: dict[str, Any] = {}


class AnswerLine(SessionEvent):
    """`error`: the type of error it ended with; `withdrawn` when the reader went away."""

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
    """In whatever way. `calls`: its graph with all times (since the session began) and tokens.
    `native_texts`: the outputs of native calls, by variable."""

    event: Literal["end"] = "end"
    calls: list[CompletionInfo]
    native_texts: dict[str, TraceText] = {}


class TraceEnded(TraceEvent):
    """ServeCore went down. Counts are tokens: `hit`, prompt tokens that were cached; `recomputed`,
    computed once more; `evicted`, freed for want of room."""

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
