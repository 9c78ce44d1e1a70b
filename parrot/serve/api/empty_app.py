"""The app of a server that has no endpoint yet, or stands by."""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from parrot.protocol.middleware import create_base_app
from parrot.serve.api.vendors.endpoint import RequestIds
from parrot.serve.api.vendors.routes import error_form
from parrot.serve.config import CoreConfig


def empty_app(
    config: CoreConfig,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    around: Callable[[ASGIApp], ASGIApp] | None = None,
) -> FastAPI:
    """An app that knows whom it answers and how errors look, and has no endpoint."""
    own_names = () if config.shards is None else (config.shards.own_name,)
    app = create_base_app(
        "Parrot ServeCore",
        max_body_size=config.max_body_size,
        max_body_memory=config.connections.max_body_memory,
        host=config.host,
        allowed_hosts=(*config.allowed_hosts, *own_names),
        lifespan=lifespan,
        error_form=error_form,
        around=around,
    )
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after"],
        )
    app.add_middleware(RequestIds)
    return app
