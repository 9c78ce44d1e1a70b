"""Routes for operators, who may do without the page."""

from pydantic import BaseModel

from parrot.protocol.endpoint import SMALL_BODY, Access, Described, Endpoint, Verb, taking
from parrot.protocol.errors import NotFound
from parrot.protocol.public import Answer, EngineStatus
from parrot.serve.api.service import holder_of
from parrot.serve.core import ServeCore
from parrot.serve.sessions import Session
from parrot.serve.tenants.table import Scope, Tenant, TenantLimits
from parrot.serve.views import engine_view


class Drain(BaseModel):
    """`is_wanted`: no more calls for the engine; false: calls again."""

    is_wanted: bool


class TenantView(Answer):
    """A tenant that has a key, and what it has now."""

    id: str
    scopes: list[Scope]
    weight: float
    share_group: str | None
    limits: TenantLimits
    num_sessions: int
    num_calls_in_flight: int


class TenantList(Answer):
    tenants: list[TenantView]


class EngineList(Answer):
    engines: list[EngineStatus]


def admin_endpoints(core: ServeCore) -> list[Endpoint]:
    """Cancel, end and drain what is anybody's."""

    def tenants() -> TenantList:
        return TenantList(tenants=[_view(core, tenant) for tenant in core.tenants])

    def engines() -> EngineList:
        return EngineList(engines=[engine_view(engine) for engine in core.fleet.views()])

    def drain(engine_id: int, is_wanted: bool) -> None:
        core.dispatcher.drains.drain(engine_id, is_wanted=is_wanted)

    def end(session_id: int) -> None:
        session = _find(core, session_id)
        core.delete_session(session.id, session.auth)

    def cancel(session_id: int, request_id: int) -> None:
        session = _find(core, session_id)
        core.cancel_call(session.id, session.auth, request_id)

    def endpoint(method: str, path: str, verb: Verb, summary: str) -> Endpoint:
        one = Endpoint(
            method,
            path,
            verb,
            summary,
            access=Access.ADMIN,
            body=SMALL_BODY,
            described=Described((401, 403, 404)),
        )
        return one.checked(holder_of(core, Scope.ADMIN))

    return [
        endpoint("GET", "/v1/admin/tenants", tenants, "Tenants with keys, and what they have now"),
        endpoint("GET", "/v1/admin/engines", engines, "Live engines"),
        endpoint(
            "POST",
            "/v1/admin/engine/{engine_id}/drain",
            taking(Drain, drain),
            "Give an engine no more calls, or calls again",
        ),
        endpoint("DELETE", "/v1/admin/session/{session_id}", end, "End anybody's session"),
        endpoint(
            "DELETE",
            "/v1/admin/session/{session_id}/request/{request_id}",
            cancel,
            "Cancel a call of anybody's session",
        ),
    ]


def _find(core: ServeCore, session_id: int) -> Session:
    if core.sessions.shard is not None:
        core.sessions.shard.require_session(session_id)
    session = core.sessions.find(session_id)
    if session is None:
        raise NotFound(f"no live session {session_id}")
    return session


def _view(core: ServeCore, tenant: Tenant) -> TenantView:
    return TenantView(
        id=tenant.id,
        scopes=sorted(tenant.scopes),
        weight=tenant.weight,
        share_group=tenant.share_group,
        limits=tenant.limits,
        num_sessions=core.sessions.num_of(tenant.id),
        num_calls_in_flight=core.tasks.meters.num_running(tenant.id),
    )
