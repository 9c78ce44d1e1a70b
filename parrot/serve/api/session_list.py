"""`GET /v1/sessions`: the live sessions of whoever asks."""

import asyncio

from parrot.protocol.public import SessionListRequest, SessionListResponse, SessionSummary
from parrot.serve.core import ServeCore
from parrot.serve.sessions import Session
from parrot.serve.views import session_summary


class SessionList:
    def __init__(self, core: ServeCore) -> None:
        self._core = core

    async def read(self, request: SessionListRequest) -> SessionListResponse:
        """Sessions of the API key's tenant; where there are no `api_keys` its conversations only,
        since a program's session is known to that program alone. Raises `AuthenticationFailed`."""
        tenant = self._core.tenant(request.api_key)
        found = [s for s in self._core.sessions if s.tenant == tenant and self._is_shown(s)]
        if request.before is not None:
            found = [session for session in found if session.id < request.before]
        found.sort(key=lambda session: session.id, reverse=True)
        summaries = []
        for session in found[: request.limit]:
            if self._core.sessions.find(session.id) is session:
                summaries.append(self._summary(session))
            await asyncio.sleep(0)  # others may go on
        return SessionListResponse(sessions=summaries, has_more=len(found) > request.limit)

    def _is_shown(self, session: Session) -> bool:
        return self._core.tenants.is_closed or session.is_program

    def _summary(self, session: Session) -> SessionSummary:
        core = self._core
        return session_summary(
            session,
            core.clock.now(),
            core.sessions.remaining_s(session),
            is_conversation=session.is_program,
        )
