"""ServeCore's app: every route over one core, and the order in which they are matched."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Route

from parrot.protocol.engine_api import (
    HeartbeatRequest,
    HeartbeatResponse,
    RegisterRequest,
    RegisterResponse,
)
from parrot.protocol.public import EmptyResponse, ReadyResponse
from parrot.protocol.server import (
    create_base_app,
    json_response,
    parse_payload,
    read_json,
    require_cluster_token,
)
from parrot.serve.api.openapi import describe, install_schema
from parrot.serve.api.routes import HOT_ROUTES, add_v1_routes
from parrot.serve.core import ServeCore
from parrot.serve.metrics import CONTENT_TYPE


def create_app(core: ServeCore) -> FastAPI:
    """The app of one ServeCore, which it closes when it ends."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await core.close()

    app = create_base_app(
        "Parrot ServeCore", max_body_size=core.config.max_body_size, lifespan=lifespan
    )
    add_v1_routes(app, core)
    _add_engine_routes(app, core)
    _add_service_routes(app, core)
    install_schema(app)
    for method, path in HOT_ROUTES:
        _shorten(app, method, path)
    return app


def _shorten(app: FastAPI, method: str, path: str) -> None:
    """Match this route first, and without FastAPI's resolving of dependencies, which for the two
    requests of every call costs more than all of ServeCore's own work on them."""
    documented = next(
        route
        for route in app.routes
        if isinstance(route, APIRoute) and route.path == path and method in (route.methods or ())
    )

    async def direct(request: Request) -> Response:
        response: Response = await documented.endpoint(request, **request.path_params)
        return response

    route = Route(path, direct, methods=[method])
    route.methods = {method}  # without HEAD, which would be a read
    app.router.routes.insert(0, route)


def _add_engine_routes(app: FastAPI, core: ServeCore) -> None:
    token = core.config.cluster_token

    @app.post(
        "/register_engine",
        **describe(
            "An engine joins (Bearer: the cluster token)",
            request=RegisterRequest,
            response=RegisterResponse,
            errors=(401, 429, 503),
        ),
    )
    async def register_engine(request: Request) -> Response:
        require_cluster_token(request, token)
        fields = parse_payload(RegisterRequest, await read_json(request))
        return json_response(await core.register_engine(fields))

    @app.post(
        "/engine_heartbeat",
        **describe(
            "An engine is alive (Bearer: the cluster token)",
            request=HeartbeatRequest,
            response=HeartbeatResponse,
            errors=(401,),
        ),
    )
    async def engine_heartbeat(request: Request) -> Response:
        require_cluster_token(request, token)
        fields = parse_payload(HeartbeatRequest, await read_json(request))
        return json_response(core.heartbeat(fields))


def _add_service_routes(app: FastAPI, core: ServeCore) -> None:
    @app.head("/health", include_in_schema=False)
    @app.get("/health", **describe("The process answers", response=EmptyResponse))
    async def health() -> Response:
        return json_response(EmptyResponse())

    @app.head("/ready", include_in_schema=False)
    @app.get("/ready", **describe("An engine is there", response=ReadyResponse, errors=(503,)))
    async def ready() -> Response:
        return json_response(core.readiness())

    @app.head("/metrics", include_in_schema=False)
    @app.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics() -> Response:
        return Response(core.metrics(), media_type=CONTENT_TYPE)
