"""ServeCore's endpoints: the verb for each method and path.

A route reads the fields, calls one verb of `ServeCore`, and serializes the answer. Routes do not
know how verbs work, and verbs do not know HTTP."""

import asyncio
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Callable,
)
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from parrot.protocol.answers import Check
from parrot.protocol.endpoint import (
    ANY_BODY,
    LARGE,
    SMALL_BODY,
    Access,
    BodyRules,
    Described,
    Endpoint,
    Verb,
    api_key_of,
    bearer_token,
    headers_of,
    knows_cluster_token,
    require_cluster_token,
    taking,
)
from parrot.protocol.errors import AuthenticationFailed, NotFound
from parrot.protocol.public import (
    Answer,
    DrainRequest,
    EngineStatus,
    GraphRequest,
    GraphResponse,
    ModelCard,
    SessionCreateResponse,
    SessionInfo,
    SessionScoped,
    StreamDelta,
    StreamDone,
    VarCreateRequest,
    VarCreateResponse,
    VarGetRequest,
    VarSetRequest,
)
from parrot.serve.core import ServeCore
from parrot.serve.durability import Wait, durable_verb
from parrot.serve.graph.nodes import SemanticVariable
from parrot.serve.readers import read_view
from parrot.serve.sessions import Session
from parrot.serve.tenants.table import Scope, Tenant, TenantLimits
from parrot.serve.views import engine_view
from parrot.utils.metrics import CONTENT_TYPE
from parrot.utils.tasks import in_turns

_SCOPED = (401, 404, 410)
_SUBMIT = (*_SCOPED, 409, 413, 429, 507)
_READ = (*_SCOPED, 409, 429, 499, 502, 503, 504)
_EVENTS = (
    "Events `delta` with `{text}`, from the first token, also for a late reader. The last event is"
    " `done` with `{content, finish_reason, usage}`, or `error` with an error body. Comments keep"
    " the connection alive."
)


def endpoints(core: ServeCore) -> list[Endpoint]:
    """All endpoints. Routes are tried in order, so the reads come first."""
    return [*_program_endpoints(core), *_service_endpoints(core), *_admin_endpoints(core)]


def _program_endpoints(core: ServeCore) -> list[Endpoint]:
    return _ProgramRoutes(core).endpoints()


@dataclass(frozen=True, slots=True)
class _ProgramRoutes:
    """The routes of sessions, calls, variables and reads."""

    core: ServeCore

    def endpoints(self) -> list[Endpoint]:
        return [*self._calls(), *self._variables(), *self._sessions()]

    def _calls(self) -> list[Endpoint]:
        core, known = self.core, BodyRules(admits=self._admits)
        return [
            self._route(
                "GET",
                "/v1/semantic_var/{var_id}",
                core.read,
                "Wait for a variable's value (long poll), and start the call that sets it",
                _READ,
                wait=Wait.NOTHING,
            ),
            Endpoint(
                "GET",
                "/v1/semantic_var/{var_id}/stream",
                self._stream_var,
                "A variable's text while it is generated",
                body=SMALL_BODY,
                access=Access.SESSION,
                described=Described(_READ, about=_EVENTS, media_type="text/event-stream"),
            ),
            self._route(
                "POST",
                "/v1/semantic_call",
                core.submit_call,
                "Submit a semantic call; a read of its output starts it",
                _SUBMIT,
                body=known,
            ),
            self._route(
                "POST",
                "/v1/py_native_call",
                core.submit_native,
                "Submit a call of a native function; a read starts it, in a sandbox",
                _SUBMIT,
                body=known,
            ),
            self._route(
                "POST",
                "/v1/semantic_graph",
                self._submit_graph,
                "Submit variables and calls that refer to each other, all of them or none",
                (*_SUBMIT, 503),
                body=known if core.tenants.is_closed else ANY_BODY,
                access=Access.SESSION_OR_KEY,
                undo=self._end_new,
            ),
            self._route(
                "POST",
                "/v1/request/{request_id}/cancel",
                taking(SessionScoped, core.cancel_call),
                "Cancel every output of a call",
                _SCOPED,
                wait=Wait.PUBLISHED,
            ),
        ]

    def _variables(self) -> list[Endpoint]:
        core, known = self.core, BodyRules(admits=self._admits)
        return [
            self._route(
                "POST",
                "/v1/semantic_var",
                self._create_var,
                "Create a variable",
                (*_SCOPED, 413, 429, 507),
                body=known,
            ),
            self._route(
                "GET",
                "/v1/semantic_var",
                taking(SessionScoped, core.list_vars),
                "All variables of a session",
                _SCOPED,
                wait=Wait.PUBLISHED,
            ),
            self._route(
                "POST",
                "/v1/semantic_var/{var_id}",
                taking(VarSetRequest, core.set_var),
                "Set a variable, once",
                (*_SCOPED, 409, 413, 429, 507),
                body=known,
            ),
            self._route(
                "POST",
                "/v1/semantic_var/{var_id}/cancel",
                taking(SessionScoped, core.cancel_var),
                "Cancel a variable",
                _SCOPED,
                wait=Wait.PUBLISHED,
            ),
            self._route(
                "POST",
                "/v1/semantic_vars/first",
                core.first,
                "Wait for the first k of several variables; the others are cancelled",
                _READ,
                wait=Wait.NOTHING,
                body=known,
            ),
        ]

    def _sessions(self) -> list[Endpoint]:
        core = self.core
        return [
            self._route(
                "POST",
                "/v1/session",
                core.create_session,
                "Begin a session",
                (401, 429, 503, 507),
                access=Access.API_KEY,
                undo=self._end_new,
            ),
            self._route(
                "GET",
                "/v1/sessions",
                core.list_sessions,
                "The live sessions of an API key (Bearer), the newest first",
                (401, 503),
                access=Access.API_KEY,
                wait=Wait.NOTHING,
            ),
            self._route(
                "GET",
                "/v1/session/{session_id}",
                taking(SessionScoped, self._session_info),
                "State, variables, calls, graph and timings of a session",
                _SCOPED,
                access=Access.SESSION_OR_KEY,
                wait=Wait.PUBLISHED,
            ),
            self._route(
                "DELETE",
                "/v1/session/{session_id}",
                taking(SessionScoped, core.delete_session),
                "End a session: work is cancelled, contexts freed, open reads get an error",
                _SCOPED,
                wait=Wait.PUBLISHED,
            ),
        ]

    def _route(
        self,
        method: str,
        path: str,
        verb: Verb,
        summary: str,
        errors: tuple[int, ...],
        *,
        body: BodyRules = SMALL_BODY,
        access: Access = Access.SESSION,
        wait: Wait = Wait.DURABLE,
        undo: Callable[[Any], None] | None = None,
    ) -> Endpoint:
        described = Described(errors)
        verb = durable_verb(verb, self.core.sessions.journal, wait, undo)
        return Endpoint(method, path, verb, summary, body=body, access=access, described=described)

    def _admits(self, request: Request) -> bool:
        """A large body is accepted only from a known session or key, which the headers contain."""
        core = self.core
        credential = bearer_token(headers_of(request)) or request.query_params.get(
            "session_auth", ""
        )
        if core.sessions.shard is not None:
            core.sessions.shard.require_token(credential)
        return core.sessions.is_auth(credential) or core.tenants.find_by_key(credential) is not None

    def _submit_graph(self, request: GraphRequest) -> GraphResponse:
        """Submit a graph. A session of its own is created only if the whole graph is valid."""
        begun = request.begins()
        if begun is None:
            return self.core.submit_graph(request)
        scope = self.core.create_session(begun).model_dump()
        try:
            response = self.core.submit_graph(request.model_copy(update=scope))
        except BaseException:
            self.core.delete_session(**scope)
            raise
        return response.model_copy(update=scope)

    def _end_new(self, answer: SessionCreateResponse | GraphResponse) -> None:
        """End the new session of an answer that cannot be sent."""
        if answer.session_auth is not None:
            self.core.delete_session(answer.session_id, answer.session_auth)

    async def _session_info(self, session_id: int, session_auth: str | None) -> SessionInfo:
        return await in_turns(self.core.session_steps(session_id, session_auth))

    def _create_var(self, request: VarCreateRequest) -> VarCreateResponse:
        return VarCreateResponse(var_id=self.core.create_var(**dict(request)))

    def _stream_var(
        self, request: VarGetRequest, var_id: str
    ) -> AsyncIterator[tuple[str, BaseModel]]:
        core = self.core
        return _events(core.stream(request, var_id), core.variable(request, var_id))


async def _events(
    deltas: AsyncGenerator[str], variable: SemanticVariable
) -> AsyncIterator[tuple[str, BaseModel]]:
    async with aclosing(deltas):  # Withdraw the read at once when the client disconnects.
        async for text in deltas:
            yield "delta", StreamDelta(text=text)
    yield "done", StreamDone(**dict(await read_view(variable)))


def _service_endpoints(core: ServeCore) -> list[Endpoint]:
    def model(model_id: str) -> ModelCard:
        for card in core.models().data:
            if card.id == model_id:
                return card
        raise NotFound(f"unknown model: {model_id}", param="model")

    async def metrics() -> bytes:
        parts: list[bytes] = []
        for part in core.metrics():
            parts.append(part)
            await asyncio.sleep(0)  # Let other tasks run.
        return b"".join(parts)

    def with_key(path: str, verb: Verb, summary: str, *errors: int) -> Endpoint:
        endpoint = Endpoint(
            "GET", path, verb, summary, access=Access.API_KEY, described=Described(errors)
        )
        return endpoint.checked(key_check(core))

    return [
        with_key("/v1/models", core.models, "The served models", 401, 403),
        with_key("/v1/models/{model_id:path}", model, "A model", 401, 403, 404),
        Endpoint("GET", "/health", _alive, "The process is alive", access=Access.ANYBODY),
        _ready_endpoint(core),
        Endpoint(
            "GET",
            "/metrics",
            metrics,
            "Metrics for Prometheus (Bearer: the cluster token, or a key)",
            access=Access.METRICS,
            described=Described((401, 403), media_type=CONTENT_TYPE),
        ).checked(_holder_of(core, Scope.METRICS)),
        *_engine_endpoints(core),
    ]


def key_check(core: ServeCore) -> Check:
    """A check that requires an API key, if there are any."""

    def check(request: Request) -> None:
        core.tenant(api_key_of(headers_of(request)))

    return check


def _holder_of(core: ServeCore, scope: Scope) -> Callable[[Request], str]:
    """A check that returns the caller's name: one with the cluster token, or with a key with the
    scope. The check raises `AuthenticationFailed` and `PermissionDenied`."""
    token = core.config.cluster_token

    def holder(request: Request) -> str:
        if knows_cluster_token(request, token):
            return "operator"
        tenant = core.tenants.find_by_key(api_key_of(headers_of(request)) or "")
        if tenant is None:
            raise AuthenticationFailed(
                f"missing or wrong cluster token, or API key with the scope `{scope}` "
                "(`Authorization: Bearer`)"
            )
        tenant.require(scope)
        return f"operator {tenant.id}"

    return holder


def _engine_check(core: ServeCore) -> Callable[[Request], str]:
    token = core.config.cluster_token

    def check(request: Request) -> str:
        require_cluster_token(request, token)
        return "engine"

    return check


def _engine_endpoints(core: ServeCore) -> list[Endpoint]:
    def of_engines(path: str, verb: Verb, summary: str, body: BodyRules, *errors: int) -> Endpoint:
        endpoint = Endpoint(
            "POST",
            path,
            verb,
            f"{summary} (Bearer: the cluster token)",
            access=Access.CLUSTER,
            body=body,
            described=Described(errors),
        )
        return endpoint.checked(_engine_check(core))

    return [
        of_engines(
            "/register_engine",
            core.register_engine,
            "An engine joins",
            SMALL_BODY,
            401,
            409,
            429,
            503,
        ),
        of_engines(
            "/engine_heartbeat", core.fleet.heartbeat, "An engine is alive", BodyRules(LARGE), 401
        ),
        of_engines(
            "/engine_leave",
            core.dispatcher.drains.leave,
            "An engine is shutting down",
            SMALL_BODY,
            401,
            404,
        ),
    ]


def _ready_endpoint(core: ServeCore) -> Endpoint:
    """The endpoint lists the engines only for callers with the cluster token."""
    token = core.config.cluster_token

    def sees_engines(request: Request, arguments: dict[str, Any]) -> None:
        arguments["sees_engines"] = knows_cluster_token(request, token)

    return Endpoint(
        "GET",
        "/ready",
        core.readiness,
        "At least one engine is registered (Bearer: the cluster token, to list them)",
        access=Access.ANYBODY,
        described=Described((503,)),
    ).stepping(sees_engines)


def _alive() -> None:
    pass


class TenantView(Answer):
    """A tenant that has a key, and its current usage."""

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


def _admin_endpoints(core: ServeCore) -> list[Endpoint]:
    """Endpoints that list, cancel, end and drain objects of all tenants."""

    def tenants() -> TenantList:
        return TenantList(tenants=[_tenant_view(core, tenant) for tenant in core.tenants])

    def engines() -> EngineList:
        return EngineList(engines=[engine_view(engine) for engine in core.fleet.views()])

    def drain(engine_id: int, is_wanted: bool) -> None:
        core.dispatcher.drains.drain(engine_id, is_draining=is_wanted)

    def end(session_id: int) -> None:
        session = _live_session(core, session_id)
        core.delete_session(session.id, session.auth)

    def cancel(session_id: int, request_id: int) -> None:
        session = _live_session(core, session_id)
        core.cancel_call(session.id, session.auth, request_id)

    def endpoint(method: str, path: str, verb: Verb, summary: str) -> Endpoint:
        wait = Wait.PUBLISHED if method == "DELETE" else Wait.NOTHING
        one = Endpoint(
            method,
            path,
            durable_verb(verb, core.sessions.journal, wait),
            summary,
            access=Access.ADMIN,
            body=SMALL_BODY,
            described=Described((401, 403, 404)),
        )
        return one.checked(_holder_of(core, Scope.ADMIN))

    return [
        endpoint("GET", "/v1/admin/tenants", tenants, "Tenants with keys, and their usage"),
        endpoint("GET", "/v1/admin/engines", engines, "Live engines"),
        endpoint(
            "POST",
            "/v1/admin/engine/{engine_id}/drain",
            taking(DrainRequest, drain),
            "Drain an engine, or let it receive calls again",
        ),
        endpoint("DELETE", "/v1/admin/session/{session_id}", end, "End a session of any tenant"),
        endpoint(
            "DELETE",
            "/v1/admin/session/{session_id}/request/{request_id}",
            cancel,
            "Cancel a call in a session of any tenant",
        ),
    ]


def _live_session(core: ServeCore, session_id: int) -> Session:
    if core.sessions.shard is not None:
        core.sessions.shard.require_session(session_id)
    session = core.sessions.find(session_id)
    if session is None:
        raise NotFound(f"no live session {session_id}")
    return session


def _tenant_view(core: ServeCore, tenant: Tenant) -> TenantView:
    meters = core.tasks.meters
    return TenantView(
        id=tenant.id,
        scopes=sorted(tenant.scopes),
        weight=tenant.weight,
        share_group=tenant.share_group,
        limits=tenant.limits,
        num_sessions=core.sessions.num_of(tenant.id),
        num_calls_in_flight=0 if meters is None else meters.num_running(tenant.id),
    )
