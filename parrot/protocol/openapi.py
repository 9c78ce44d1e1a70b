"""The routes of an app, and their description for OpenAPI."""

import re
from collections.abc import Sequence
from typing import Any

import orjson
from fastapi import FastAPI
from pydantic import BaseModel, Field
from pydantic.json_schema import JsonSchemaMode, models_json_schema
from starlette.routing import BaseRoute, Match, Route

from parrot.protocol.answers import BaseApp, Check
from parrot.protocol.endpoint import Access, Endpoint, PathParameters, rules
from parrot.protocol.public import Answer, EmptyResponse


class ErrorDetail(Answer):
    type: str = Field(description="the error's class, see the error table")
    message: str
    param: str | None = Field(None, description="the field or parameter at fault")


class ErrorResponse(Answer):
    """The body of every answer with a status of 400 or above."""

    error: ErrorDetail


_ERRORS = {
    400: "malformed or contradictory request",
    401: "missing or wrong key or token",
    403: "the key lacks the required scope",
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
    """Make `app.openapi` describe the endpoints. The description is built on first use."""
    described_by_fastapi = app.openapi

    def openapi() -> Json:
        schema = described_by_fastapi()
        if "components" not in schema:  # FastAPI caches the schema, so change it in place.
            schema |= _describe(endpoints)
        return schema

    app.openapi = openapi  # type: ignore[method-assign]


def install(
    app: BaseApp,
    endpoints: Sequence[Endpoint],
    others: Sequence[BaseRoute] = (),
    *,
    access: Access,
    check: Check | None = None,
) -> None:
    """Install the endpoints and `others` as the only routes of the app, and describe them under
    `/openapi.json`. `access` and `check` protect that page. Raises `TypeError` if a route has no
    access rule."""

    def openapi() -> bytes:
        return orjson.dumps(app.openapi())

    page = Endpoint("GET", "/openapi.json", openapi, "This page", access=access)
    if check is not None:
        page.checked(check)
    routes = [*(endpoint.route() for endpoint in (*endpoints, page)), *others]
    list(rules(routes))
    app.router.routes[:] = routes
    of_several_paths: list[BaseRoute] = []
    for route in routes:
        if not isinstance(route, Route) or "{" in route.path:
            of_several_paths.append(route)
            continue
        for method in route.methods or ():
            scope = {"type": "http", "method": method, "path": route.path}
            for first in of_several_paths:
                if first.matches(scope)[0] is Match.FULL:
                    break
            else:
                app.direct.setdefault((method, route.path), route.app)
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
        content: Json = {endpoint.described.media_type: answer_schema}
        if endpoint.described.may_stream:
            content["text/event-stream"] = {}
        failed = {"application/json": {"schema": refs[ErrorResponse, "validation"]}}
        operation: Json = {
            "summary": endpoint.summary,
            "parameters": _parameters(endpoint, schemas),
            "responses": {
                "200": {
                    "description": endpoint.described.about,
                    "content": content,
                }
            }
            | {
                str(status): {"description": _ERRORS[status], "content": failed}
                for status in sorted({400, 415, 422, *endpoint.described.errors})
            },
        }
        if endpoint.takes is not None and _has_body(endpoint):
            content = {"application/json": {"schema": refs[endpoint.takes, "validation"]}}
            operation["requestBody"] = {"required": True, "content": content}
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = operation
    return {"paths": paths, "components": {"schemas": schemas}}


def _answer(endpoint: Endpoint) -> type[BaseModel] | None:
    """The model of the endpoint's answer. None if the answer is not JSON."""
    if endpoint.described.media_type != "application/json":
        return None
    return endpoint.gives or EmptyResponse


def _has_body(endpoint: Endpoint) -> bool:
    """Whether the method takes a JSON body. GET and DELETE take query parameters, although a body
    works too."""
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
