"""ServeCore's process: the app from its parts, and the command that serves it.

`python3 -m parrot.serve.http_server --config_path core.json`
"""

import argparse
import gc
import ipaddress
import logging
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response
from fastapi.routing import APIRoute
from pydantic import ValidationError
from starlette.routing import Route

from parrot.protocol.app_server import AppServer
from parrot.protocol.internal import (
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
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.metrics import CONTENT_TYPE
from parrot.serve.openapi import describe, install_schema
from parrot.serve.routes import HOT_ROUTES, add_v1_routes
from parrot.serve.tracing import TraceFile, TracingCore
from parrot.utils.config import ConfigError, load_config
from parrot.utils.logging import setup_logging

logger = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000  # the interpreter's 700 are a call's or two


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


async def serve(config: CoreConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the trace cannot be written."""
    if not _is_loopback(config.host) and not config.api_keys:
        logger.warning(
            "binding %s without api_keys: whoever reaches this address may use the service",
            config.host,
        )
    trace = None if config.trace_path is None else TraceFile(config.trace_path)
    first_id = _first_session_id()
    if trace is None:
        core = ServeCore(config, first_session_id=first_id)
    else:
        core = TracingCore(config, first_session_id=first_id, sink=trace)

    async def end_requests() -> None:
        core.shut_down()

    try:
        await AppServer(create_app(core), config.host, config.port, end_requests).serve()
    finally:
        if trace is not None:
            trace.close()


def _first_session_id() -> int:
    """Milliseconds since 1970: above every id that an earlier process gave out, unless that made
    more than a thousand sessions a second for all of its life. So a program that outlives a restart
    never names a session of another's."""
    return time.time_ns() // 1_000_000


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _spare_garbage_collection() -> None:
    """Modules live as long as the process, and nearly all that a call makes is freed without the
    collector: let it pass over the first, and look at the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run Parrot's ServeCore.")
    parser.add_argument("--config_path", help="JSON config file; without it, the defaults")
    parser.add_argument("--host", help="address to bind, instead of the config's")
    parser.add_argument("--port", type=int, help="port to bind, instead of the config's")
    parser.add_argument("--log_dir", help="also write the log to a file in this folder")
    parser.add_argument("--log_filename", default="core_server.log")
    parser.add_argument("--release_mode", action="store_true", help="log warnings and errors only")
    return parser.parse_args(argv)


def _configure(args: argparse.Namespace) -> CoreConfig:
    config = load_config(CoreConfig, args.config_path) if args.config_path else CoreConfig()
    given = {key: getattr(args, key) for key in ("host", "port") if getattr(args, key) is not None}
    return CoreConfig.model_validate(config.model_dump() | given)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    try:
        config = _configure(args)
    except (ConfigError, ValidationError) as error:
        sys.exit(f"error: {error}")
    level = logging.WARNING if args.release_mode else logging.INFO
    setup_logging(level, args.log_dir, args.log_filename)
    import uvloop

    _spare_garbage_collection()
    try:
        uvloop.run(serve(config))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
