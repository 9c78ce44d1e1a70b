"""The events of ServeCore, for sinks: metrics, traces, logs, the web page, the journal.

An event is delivered in the turn of the event loop in which it happens. An event without a sink is
not created. A sink that fails does not affect other sinks."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, ParamSpec

from parrot.protocol.engine_api import EngineInfo
from parrot.protocol.errors import ParrotError
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
"""Event types, and the function that each is delivered to."""


class Events:
    """Delivers events to sinks. A sink that raises is logged and removed."""

    def __init__(self) -> None:
        self._sinks: dict[object, list[Sink]] = {}  # by event type

    def add(self, sink: Sink) -> None:
        for kind in sink:
            self._sinks.setdefault(kind, []).append(sink)

    def has_sink(self, *kinds: type) -> bool:
        """Whether any sink handles one of these event types."""
        return not self._sinks.keys().isdisjoint(kinds)

    def emit(
        self, kind: Callable[Fields, object], *args: Fields.args, **fields: Fields.kwargs
    ) -> None:
        """Create an event and deliver it, if any sink handles its type."""
        sinks = self._sinks.get(kind)
        if not sinks:
            return
        event = kind(*args, **fields)
        for sink in tuple(sinks):
            handle = sink[type(event)]
            try:
                handle(event)
            except Exception:
                logger.exception("%s failed; its sink receives no more events", handle.__qualname__)
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
    traceparent: str | None  # the parent span


class SessionDeleted(NamedTuple):
    """The program deletes the session. `SessionEnded` follows."""

    session: Session


class SessionExpired(NamedTuple):
    """The session was idle for too long. `SessionEnded` follows."""

    session: Session
    why: str


class SessionEnded(NamedTuple):
    """The session has ended for any reason, and all its variables are settled."""

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
    is_bound: bool  # the request names the output variable


class CompletionPlaced(NamedTuple):
    """The completion was sent to an engine."""

    completion: Completion


class CompletionUnserved(NamedTuple):
    """No engine has served the queued completion's models for `no_engine_timeout`. The completion
    stays queued while a reader demands it."""

    completion: Completion
    error: ParrotError


class CompletionRetried(NamedTuple):
    """The completion's last attempt failed, and it is queued again."""

    completion: Completion
    why: str


class TaskEnded(NamedTuple):
    """The task is in a final state."""

    session: Session
    task: Task


class VariableCreated(NamedTuple):
    """A program created a variable, perhaps with a value."""

    session: Session
    var_id: str
    name: str
    content: str | None


class VariableSet(NamedTuple):
    session: Session
    var_id: str
    content: str


class CancelRequested(NamedTuple):
    """A program cancels a call or a variable."""

    session: Session
    request_id: int | None = None
    var_id: str | None = None


class PrefixBroken(NamedTuple):
    """A prompt does not start with its program's previous prompt."""

    reason: str


# Reads


class ReadBegan(NamedTuple):
    session: Session
    read_id: int
    options: ReadLimits
    var_ids: Sequence[str]
    k: int | None  # for a read of the first `k` of several variables; None: of one
    is_stream: bool


class ReadEnded(NamedTuple):
    session: Session
    read_id: int
    error: BaseException | None  # raised by the read, also by its cancellation


# Engines, and the service itself


class EngineJoined(NamedTuple):
    info: EngineInfo


class EngineLost(NamedTuple):
    info: EngineInfo
    why: str


class EngineDrained(NamedTuple):
    """An engine is drained, or receives calls again."""

    info: EngineInfo
    is_draining: bool
    num_calls: int  # running calls on the engine


class ContextEvicted(NamedTuple):
    """A context was freed because its engine needed blocks."""

    owner: int | str  # a session's id, or a tenant whose sessions share the context
    function: str
    num_tokens: int


class CoreClosed(NamedTuple):
    """ServeCore closes. The fields are totals of tokens."""

    hit: int  # prompt tokens that were found in contexts
    recomputed: int  # prompt tokens that were computed again
    evicted: int  # tokens of evicted contexts
