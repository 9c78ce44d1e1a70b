"""The app of a server that has no endpoint yet, or stands by."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from parrot.protocol.answers import ErrorForm, Layer, RequestIds, create_base_app, own_layers
from parrot.serve.config import CoreConfig


def empty_app(
    config: CoreConfig,
    error_form: ErrorForm,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    *,
    outer: Sequence[Layer] = (),
    inner: Sequence[Layer] = (),
) -> FastAPI:
    """An app that knows whom it answers and how errors look, and has no endpoint. `outer` and
    `inner`: layers before and behind all others."""
    own_names = () if config.shards is None else (config.shards.own_name,)
    layers: list[Layer] = [*outer, RequestIds]
    if config.cors_origins:
        layers.append(
            partial(
                CORSMiddleware,
                allow_origins=config.cors_origins,
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["x-request-id", "request-id", "retry-after"],
            )
        )
    layers += own_layers(
        max_body_size=config.max_body_size,
        names=(config.host, *config.allowed_hosts, *own_names),
        error_form=error_form,
    )
    return create_base_app(
        "Parrot ServeCore",
        [*layers, *inner],
        max_body_memory=config.connections.max_body_memory,
        lifespan=lifespan,
    )
