"""Sessions: one user program's scope, and who may use it."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from parrot.protocol.errors import AuthenticationFailed, NotFound, QuotaExceeded, SessionGone
from parrot.serve.graph.graph import SessionGraph
from parrot.utils.clock import Clock
from parrot.utils.ids import IdCounter, new_token, tokens_equal

PUBLIC_TENANT = "public"


@dataclass(slots=True, eq=False)
class Session:
    """`last_active`: when a request came in, or a task of the session ended. `timed_reads`: the
    open reads with a timeout, and when they end. Times are on the clock's scale."""

    id: int
    auth: str
    tenant: str
    apps: tuple[str, ...]
    graph: SessionGraph
    created_at: float
    last_active: float
    timed_reads: dict[object, float] = field(default_factory=dict)

    def expires_at(self, now: float, life_span_s: float) -> float:
        """Running work and an open read until its timeout count as activity. A read without a
        timeout does not: if nothing runs for it, its value will hardly come any more."""
        if self.graph.num_started:
            return now + life_span_s
        return max(self.last_active + life_span_s, *self.timed_reads.values(), 0.0)


class SessionRegistry:
    """The live sessions. Ids only grow, so an id that was given out and is not live is gone."""

    def __init__(self, max_sessions: int, clock: Clock, first_id: int = 0) -> None:
        self._max_sessions = max_sessions
        self._clock = clock
        self._ids = IdCounter(first_id)
        self._first_id = self._next_id = first_id
        self._sessions: dict[int, Session] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    def create(
        self, tenant: str, apps: Sequence[str], make_graph: Callable[[int], SessionGraph]
    ) -> Session:
        """Raises `QuotaExceeded` when all sessions are taken."""
        if len(self._sessions) >= self._max_sessions:
            raise QuotaExceeded(f"already {self._max_sessions} sessions are live")
        session_id = self._ids.next()
        self._next_id = session_id + 1
        now = self._clock.now()
        session = Session(
            session_id, new_token(), tenant, tuple(apps), make_graph(session_id), now, now
        )
        self._sessions[session_id] = session
        return session

    def authenticate(self, session_id: int, session_auth: str | None) -> Session:
        """The live session, which counts as active now. Raises `NotFound`, `SessionGone` or
        `AuthenticationFailed`."""
        session = self._sessions.get(session_id)
        if session is None:
            if self._first_id <= session_id < self._next_id:
                raise SessionGone(f"session {session_id} has expired or was deleted")
            raise NotFound(f"no session {session_id}")
        if not tokens_equal(session_auth or "", session.auth):
            raise AuthenticationFailed("missing or wrong session_auth")
        session.last_active = self._clock.now()
        return session

    def find(self, session_id: int) -> Session | None:
        return self._sessions.get(session_id)

    def remove(self, session: Session) -> None:
        del self._sessions[session.id]


def tenant_of(api_key: str | None, allowed_keys: Sequence[str]) -> str:
    """Whose session it will be: nobody can tell a key from its tenant. Raises
    `AuthenticationFailed` if keys are configured and this is none of them."""
    if allowed_keys:
        matches = [tokens_equal(api_key or "", allowed) for allowed in allowed_keys]
        if not any(matches):  # all compared: the time says nothing about which
            raise AuthenticationFailed("missing or wrong api_key")
    if not api_key:
        return PUBLIC_TENANT
    return hashlib.sha256(api_key.encode("utf-8", "surrogatepass")).hexdigest()[:16]
