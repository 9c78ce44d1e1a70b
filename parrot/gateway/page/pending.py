"""Sessions that have just ended, whose runs are not yet taken into the history."""

from typing import NamedTuple

from parrot.gateway.page.finished import RunEnd
from parrot.serve.sessions import Session

# A larger session is taken at once, so that pending sessions need little memory.
_MAX_CALLS, _MAX_VARIABLES, _MAX_TEXT_BYTES = 16, 64, 2**16


class EndedSession(NamedTuple):
    number: int  # sessions that end later have larger numbers
    session: Session
    ending: RunEnd


class PendingSessions:
    """The last small sessions that have ended, at most as many as the history keeps runs. Later
    sessions displace most of them on a busy server, which saves the work of taking them."""

    def __init__(self, max_sessions: int) -> None:
        self._max_sessions = max_sessions
        self._groups: dict[tuple[str, bool], dict[int, EndedSession]] = {}  # the first to end first
        self._num_sessions = 0
        self._next_number = 0

    def __len__(self) -> int:
        return self._num_sessions

    @staticmethod
    def accepts(session: Session) -> bool:
        """Whether the session is small enough."""
        graph = session.graph
        return (
            len(graph.calls) <= _MAX_CALLS
            and len(graph.variables) <= _MAX_VARIABLES
            and session.account.used["text_bytes"] <= _MAX_TEXT_BYTES
        )

    def add(self, session: Session, ending: RunEnd) -> Session | None:
        """Add a session. If there are too many, the first one of the largest group is displaced and
        returned."""
        group = self._groups.setdefault((session.tenant, session.is_program), {})
        group[session.id] = EndedSession(self._next_number, session, ending)
        self._next_number += 1
        self._num_sessions += 1
        if self._num_sessions <= self._max_sessions:
            return None
        largest = max(self._groups, key=lambda key: len(self._groups[key]))
        return self._pop(largest).session

    def pop(self) -> EndedSession:
        """Remove the session that ended first. There must be one."""
        key = min(self._groups, key=lambda key: next(iter(self._groups[key].values())).number)
        return self._pop(key)

    def _pop(self, key: tuple[str, bool]) -> EndedSession:
        group = self._groups[key]
        ended = group.pop(next(iter(group)))
        if not group:
            del self._groups[key]
        self._num_sessions -= 1
        return ended
