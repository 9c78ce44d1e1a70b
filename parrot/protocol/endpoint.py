"""Endpoints: the verbs of a server, each under a method and a path."""

import inspect
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request, Response
from pydantic import BaseModel
from starlette.routing import Route

from parrot.protocol.gate.bodies import ANY_BODY, BodyRules
from parrot.protocol.public import EmptyResponse
from parrot.protocol.server import (
    bearer_token,
    event_stream,
    json_response,
    parse_payload,
    read_json,
    require_cluster_token,
    run_until_disconnect,
)


class PathParameters(BaseModel):
    """The names that may stand in the braces of a path."""

    session_id: int = 0
    request_id: int = 0
    var_id: str = ""
    model_id: str = ""
    response_id: str = ""


class Endpoint:
    """One verb of a server.

    `verb` is called with the request (the model that annotates its parameter `request`) or with the
    fields of `takes`, and with those parameters of the path that are no such fields. It gives a
    model, None (for `{}`), bytes, or server-sent events; an awaitable of one is cancelled when the
    client goes away.

    The fields are those of the JSON body, over the query's, for any method. A Bearer token stands
    for the field `bearer` if that is not given. `cluster_token`: what the Bearer token must be.
    `body`: which bodies are read.
    `errors` (statuses that it may fail with, besides 400 and 422) and `about` only describe it."""

    def __init__(
        self,
        method: str,
        path: str,
        verb: Callable[..., Any],
        summary: str = "",
        *,
        takes: type[BaseModel] | None = None,
        errors: tuple[int, ...] = (),
        bearer: str = "session_auth",
        cluster_token: str | None = None,
        media_type: str = "application/json",
        about: str = "OK",
        body: BodyRules = ANY_BODY,
    ) -> None:
        signature = inspect.signature(verb)
        request = signature.parameters.get("request")
        self.method = method
        self.path = path
        self.summary = summary
        self.takes: type[BaseModel] | None = takes if request is None else request.annotation
        self.gives = signature.return_annotation
        self.errors = errors
        self.media_type = media_type
        self.about = about
        self._verb = verb
        self._wants_request = request is not None
        self._bearer = bearer
        self._cluster_token = cluster_token
        self._body = body

    def route(self) -> Route:
        """A plain route: FastAPI's, which resolve dependencies, cost more than all of ServeCore's
        own work on a call."""
        route = Route(self.path, self._answer, methods=[self.method])
        if self.takes is not None:
            route.methods = {self.method}  # without HEAD, which would be a read
        return route

    async def _answer(self, request: Request) -> Response:
        if self._cluster_token is not None:
            require_cluster_token(request, self._cluster_token)
        result = self._verb(**await self._arguments(request))
        if inspect.isawaitable(result):
            result = await run_until_disconnect(request, result)
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
        return fields

    def _response(self, result: object) -> Response:
        if isinstance(result, BaseModel):
            return json_response(result)
        if result is None:
            return json_response(EmptyResponse())
        if isinstance(result, bytes):
            return Response(result, media_type=self.media_type)
        assert isinstance(result, AsyncIterator), result
        return event_stream(result)
