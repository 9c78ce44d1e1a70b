"""Endpoints: the verbs of a server, each under a method and a path, and their description for
OpenAPI."""

import inspect
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Route

from parrot.protocol.errors import Conflict, SessionGone
from parrot.protocol.gate.access import Access, Check, RuledRoute, rules
from parrot.protocol.gate.bodies import ANY_BODY, BodyRules, declared_size
from parrot.protocol.gate.fields import Id, Label, Path
from parrot.protocol.public import Answer, EmptyResponse
from parrot.protocol.server import (
    EventStream,
    bearer_token,
    has_long_list,
    idempotency_key_of,
    json_in_turns,
    json_response,
    others_first,
    parse_payload,
    read_json,
    run_until_disconnect,
)
from parrot.utils.traces.traceparent import TraceParent


class PathParameters(BaseModel):
    """The names that may stand in the braces of a path."""

    session_id: Id = 0
    request_id: Id = 0
    var_id: Label = ""
    model_id: Path = ""
    engine_id: Id = 0
    response_id: Label = ""


Durable = Callable[[], Awaitable[None]]
"""Waits until what was done is for good."""


class Lasting:
    """For the block that does something, or says that it was done before: its end is told when that
    is for good, so that a restart cannot take it back."""

    __slots__ = ("_durable",)

    def __init__(self, durable: Durable | None) -> None:
        self._durable = durable

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._durable is not None and (kind is None or issubclass(kind, _DONE_BEFORE)):
            await self._durable()


_DONE_BEFORE = (Conflict, SessionGone)


class Endpoint:
    """One verb of a server.

    `verb` is called with the request (the model that annotates its parameter `request`) or with the
    fields of `takes`, and with those parameters of the path that are no such fields. It gives a
    model, None (for `{}`), bytes, or server-sent events; an awaitable of one is cancelled when the
    client goes away.

    The fields are those of the JSON body, over the query's, for any method. A Bearer token stands
    for the field `bearer` if that is not given, and the headers `traceparent` and `Idempotency-Key`
    for those fields.
    `access`: who may use it, and `check` what says so, if the verb does not. `body`: which bodies
    are read. `durable` is awaited before it is told that something was done, now or before.
    `errors` (statuses that it may fail with, besides 400 and 422), `about` and `may_stream` (it
    gives server-sent events to those who ask for them) only describe it."""

    def __init__(
        self,
        method: str,
        path: str,
        verb: Callable[..., Any],
        summary: str = "",
        *,
        access: Access,
        check: Check | None = None,
        takes: type[BaseModel] | None = None,
        errors: tuple[int, ...] = (),
        bearer: str = "session_auth",
        media_type: str = "application/json",
        about: str = "OK",
        may_stream: bool = False,
        body: BodyRules = ANY_BODY,
        durable: Durable | None = None,
    ) -> None:
        signature = inspect.signature(verb)
        request = signature.parameters.get("request")
        self.method = method
        self.path = path
        self.summary = summary
        self.takes: type[BaseModel] | None = takes if request is None else request.annotation
        self.gives = signature.return_annotation
        self.access = access
        self.errors = errors
        self.media_type = media_type
        self.about = about
        self.may_stream = may_stream
        self._verb = verb
        self._wants_request = request is not None
        fields = {} if self.takes is None else self.takes.model_fields
        self._is_traced = "traceparent" in fields
        self._is_repeatable = "idempotency_key" in fields
        self._bearer = bearer
        self._check = check
        self._body = body
        self._durable = durable

    def route(self) -> Route:
        """A plain route: FastAPI's, which resolve dependencies, cost more than all of ServeCore's
        own work on a call."""
        route = RuledRoute(self.path, self._answer, self.access, methods=[self.method])
        if self.takes is not None:
            route.methods = {self.method}  # without HEAD, which would be a read
        return route

    async def _answer(self, request: Request) -> Response:
        if self._check is not None:
            self._check(request)
        arguments = await self._arguments(request)
        async with Lasting(self._durable):
            result = self._verb(**arguments)
            if inspect.isawaitable(result):
                result = await run_until_disconnect(request, result)
        if isinstance(result, BaseModel) and has_long_list(result):
            result = await json_in_turns(result)
        return self._response(result)

    async def _arguments(self, request: Request) -> dict[str, Any]:
        """The arguments that the verb is called with."""
        arguments: dict[str, Any] = {}
        if request.path_params:
            path = parse_payload(PathParameters, request.path_params)
            arguments = {name: getattr(path, name) for name in request.path_params}
        if self.takes is not None:
            fields = await self._read_fields(request)
            for name in arguments.keys() & self.takes.model_fields:
                value = arguments.pop(name)
                if isinstance(fields, dict):
                    fields[name] = value
            payload = parse_payload(self.takes, fields)
            await others_first(declared_size(request))
            arguments |= {"request": payload} if self._wants_request else dict(payload)
        return arguments

    async def _read_fields(self, request: Request) -> Any:
        fields = await read_json(request, self._body)
        if not isinstance(fields, dict):
            return fields  # validation says what is wrong with it
        if request.scope["query_string"]:
            fields = dict(request.query_params) | fields
        if fields.get(self._bearer) is None and (token := bearer_token(request)) is not None:
            fields[self._bearer] = token
        if self._is_traced and fields.get("traceparent") is None:
            given = request.headers.get("traceparent")
            if TraceParent.parse(given) is not None:
                fields["traceparent"] = given
        if self._is_repeatable and fields.get("idempotency_key") is None:
            fields["idempotency_key"] = idempotency_key_of(request)
        return fields

    def _response(self, result: object) -> Response:
        if isinstance(result, BaseModel):
            return json_response(result)
        if result is None:
            return json_response(EmptyResponse())
        if isinstance(result, bytes):
            return Response(result, media_type=self.media_type)
        assert isinstance(result, AsyncIterator), result
        return EventStream(result)


class ErrorDetail(Answer):
    type: str = Field(description="the error's class, see the error table")
    message: str
    param: str | None = Field(None, description="the field or parameter that is to blame")


class ErrorResponse(Answer):
    """The body of every answer with a status of 400 or above."""

    error: ErrorDetail


_ERRORS = {
    400: "malformed or contradictory request",
    401: "missing or wrong key or token",
    403: "the key has not the scope that this needs",
    404: "no such session, variable, request, model or context",
    409: "already set, a cycle, or a reused idempotency key",
    410: "the session has expired or was deleted",
    413: "the body is too large",
    415: "the body is not declared as application/json",
    422: "a field of the wrong type or out of bounds",
    429: "queue full or quota reached",
    499: "cancelled",
    502: "a producer failed, so the value will never exist",
    503: "no engine can serve this now, or the server is shutting down",
    504: "the read's timeout passed",
    507: "the journal cannot be written",
}

Json = dict[str, Any]


def _install_description(app: FastAPI, endpoints: Sequence[Endpoint]) -> None:
    """Have `app.openapi` describe them; it is made when it is first asked for."""
    described_by_fastapi = app.openapi

    def openapi() -> Json:
        schema = described_by_fastapi()
        if "components" not in schema:  # it is kept, so this completes it in place
            schema |= _describe(endpoints)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def install(
    app: FastAPI,
    endpoints: Sequence[Endpoint],
    others: Sequence[BaseRoute] = (),
    *,
    access: Access,
    check: Check | None = None,
) -> None:
    """Make these all routes of the app, and describe them under `/openapi.json`, for whom `access`
    and `check` say. Raises `TypeError` if a route has no rule."""

    def openapi() -> bytes:
        return orjson.dumps(app.openapi())

    page = Endpoint("GET", "/openapi.json", openapi, "This page", access=access, check=check)
    app.router.routes[:] = [*(endpoint.route() for endpoint in (*endpoints, page)), *others]
    list(rules(app.routes))
    _install_description(app, endpoints)


def _describe(endpoints: Sequence[Endpoint]) -> Json:
    models: list[tuple[type[BaseModel], JsonSchemaMode]] = [(ErrorResponse, "validation")]
    models += [(e.takes, "validation") for e in endpoints if e.takes is not None]
    models += [(answer, "validation") for e in endpoints if (answer := _answer(e)) is not None]
    refs, definitions = models_json_schema(models, ref_template="#/components/schemas/{model}")
    schemas = definitions["$defs"]
    paths: Json = {}
    for endpoint in endpoints:
        answer = _answer(endpoint)
        answer_schema = {} if answer is None else {"schema": refs[answer, "validation"]}
        content: Json = {endpoint.media_type: answer_schema}
        if endpoint.may_stream:
            content["text/event-stream"] = {}
        failed = {"application/json": {"schema": refs[ErrorResponse, "validation"]}}
        operation: Json = {
            "summary": endpoint.summary,
            "parameters": _parameters(endpoint, schemas),
            "responses": {
                "200": {
                    "description": endpoint.about,
                    "content": content,
                }
            }
            | {
                str(status): {"description": _ERRORS[status], "content": failed}
                for status in sorted({400, 415, 422, *endpoint.errors})
            },
        }
        if endpoint.takes is not None and _has_body(endpoint):
            content = {"application/json": {"schema": refs[endpoint.takes, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {"paths": paths, "components": {"schemas": schemas}}


def _answer(endpoint: Endpoint) -> type[BaseModel] | None:
    """The model of its answer; None if that is not JSON."""
    if endpoint.media_type != "application/json":
        return None
    return endpoint.gives or EmptyResponse


def _has_body(endpoint: Endpoint) -> bool:
    """GET and DELETE take query parameters (a JSON body works too); the others a JSON body."""
    return endpoint.method not in ("GET", "DELETE")


def _parameters(endpoint: Endpoint, schemas: Json) -> list[Json]:
    in_path = re.findall(r"\{(\w+)(?::path)?\}", endpoint.path)
    known = PathParameters.model_json_schema()["properties"]
    parameters = [_parameter(name, "path", known[name], is_required=True) for name in in_path]
    if endpoint.takes is None or _has_body(endpoint):
        return parameters
    fields = schemas[endpoint.takes.__name__]
    return parameters + [
        _parameter(name, "query", field, is_required=name in fields.get("required", ()))
        for name, field in fields["properties"].items()
        if name not in in_path
    ]


def _parameter(name: str, place: str, schema: Json, *, is_required: bool) -> Json:
    return {"name": name, "in": place, "required": is_required, "schema": schema}
