"""The log of events that may interest an operator: engines, retried calls, expired sessions."""

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from parrot.gateway.page.feed import Rows
from parrot.gateway.page.visitors import Visitor
from parrot.serve.events import (
    CompletionRetried,
    EngineDrained,
    EngineJoined,
    EngineLost,
    SessionExpired,
    Sink,
)
from parrot.utils.clock import Clock

_MAX_EVENTS = 256  # Events that the log keeps.
_MAX_EVENT_CHARS = 400  # Characters of one event's text.
Row = dict[str, Any]
HasView = Callable[[int], bool]
"""Whether a session with this id is live or kept."""


class LoggedEvent(NamedTuple):
    """An event that may interest an operator."""

    number: int
    at: float  # on the clock's scale
    kind: str
    text: str
    detail: str = ""  # only for visitors who see values; of an engine, only for the operator
    engine_name: str = ""
    session_id: int | None = None
    var_id: str = ""  # the output of the call
    tenant: str | None = None  # None: visible to all tenants


class EventLog:
    """Keeps the last events of engines, calls and sessions, oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[LoggedEvent] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0

    def __iter__(self) -> Iterator[LoggedEvent]:
        return iter(self._events)

    @property
    def sink(self) -> Sink:
        return {
            EngineJoined: self._engine_joined,
            EngineLost: self._engine_lost,
            EngineDrained: self._engine_drained,
            CompletionRetried: self._retried,
            SessionExpired: self._expired,
        }

    def _note(self, kind: str, text: str, detail: str = "", **about: Any) -> None:
        self._num_events += 1
        known = (self._num_events, self._clock.now(), kind, text, detail[:_MAX_EVENT_CHARS])
        self._events.append(LoggedEvent(*known, **about))

    def _engine_joined(self, event: EngineJoined) -> None:
        self._note("engine joined", event.info.model, engine_name=event.info.engine_name)

    def _engine_lost(self, event: EngineLost) -> None:
        self._note("engine lost", "", event.why, engine_name=event.info.engine_name)

    def _engine_drained(self, event: EngineDrained) -> None:
        kind = "engine drains" if event.is_draining else "engine resumed"
        detail = f"{event.num_calls} {'call' if event.num_calls == 1 else 'calls'} there"
        self._note(kind, "", detail, engine_name=event.info.engine_name)

    def _retried(self, event: CompletionRetried) -> None:
        completion = event.completion
        self._note(
            "call retried",
            completion.func_name,
            event.why,
            engine_name=completion.stats.engine_name or "",
            session_id=completion.session_id,
            var_id=completion.output.id,
            tenant=completion.options.tenant,
        )

    def _expired(self, event: SessionExpired) -> None:
        session = event.session
        self._note("session expired", event.why, session_id=session.id, tenant=session.tenant)


def event_rows(log: EventLog, visitor: Visitor, epoch: float, has_view: HasView) -> Rows:
    """Events of engines and of the visitor's sessions. `epoch`: the clock's zero as Unix time."""
    rows: dict[str, Row] = {}
    for event in log:
        if event.tenant is not None and visitor.tenant not in (None, event.tenant):
            continue
        is_of_engine = event.tenant is None
        sees_detail = visitor.tenant is None if is_of_engine else visitor.sees_values
        detail = event.detail if sees_detail else ""
        rows[f"event:{event.number}"] = {
            "at": round(epoch + event.at, 3),
            "kind": event.kind,
            "text": ": ".join(filter(None, (event.text, detail))),
            "engine": event.engine_name,
            "session": event.session_id,
            "var": event.var_id,
            "has_view": event.session_id is not None and has_view(event.session_id),
        }
    return rows
