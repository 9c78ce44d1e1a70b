"""The routes under `/v1`: each reads its fields, calls one verb of ServeCore, writes the answer."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel

from parrot.protocol.public import (
    CallResponse,
    EmptyResponse,
    FirstVarsRequest,
    FirstVarsResponse,
    ModelsResponse,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    SessionCreateResponse,
    SessionInfo,
    SessionScoped,
    StreamDelta,
    StreamDone,
    VarCreateRequest,
    VarCreateResponse,
    VarGetRequest,
    VarGetResponse,
    VarListResponse,
    VarSetRequest,
)
from parrot.protocol.server import (
    bearer_token,
    event_stream,
    json_response,
    parse_payload,
    read_json,
    run_until_disconnect,
)
from parrot.serve.api.openapi import describe
from parrot.serve.core import ServeCore
from parrot.serve.graph.links import VariableNode
from parrot.serve.programs import Programs
from parrot.serve.views import value_view

HOT_ROUTES = (("GET", "/v1/semantic_var/{var_id}"), ("POST", "/v1/semantic_call"))

_EMPTY = EmptyResponse()
_SCOPED = (401, 404, 410)
_SUBMIT = (*_SCOPED, 409, 413, 429)
_READ = (*_SCOPED, 409, 429, 499, 502, 503, 504)
_EVENTS = (
    "Events `delta` with `{text}` from the first token on, whenever the reader came; then one final"
    " event: `done` with `{content, finish_reason, usage}`, or `error` with an error body. Comments"
    " keep it alive."
)


def add_v1_routes(app: FastAPI, core: ServeCore) -> None:
    _add_session_routes(app, core)
    _add_call_routes(app, core.programs)
    _add_variable_routes(app, core.programs)
    _add_read_routes(app, core.programs)

    @app.get("/v1/models", **describe("Models that are served now", response=ModelsResponse))
    async def models() -> Response:
        return json_response(core.models())


def _add_session_routes(app: FastAPI, core: ServeCore) -> None:
    @app.post(
        "/v1/session",
        **describe(
            "Begin a session",
            request=SessionCreateRequest,
            response=SessionCreateResponse,
            errors=(401, 429, 503),
        ),
    )
    async def create_session(request: Request) -> Response:
        fields = await read_fields(request, bearer="api_key")
        return json_response(core.create_session(parse_payload(SessionCreateRequest, fields)))

    @app.get(
        "/v1/session/{session_id}",
        **describe(
            "State, variables, calls, graph and timings of a session",
            request=SessionScoped,
            response=SessionInfo,
            errors=_SCOPED,
        ),
    )
    async def session_info(request: Request, session_id: int) -> Response:
        scope = await _read_scope(request, session_id)
        return json_response(core.session_info(session_id, scope.session_auth))

    @app.delete(
        "/v1/session/{session_id}",
        **describe(
            "End a session: work is cancelled, contexts freed, open reads get an error",
            request=SessionScoped,
            response=EmptyResponse,
            errors=_SCOPED,
        ),
    )
    async def delete_session(request: Request, session_id: int) -> Response:
        scope = await _read_scope(request, session_id)
        core.delete_session(session_id, scope.session_auth)
        return json_response(_EMPTY)


def _add_call_routes(app: FastAPI, programs: Programs) -> None:
    @app.post(
        "/v1/semantic_call",
        **describe(
            "Submit a semantic call; a read makes it run",
            request=SemanticCallRequest,
            response=CallResponse,
            errors=_SUBMIT,
        ),
    )
    async def semantic_call(request: Request) -> Response:
        fields = await read_fields(request)
        return json_response(programs.submit_call(parse_payload(SemanticCallRequest, fields)))

    @app.post(
        "/v1/py_native_call",
        **describe(
            "Submit a native function's call; a read makes it run, in a sandbox",
            request=NativeCallRequest,
            response=CallResponse,
            errors=_SUBMIT,
        ),
    )
    async def native_call(request: Request) -> Response:
        fields = await read_fields(request)
        return json_response(programs.submit_native(parse_payload(NativeCallRequest, fields)))

    @app.post(
        "/v1/request/{request_id}/cancel",
        **describe(
            "Cancel every output of a call",
            request=SessionScoped,
            response=EmptyResponse,
            errors=_SCOPED,
        ),
    )
    async def cancel_call(request: Request, request_id: int) -> Response:
        scope = parse_payload(SessionScoped, await read_fields(request))
        programs.cancel_call(scope.session_id, scope.session_auth, request_id)
        return json_response(_EMPTY)


def _add_variable_routes(app: FastAPI, programs: Programs) -> None:
    @app.post(
        "/v1/semantic_var",
        **describe(
            "Create a variable",
            request=VarCreateRequest,
            response=VarCreateResponse,
            errors=(*_SCOPED, 413, 429),
        ),
    )
    async def create_var(request: Request) -> Response:
        fields = parse_payload(VarCreateRequest, await read_fields(request))
        var_id = programs.create_var(
            fields.session_id, fields.session_auth, fields.var_name, fields.content
        )
        return json_response(VarCreateResponse(var_id=var_id))

    @app.get(
        "/v1/semantic_var",
        **describe(
            "All variables of a session",
            request=SessionScoped,
            response=VarListResponse,
            errors=_SCOPED,
        ),
    )
    async def list_vars(request: Request) -> Response:
        scope = parse_payload(SessionScoped, await read_fields(request))
        return json_response(programs.list_vars(scope.session_id, scope.session_auth))

    @app.post(
        "/v1/semantic_var/{var_id}",
        **describe(
            "Set a variable, once",
            request=VarSetRequest,
            response=EmptyResponse,
            errors=(*_SCOPED, 409, 413, 429),
        ),
    )
    async def set_var(request: Request, var_id: str) -> Response:
        fields = parse_payload(VarSetRequest, await read_fields(request))
        programs.set_var(fields.session_id, fields.session_auth, var_id, fields.content)
        return json_response(_EMPTY)

    @app.post(
        "/v1/semantic_var/{var_id}/cancel",
        **describe(
            "Stop making a variable",
            request=SessionScoped,
            response=EmptyResponse,
            errors=_SCOPED,
        ),
    )
    async def cancel_var(request: Request, var_id: str) -> Response:
        scope = parse_payload(SessionScoped, await read_fields(request))
        programs.cancel_var(scope.session_id, scope.session_auth, var_id)
        return json_response(_EMPTY)


def _add_read_routes(app: FastAPI, programs: Programs) -> None:
    @app.get(
        "/v1/semantic_var/{var_id}",
        **describe(
            "Wait for a variable's value (long poll), which makes its work run",
            request=VarGetRequest,
            response=VarGetResponse,
            errors=_READ,
        ),
    )
    async def get_var(request: Request, var_id: str) -> Response:
        fields = parse_payload(VarGetRequest, await read_fields(request))
        node = programs.node(fields, var_id)
        if programs.settled(fields, var_id) is None:
            await run_until_disconnect(request, programs.read(fields, var_id))
        return json_response(value_view(node))

    @app.post(
        "/v1/semantic_vars/first",
        **describe(
            "Wait for the first k of some variables; work for the others stops",
            request=FirstVarsRequest,
            response=FirstVarsResponse,
            errors=_READ,
        ),
    )
    async def first_vars(request: Request) -> Response:
        fields = parse_payload(FirstVarsRequest, await read_fields(request))
        return json_response(await run_until_disconnect(request, programs.first(fields)))

    @app.get(
        "/v1/semantic_var/{var_id}/stream",
        **describe(
            "A variable's text as it is made", request=VarGetRequest, errors=_READ, events=_EVENTS
        ),
    )
    async def stream_var(request: Request, var_id: str) -> Response:
        fields = parse_payload(VarGetRequest, await read_fields(request))
        return event_stream(_events(programs.stream(fields, var_id), programs.node(fields, var_id)))


async def _events(
    deltas: AsyncGenerator[str], node: VariableNode
) -> AsyncIterator[tuple[str, BaseModel]]:
    async with aclosing(deltas):  # a reader that goes is withdrawn now, not when collected
        async for text in deltas:
            yield "delta", StreamDelta(text=text)
    yield "done", StreamDone(**dict(value_view(node)))


async def read_fields(request: Request, *, bearer: str = "session_auth") -> Any:
    """The request's fields: the JSON body over query parameters, for any method. A Bearer token
    stands for the field `bearer` if that is not given."""
    fields = await read_json(request)
    if not isinstance(fields, dict):
        return fields  # validation says what is wrong with it
    if request.scope["query_string"]:
        fields = dict(request.query_params) | fields
    if fields.get(bearer) is None and (token := bearer_token(request)) is not None:
        fields[bearer] = token
    return fields


async def _read_scope(request: Request, session_id: int) -> SessionScoped:
    fields = await read_fields(request)
    if isinstance(fields, dict):
        fields["session_id"] = session_id
    return parse_payload(SessionScoped, fields)
