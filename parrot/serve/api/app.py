"""ServeCore's app: every endpoint over one core."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp

from parrot.journal.log import Journal
from parrot.journal.replay import restore
from parrot.protocol.endpoint import Access
from parrot.protocol.openapi import install
from parrot.serve.api.beginning import load_of
from parrot.serve.api.empty_app import empty_app
from parrot.serve.api.keys import watched_keys
from parrot.serve.api.routes import endpoints
from parrot.serve.api.service import key_check
from parrot.serve.api.vendors.responses.responses import Responses
from parrot.serve.api.vendors.routes import response_endpoints, vendor_endpoints
from parrot.serve.conversations.endings import ENDING
from parrot.serve.core import ServeCore
from parrot.serve.page.audit import AuditedRefusals, AuditLog
from parrot.serve.page.endpoints import Page
from parrot.serve.shards.forwarding import Forwarding


def create_app(core: ServeCore, journal: Journal | None = None) -> FastAPI:
    """The app of one ServeCore, which it closes when it ends. With a journal, the core is restored
    from it first. Raises `ConfigError` if that cannot be read."""

    forwarding: list[Forwarding] = []

    def forwarded(urls: Sequence[str], routes: ASGIApp) -> ASGIApp:
        forwarding.append(Forwarding(routes, urls, lambda: load_of(core)))
        return forwarding[-1]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with watched_keys(core, audit):
                yield
        finally:
            for way in forwarding:
                await way.close()
            await core.close()
            await responses.close()
            if audit is not None:
                audit.close()

    config = core.config
    audit = None if config.audit_path is None else AuditLog(config.audit_path)
    responses = Responses(core.turns, config)
    if journal is not None:
        restore(core, journal, {ENDING: core.turns.restore_ending, **responses.kept.restorers})
        core.turns.restored()
        responses.kept.keep_in(journal, lambda: core.is_closing)
        responses.resume(core.fleet.joined, config.unserved_timeout_s)
    app = empty_app(
        config,
        lifespan,
        outer=[] if audit is None else [partial(AuditedRefusals, audit=audit)],
        inner=[] if config.shards is None else [partial(forwarded, config.shards.cores)],
    )
    served = [
        *endpoints(core, audit),
        *vendor_endpoints(core),
        *response_endpoints(core, responses),
    ]
    shown = Page(core, audit).routes() if config.page else []
    install(app, served, shown, access=Access.API_KEY, check=key_check(core))
    return app
