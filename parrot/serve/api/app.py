"""ServeCore's app: every endpoint over one core."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from parrot.protocol.endpoint import install
from parrot.protocol.gate.access import Access
from parrot.protocol.server import create_base_app
from parrot.serve.api.keys import watched_keys
from parrot.serve.api.routes import endpoints
from parrot.serve.api.service import key_check
from parrot.serve.api.vendors.endpoint import RequestIds
from parrot.serve.api.vendors.responses.responses import Responses
from parrot.serve.api.vendors.routes import error_form, response_endpoints, vendor_endpoints
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.journal.journal import Journal
from parrot.serve.journal.restoring import restore
from parrot.serve.page.audit import AuditedRefusals, AuditLog
from parrot.serve.page.endpoints import Page


def create_app(core: ServeCore, journal: Journal | None = None) -> FastAPI:
    """The app of one ServeCore, which it closes when it ends. With a journal, the core is restored
    from it first. Raises `ConfigError` if that cannot be read."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with watched_keys(core, audit):
                yield
        finally:
            await core.close()
            await responses.close()
            audit.close()

    audit = AuditLog(core.config.audit_path)
    page = Page(core, audit)
    responses = Responses(core.turns, core.config.responses_size)
    if journal is not None:
        restore(core, journal, responses.kept.restorers)
        responses.kept.keep_in(journal, lambda: core.is_closing)
        responses.resume(core.fleet.joined, core.config.unserved_timeout_s)
    app = empty_app(core.config, lifespan)
    app.add_middleware(AuditedRefusals, audit=audit)
    served = [
        *endpoints(core, audit),
        *vendor_endpoints(core),
        *response_endpoints(core, responses),
    ]
    shown = page.routes() if core.config.page else []
    install(app, served, shown, access=Access.API_KEY, check=key_check(core))
    return app


def empty_app(
    config: CoreConfig,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
) -> FastAPI:
    """An app that knows whom it answers and how errors look, and has no endpoint."""
    app = create_base_app(
        "Parrot ServeCore",
        max_body_size=config.max_body_size,
        max_body_memory=config.connections.max_body_memory,
        host=config.host,
        allowed_hosts=config.allowed_hosts,
        lifespan=lifespan,
        error_form=error_form,
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
