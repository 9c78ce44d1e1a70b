"""The OpenAPI description of routes that read their fields themselves.

Handlers take the raw request: one validation in pydantic instead of FastAPI's several layers, and
our own error table. What they accept and answer is declared here, beside each route."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from parrot.protocol.public import ErrorResponse

_REF = "#/components/schemas/{model}"
_REQUEST_KEY = "x-parrot-request"

ERRORS = {
    400: "malformed or contradictory request",
    401: "missing or wrong key or token",
    404: "no such session, variable, request or model",
    409: "already set, a cycle, or a reused idempotency key",
    410: "the session has expired or was deleted",
    413: "the body is too large",
    422: "a field of the wrong type or out of bounds",
    429: "queue full or quota reached",
    499: "cancelled",
    502: "a producer failed, so the value will never exist",
    503: "no engine can serve this now, or the server is shutting down",
    504: "the read's timeout passed",
}


def describe(
    summary: str,
    *,
    request: type[BaseModel] | None = None,
    response: type[BaseModel] | None = None,
    errors: tuple[int, ...] = (),
    events: str | None = None,
) -> dict[str, Any]:
    """Keyword arguments for FastAPI's route decorators. `events`: the answer is a stream of
    server-sent events, described so."""
    responses: dict[int | str, dict[str, Any]] = {
        status: {"model": ErrorResponse, "description": ERRORS[status]}
        for status in sorted({400, 422, *errors})
    }
    if response is not None:
        responses[200] = {"model": response, "description": "OK"}
    elif events is not None:
        responses[200] = {"description": events, "content": {"text/event-stream": {}}}
    extra = {} if request is None else {_REQUEST_KEY: request}
    return {
        "summary": summary,
        "response_model": None,
        "responses": responses,
        "openapi_extra": extra,
    }


def install_schema(app: FastAPI) -> None:
    """Generate the description when `/openapi.json` or `/docs` first asks for it."""
    described_by_fastapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            _complete(app, described_by_fastapi)
        assert app.openapi_schema is not None
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _complete(app: FastAPI, described_by_fastapi: Callable[[], dict[str, Any]]) -> None:
    requests = {
        (route.path, method.lower()): model
        for route in app.routes
        if isinstance(route, APIRoute) and route.openapi_extra
        if (model := route.openapi_extra.pop(_REQUEST_KEY, None)) is not None
        for method in route.methods or ()
    }
    schema = described_by_fastapi()  # which keeps it, so it can be completed in place
    for (path, method), model in requests.items():
        _describe_request(schema["paths"][path][method], method, model)
    _, definitions = models_json_schema(
        [(model, "validation") for model in set(requests.values())], ref_template=_REF
    )
    schema.setdefault("components", {}).setdefault("schemas", {}).update(definitions["$defs"])


def _describe_request(operation: dict[str, Any], method: str, model: type[BaseModel]) -> None:
    """GET and DELETE take query parameters (a JSON body works too); the others a JSON body."""
    if method not in ("get", "delete"):
        content = {"application/json": {"schema": {"$ref": _REF.format(model=model.__name__)}}}
        operation["requestBody"] = {"required": True, "content": content}
        return
    parameters = operation.setdefault("parameters", [])
    in_path = {parameter["name"] for parameter in parameters}
    schema = model.model_json_schema(ref_template=_REF)
    for name, field in schema.get("properties", {}).items():
        if name not in in_path:
            is_required = name in schema.get("required", ())
            parameters.append(
                {"name": name, "in": "query", "required": is_required, "schema": field}
            )
