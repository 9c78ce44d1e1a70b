"""One stream of the events of ServeCore, for sinks: metrics, traces, logs, the page, the journal.

An event is told in the turn of the event loop in which it happened. It is not made if nobody takes
its kind, and a sink that fails disturbs nobody."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.public import (
    CallResponse,
    NativeCallRequest,
    ReadLimits,
    SemanticCallRequest,
)
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.sessions import Session

logger = logging.getLogger(__name__)

Fields = ParamSpec("Fields")

Sink = Mapping[type, Callable[[Any], None]]
"""The kinds of events that somebody takes, and what is called with each."""


class Events:
    """Tells sinks the events of their kinds. A sink that raises is logged and told nothing more."""

    def __init__(self) -> None:
        self._sinks: dict[object, list[Sink]] = {}  # by the kinds that they take

    def add(self, sink: Sink) -> None:
        for kind in sink:
            self._sinks.setdefault(kind, []).append(sink)

    def wants(self, *kinds: type) -> bool:
        """Whether a sink takes events of one of these kinds."""
        return not self._sinks.keys().isdisjoint(kinds)

    def emit(
        self, kind: Callable[Fields, object], *args: Fields.args, **fields: Fields.kwargs
    ) -> None:
        """Make an event of this kind and tell it to those who take it."""
        sinks = self._sinks.get(kind)
        if not sinks:
            return
        event = kind(*args, **fields)
        for sink in tuple(sinks):
            handle = sink[type(event)]
            try:
                handle(event)
            except Exception:
                logger.exception("%s failed, and its sink stops", handle.__qualname__)
                self._remove(sink)

    def _remove(self, sink: Sink) -> None:
        for kind in sink:
            left = [other for other in self._sinks.pop(kind, ()) if other is not sink]
            if left:
                self._sinks[kind] = left


# Sessions


class SessionBegan(NamedTuple):
    session: Session
    on_demand: bool
    traceparent: str | None  # the span above it


class SessionDeleted(NamedTuple):
    """Its program asked for its end, which comes next."""

    session: Session


class SessionExpired(NamedTuple):
    """Nobody used it for too long, and its end comes next."""

    session: Session
    why: str


class SessionEnded(NamedTuple):
    """It has ended in whatever way, and all its variables are settled."""

    session: Session
    lasted_s: float


# Calls and variables


class CallAdded(NamedTuple):
    session: Session
    request: SemanticCallRequest | NativeCallRequest
    response: CallResponse


class PromptAdded(NamedTuple):
    """A call without a template."""

    session: Session
    completions: Sequence[Completion]
    is_bound: bool  # the request named the variable of the output


class CompletionPlaced(NamedTuple):
    """It was sent to an engine."""

    completion: Completion


class CompletionRetried(NamedTuple):
    """Its last attempt came to nothing, and it is queued again."""

    completion: Completion
    why: str


class TaskEnded(NamedTuple):
    """It is in a final state."""

    session: Session
    task: Task


class VariableCreated(NamedTuple):
    """A program made a variable itself, perhaps with a value."""

    session: Session
    var_id: str
    name: str
    content: str | None


class VariableSet(NamedTuple):
    session: Session
    var_id: str
    content: str


class CancelAsked(NamedTuple):
    """A program cancels a call or a variable."""

    session: Session
    request_id: int | None = None
    var_id: str | None = None


class PrefixBroken(NamedTuple):
    """A prompt left the prefix of its program."""

    reason: str


# Reads


class ReadBegan(NamedTuple):
    session: Session
    read_id: int
    options: ReadLimits
    var_ids: Sequence[str]
    k: int | None  # a read of the first `k` of several variables; None: of one
    is_stream: bool


class ReadEnded(NamedTuple):
    session: Session
    read_id: int
    error: BaseException | None  # raised by the read, also when it was cancelled


# Engines, and the service itself


class EngineJoined(NamedTuple):
    info: EngineInfo


class EngineLost(NamedTuple):
    info: EngineInfo
    why: str


class EngineDrained(NamedTuple):
    """It is to get no more calls, or gets calls again."""

    info: EngineInfo
    is_draining: bool
    num_calls: int  # that it has now


class ContextEvicted(NamedTuple):
    """A context was freed for want of room."""

    owner: int | str  # the id of a session, or a tenant whose sessions share it
    function: str
    num_tokens: int


class CoreClosed(NamedTuple):
    """Prompt tokens that contexts had, that were computed again, and those of evicted contexts."""

    hit: int
    recomputed: int
    evicted: int
