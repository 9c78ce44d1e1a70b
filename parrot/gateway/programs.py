"""Sessions of programs that begin none themselves, since the API that they speak has none."""

from collections.abc import Mapping

from parrot.protocol.errors import QuotaExceeded, SessionGone
from parrot.serve.core import ServeCore
from parrot.serve.events import SessionBegan
from parrot.serve.sessions import Session
from parrot.serve.tenants.quotas import TenantQuotaExceeded
from parrot.utils.heaps import LruDict

Program = tuple[str, str | None]
"""A tenant, and the name of one of its programs; None if the program has no name."""


class ProgramSessions:
    """Begins a session for each program, which ends like any other. Where there is no room for a
    new one, those end that are idle, the least recently used first."""

    def __init__(self, core: ServeCore) -> None:
        """The core's end of a session includes `forget`."""
        self._core = core
        self._programs: LruDict[int, Program] = LruDict()  # by session id
        self._by_name: dict[Program, int] = {}

    def is_live(self, session_id: int) -> bool:
        return session_id in self._programs

    def use(self, session_id: int) -> Session:
        """A live session, which counts as active now."""
        session = self._core.sessions.find(session_id)
        assert session is not None, session_id
        self._programs.touch(session_id)
        session.last_active = self._core.clock.now()
        return session

    def with_room(
        self, tenant: str, name: str | None, usage: Mapping[str, int], known: int | None = None
    ) -> Session:
        """The session of the program with this name, or the one with the id `known`; or a new one
        if there is none or it is full. `usage` is as in `Account`. Raises `QuotaExceeded`."""
        if name is not None:
            known = self._by_name.get((tenant, name))
        if known is not None and self.is_live(known):
            session = self.use(known)
            try:
                session.account.require(**usage)
            except QuotaExceeded:
                if not _is_idle(session):
                    raise
                self._core.end(session, SessionGone(f"session {session.id} was full"))
            else:
                return session
        return self._begin_with_room((tenant, name), usage)

    def forget(self, session: Session) -> None:
        """The session has ended, which may be one of these."""
        program = self._programs.pop(session.id)
        if program is not None and self._by_name.get(program) == session.id:
            del self._by_name[program]

    def check_integrity(self) -> None:
        for session_id in self._programs:
            assert self._core.sessions.find(session_id) is not None, session_id
        for program, session_id in self._by_name.items():
            assert self._programs.peek(session_id) == program, program

    def _begin_with_room(self, program: Program, usage: Mapping[str, int]) -> Session:
        tenant, name = program
        apps = () if name is None else (name,)
        while True:
            session = None
            try:
                session = self._core.sessions.create(tenant, apps, on_demand=True, is_program=True)
                self._core.events.emit(SessionBegan, session, on_demand=True, traceparent=None)
                session.account.require(**usage)
            except QuotaExceeded as error:
                if session is not None:
                    self._core.end(session, SessionGone(error.message))
                is_own = isinstance(error, TenantQuotaExceeded)
                if not self._end_oldest(tenant, only_own=is_own):
                    raise
            else:
                break
        self.restore(session)
        return session

    def restore(self, session: Session) -> None:
        """It is a program's."""
        name = session.apps[0] if session.apps else None
        self._programs.put(session.id, (session.tenant, name))
        if name is not None:
            self._by_name[session.tenant, name] = session.id

    def _end_oldest(self, tenant: str, *, only_own: bool) -> bool:
        """End an idle session, one of the tenant's own if there is one or it must be. False if
        there is none, or if it is so large that its tenant has room only later."""
        sessions = (self._core.sessions.find(session_id) for session_id in self._programs)
        oldest: Session | None = None
        for session in sessions:
            if session is None or not _is_idle(session):
                continue
            if session.tenant == tenant:
                oldest = session
                break
            if not only_own:
                oldest = oldest or session
        if oldest is None:
            return False
        self._core.end(oldest, SessionGone(f"session {oldest.id} made room for another"))
        return not (only_own and self._core.sessions.find_owner(oldest.id))


def _is_idle(session: Session) -> bool:
    return not session.graph.activation.num_started
