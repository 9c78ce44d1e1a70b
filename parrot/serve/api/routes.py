"""ServeCore's REST API: which verb answers which method and path."""

from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

from fastapi import Request
from pydantic import BaseModel

from parrot.protocol.endpoint import (
    ANY_BODY,
    SMALL_BODY,
    Access,
    BodyRules,
    Described,
    Durable,
    Endpoint,
    bearer_token,
    durably,
    lasting,
    taking,
)
from parrot.protocol.public import (
    GraphRequest,
    GraphResponse,
    SessionCreateRequest,
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
from parrot.serve.api.admin import admin_endpoints
from parrot.serve.api.service import service_endpoints
from parrot.serve.api.session_list import SessionList
from parrot.serve.core import ServeCore
from parrot.serve.graph.variable import SemanticVariable
from parrot.serve.views import read_view
from parrot.utils.tasks import in_turns

_SCOPED = (401, 404, 410)
_SUBMIT = (*_SCOPED, 409, 413, 429, 507)
_READ = (*_SCOPED, 409, 429, 499, 502, 503, 504)
_EVENTS = (
    "Events `delta` with `{text}` from the first token on, whenever the reader came; then one final"
    " event: `done` with `{content, finish_reason, usage}`, or `error` with an error body. Comments"
    " keep it alive."
)


def endpoints(core: ServeCore) -> list[Endpoint]:
    """The two that every call needs come first, since routes are tried in order."""
    return [
        *_call_endpoints(core),
        *_variable_endpoints(core),
        *_read_endpoints(core),
        *_session_endpoints(core),
        *service_endpoints(core),
        *admin_endpoints(core),
    ]


def _call_endpoints(core: ServeCore) -> list[Endpoint]:
    known = _known(core)
    durable, published = _durable(core), _published(core)

    async def submit_graph(request: GraphRequest) -> GraphResponse:
        return await _submit_graph(core, request, durable)

    return [
        Endpoint(
            "GET",
            "/v1/semantic_var/{var_id}",
            core.read,
            "Wait for a variable's value (long poll), which makes its work run",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_READ),
        ),
        Endpoint(
            "POST",
            "/v1/semantic_call",
            lasting(core.submit_call, durable),
            "Submit a semantic call; a read makes it run",
            body=known,
            access=Access.SESSION,
            described=Described(_SUBMIT),
        ),
        Endpoint(
            "POST",
            "/v1/py_native_call",
            lasting(core.submit_native, durable),
            "Submit a native function's call; a read makes it run, in a sandbox",
            body=known,
            access=Access.SESSION,
            described=Described(_SUBMIT),
        ),
        Endpoint(
            "POST",
            "/v1/semantic_graph",
            submit_graph,
            "Submit variables and calls that name each other, all of them or none",
            body=known if core.tenants.is_closed else ANY_BODY,
            access=Access.SESSION_OR_KEY,
            described=Described((*_SUBMIT, 503)),
        ),
        Endpoint(
            "POST",
            "/v1/request/{request_id}/cancel",
            lasting(taking(SessionScoped, core.cancel_call), published),
            "Cancel every output of a call",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_SCOPED),
        ),
    ]


def _variable_endpoints(core: ServeCore) -> list[Endpoint]:
    known = _known(core)
    durable, published = _durable(core), _published(core)

    def create_var(request: VarCreateRequest) -> VarCreateResponse:
        return VarCreateResponse(var_id=core.create_var(**dict(request)))

    return [
        Endpoint(
            "POST",
            "/v1/semantic_var",
            lasting(create_var, durable),
            "Create a variable",
            body=known,
            access=Access.SESSION,
            described=Described((*_SCOPED, 413, 429, 507)),
        ),
        Endpoint(
            "GET",
            "/v1/semantic_var",
            lasting(taking(SessionScoped, core.list_vars), published),
            "All variables of a session",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_SCOPED),
        ),
        Endpoint(
            "POST",
            "/v1/semantic_var/{var_id}",
            lasting(taking(VarSetRequest, core.set_var), durable),
            "Set a variable, once",
            body=known,
            access=Access.SESSION,
            described=Described((*_SCOPED, 409, 413, 429, 507)),
        ),
        Endpoint(
            "POST",
            "/v1/semantic_var/{var_id}/cancel",
            lasting(taking(SessionScoped, core.cancel_var), published),
            "Stop making a variable",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_SCOPED),
        ),
    ]


def _read_endpoints(core: ServeCore) -> list[Endpoint]:

    def stream_var(request: VarGetRequest, var_id: str) -> AsyncIterator[tuple[str, BaseModel]]:
        return _events(core.stream(request, var_id), core.variable(request, var_id))

    return [
        Endpoint(
            "POST",
            "/v1/semantic_vars/first",
            core.first,
            "Wait for the first k of some variables; work for the others stops",
            body=_known(core),
            access=Access.SESSION,
            described=Described(_READ),
        ),
        Endpoint(
            "GET",
            "/v1/semantic_var/{var_id}/stream",
            stream_var,
            "A variable's text as it is made",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_READ, about=_EVENTS, media_type="text/event-stream"),
        ),
    ]


def _session_endpoints(core: ServeCore) -> list[Endpoint]:
    durable, published = _durable(core), _published(core)

    async def session_info(session_id: int, session_auth: str | None) -> SessionInfo:
        return await in_turns(core.session_steps(session_id, session_auth))

    async def create_session(request: SessionCreateRequest) -> SessionCreateResponse:
        session = core.create_session(request)
        with _known_or_ended(core, session.model_dump()):
            if durable is not None:
                await durable()
        return session

    return [
        Endpoint(
            "POST",
            "/v1/session",
            create_session,
            "Begin a session",
            body=SMALL_BODY,
            access=Access.API_KEY,
            described=Described((401, 429, 503, 507)),
        ),
        Endpoint(
            "GET",
            "/v1/sessions",
            SessionList(core).read,
            "The live sessions of an API key (Bearer), the newest first",
            body=SMALL_BODY,
            access=Access.API_KEY,
            described=Described((401, 503)),
        ),
        Endpoint(
            "GET",
            "/v1/session/{session_id}",
            lasting(taking(SessionScoped, session_info), published),
            "State, variables, calls, graph and timings of a session",
            body=SMALL_BODY,
            access=Access.SESSION_OR_KEY,
            described=Described(_SCOPED),
        ),
        Endpoint(
            "DELETE",
            "/v1/session/{session_id}",
            lasting(taking(SessionScoped, core.delete_session), published),
            "End a session: work is cancelled, contexts freed, open reads get an error",
            body=SMALL_BODY,
            access=Access.SESSION,
            described=Described(_SCOPED),
        ),
    ]


def _durable(core: ServeCore) -> Durable | None:
    """Acknowledge what adds something when it is on disk, if it is written down at all."""
    journal = core.sessions.journal
    return None if journal is None else journal.durable


def _published(core: ServeCore) -> Durable | None:
    """Acknowledge what ends something so, too; while nothing can be written, when it is done."""
    journal = core.sessions.journal
    return None if journal is None else journal.published


def _known(core: ServeCore) -> BodyRules:
    """Bodies that are large only if the head tells who sends them."""

    def admits(request: Request) -> bool:
        credential = bearer_token(request) or request.query_params.get("session_auth", "")
        if core.sessions.shard is not None:
            core.sessions.shard.require_token(credential)
        return core.sessions.is_auth(credential) or core.tenants.find_by_key(credential) is not None

    return BodyRules(admits=admits)


@contextmanager
def _known_or_ended(core: ServeCore, scope: Mapping[str, Any]) -> Iterator[None]:
    """End a new session if the block raises, be it since the client left: nobody knows of it."""
    try:
        yield
    except BaseException:
        core.delete_session(**scope)
        raise


def begun_session(request: GraphRequest) -> SessionCreateRequest | None:
    """The session that is to begin with the graph; None if it has one."""
    wanted = request.session
    if wanted is None or wanted.api_key is not None:
        return wanted
    return wanted.model_copy(update={"api_key": request.session_auth})


async def _submit_graph(
    core: ServeCore, request: GraphRequest, durable: Durable | None
) -> GraphResponse:
    """If the graph is to have a session of its own, that begins only if all of it is right."""
    begun = begun_session(request)
    if begun is None:
        async with durably(durable):
            return core.submit_graph(request)
    scope = core.create_session(begun).model_dump()
    with _known_or_ended(core, scope):
        async with durably(durable):
            response = core.submit_graph(request.model_copy(update=scope))
    return response.model_copy(update=scope)


async def _events(
    deltas: AsyncGenerator[str], variable: SemanticVariable
) -> AsyncIterator[tuple[str, BaseModel]]:
    async with aclosing(deltas):  # a reader that goes is withdrawn now, not when collected
        async for text in deltas:
            yield "delta", StreamDelta(text=text)
    yield "done", StreamDone(**dict(await read_view(variable)))
