"""The HTTP face of an engine of any type."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing

from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.engine.config import EngineConfig
from parrot.engine.metrics import CONTENT_TYPE, render_metrics
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import (
    FillRequest,
    FreeContextRequest,
    FreeContextResponse,
    GenerateRequest,
    GenerateResponse,
    PingResponse,
    StreamChunk,
)
from parrot.protocol.errors import AuthenticationFailed, NotFound, Unavailable
from parrot.protocol.server import (
    create_base_app,
    error_response,
    event_stream,
    json_response,
    parse_payload,
    read_json,
    require_cluster_token,
    run_until_disconnect,
)

MAX_BODY_SIZE = 64 * 2**20  # prompts of millions of token ids
_OPEN_PATHS = frozenset({"/health", "/ready"})

Endpoint = Callable[[Request], Awaitable[Response]]


def create_app(service: EngineService, config: EngineConfig) -> FastAPI:
    """Routes are plain Starlette ones: FastAPI's parsing would cost more than the rest of a call,
    and ServeCore is the only reader of this API."""
    app = create_base_app("Parrot engine", max_body_size=MAX_BODY_SIZE)
    routes = _Routes(service)
    posts: dict[str, Endpoint] = {
        "/fill": routes.fill,
        "/generate": routes.generate,
        "/generate_stream": routes.generate_stream,
        "/free_context": routes.free_context,
        "/ping": routes.ping,
    }
    gets: dict[str, Endpoint] = {
        "/tokenizer": routes.tokenizer,
        "/health": routes.health,
        "/ready": routes.ready,
        "/metrics": routes.metrics,
    }
    for path, endpoint in posts.items():
        app.add_route(path, endpoint, methods=["POST"], include_in_schema=False)
    for path, endpoint in gets.items():
        app.add_route(path, endpoint, methods=["GET"], include_in_schema=False)
    if config.cluster_token is not None:
        app.add_middleware(TokenGuard, token=config.cluster_token)
    return app


class TokenGuard:
    """Refuses, unless it carries the cluster's token, every request that is not for an open path;
    so a route that is added later is closed by default."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS:
            try:
                require_cluster_token(Request(scope), self._token)
            except AuthenticationFailed as error:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)


class _Routes:
    """One method per path. A client that disconnects aborts its request."""

    def __init__(self, service: EngineService) -> None:
        self._service = service

    async def fill(self, request: Request) -> Response:
        fields = parse_payload(FillRequest, await read_json(request))
        return json_response(await run_until_disconnect(request, self._service.fill(fields)))

    async def generate(self, request: Request) -> Response:
        fields = parse_payload(GenerateRequest, await read_json(request))
        return json_response(await run_until_disconnect(request, self._service.generate(fields)))

    async def generate_stream(self, request: Request) -> Response:
        fields = parse_payload(GenerateRequest, await read_json(request))
        # The stream opens at once, so that keep-alives flow while the request waits its turn; a
        # refusal is its `error` event.
        return event_stream(_named(self._service.generate_stream(fields)))

    async def free_context(self, request: Request) -> Response:
        fields = parse_payload(FreeContextRequest, await read_json(request))
        ids = [*fields.context_ids]
        if fields.context_id is not None:
            ids.append(fields.context_id)
        return json_response(
            FreeContextResponse(context_len=await self._service.free_contexts(ids))
        )

    async def ping(self, request: Request) -> Response:
        if not self._service.is_ready():
            raise Unavailable("the engine is loading its model, shutting down, or lost its device")
        return json_response(PingResponse(runtime_info=self._service.runtime_info()))

    async def tokenizer(self, request: Request) -> Response:
        response = self._service.tokenizer()
        if response is None:
            raise NotFound("this engine's contexts are text: it has no tokenizer")
        return json_response(response)

    async def health(self, request: Request) -> Response:
        return Response(b"{}", media_type="application/json")

    async def ready(self, request: Request) -> Response:
        if not self._service.is_ready():
            raise Unavailable("the engine is loading its model or shutting down")
        return Response(b"{}", media_type="application/json")

    async def metrics(self, request: Request) -> Response:
        return Response(
            render_metrics(self._service.runtime_info()), headers={"Content-Type": CONTENT_TYPE}
        )


async def _named(
    events: AsyncGenerator[StreamChunk | GenerateResponse],
) -> AsyncGenerator[tuple[str, BaseModel]]:
    async with aclosing(events):
        async for event in events:
            yield ("done" if isinstance(event, GenerateResponse) else "chunk"), event
