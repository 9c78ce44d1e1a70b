"""ServeCore's app: every endpoint over one core."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial

from fastapi import FastAPI
from starlette.types import ASGIApp

from parrot.gateway.audit import AuditedRefusals, AuditLog, audited, of_operators
from parrot.gateway.page.endpoints import Page
from parrot.gateway.programs import ENDING
from parrot.gateway.shards import Forwarding, load_of, placed
from parrot.gateway.turns import Turns
from parrot.gateway.vendors.responses.responses import Responses
from parrot.gateway.vendors.routes import error_form, response_endpoints, vendor_endpoints
from parrot.journal.log import Journal
from parrot.journal.replay import restore
from parrot.protocol.endpoint import Access
from parrot.protocol.openapi import install
from parrot.serve.api.empty_app import empty_app
from parrot.serve.api.keys import watched_keys
from parrot.serve.api.routes import endpoints
from parrot.serve.api.service import key_check
from parrot.serve.core import ServeCore


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
            async with watched_keys(core, None if audit is None else audit.event):
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
    turns = Turns(core)
    responses = Responses(turns, config)
    if journal is not None:
        restore(core, journal, {ENDING: turns.restore_ending, **responses.kept.restorers})
        turns.restored()
        responses.kept.keep_in(journal, lambda: core.is_closing)
        responses.resume(core.fleet.joined, config.unserved_timeout_s)
    app = empty_app(
        config,
        error_form,
        lifespan,
        outer=[] if audit is None else [partial(AuditedRefusals, audit=audit)],
        inner=[] if config.shards is None else [partial(forwarded, config.shards.cores)],
    )
    served = endpoints(core)
    if config.shards is not None:
        served = [placed(core, config.shards.cores, endpoint) for endpoint in served]
    if audit is not None:
        served = [audited(one, audit) if of_operators(one) else one for one in served]
    served += vendor_endpoints(core, turns)
    served += response_endpoints(core, responses)
    shown = Page(core, audit).routes() if config.page else []
    install(app, served, shown, access=Access.API_KEY, check=key_check(core))
    return app
