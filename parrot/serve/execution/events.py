"""A log of what happened to engines, calls and sessions that an operator may wonder about."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from parrot.serve.graph.nodes import Completion
from parrot.utils.clock import Clock

_MAX_EVENTS = 256
_MAX_CHARS = 400


class EventKind(StrEnum):
    ENGINE_JOINED = "engine joined"
    ENGINE_LOST = "engine lost"
    ENGINE_DRAINS = "engine drains"
    ENGINE_RESUMED = "engine resumed"
    CALL_RETRIED = "call retried"
    SESSION_EXPIRED = "session expired"


@dataclass(frozen=True, slots=True)
class Event:
    """`at`: on the clock's scale. `var_id`: the output of the call. `tenant`: whose it is; None:
    everybody's."""

    number: int
    at: float
    kind: EventKind
    text: str
    engine_name: str = ""
    session_id: int | None = None
    var_id: str = ""
    tenant: str | None = None


class EventLog:
    """The last events, the oldest first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=_MAX_EVENTS)
        self._num_events = 0

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def add(
        self,
        kind: EventKind,
        text: str,
        *,
        engine_name: str = "",
        session_id: int | None = None,
        var_id: str = "",
        tenant: str | None = None,
    ) -> None:
        """See `Event`."""
        self._num_events += 1
        known = (self._num_events, self._clock.now(), kind, text[:_MAX_CHARS])
        self._events.append(Event(*known, engine_name, session_id, var_id, tenant))

    def call_retried(self, completion: Completion, why: str) -> None:
        """`why`: its last attempt came to nothing."""
        self.add(
            EventKind.CALL_RETRIED,
            f"{completion.func_name}: {why}",
            engine_name=completion.stats.engine_name or "",
            session_id=completion.session_id,
            var_id=completion.output.id,
            tenant=completion.options.tenant,
        )

    def session_expired(self, text: str, session_id: int, tenant: str) -> None:
        self.add(EventKind.SESSION_EXPIRED, text, session_id=session_id, tenant=tenant)
