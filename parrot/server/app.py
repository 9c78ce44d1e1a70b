"""ServeCore's HTTP app: endpoints, layers, and the parts of the gateway and the journal that the
configuration turns on."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from typing import Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from parrot.gateway.audit import AuditedAuthFailures, AuditLog, audited, is_operator_endpoint
from parrot.gateway.page.endpoints import Page
from parrot.gateway.page.history import History
from parrot.gateway.programs import ENDING
from parrot.gateway.shards import Forwarding, load_of, on_home_shard
from parrot.gateway.turns import Turns
from parrot.gateway.vendors.responses.responses import Responses
from parrot.gateway.vendors.routes import error_form, response_endpoints, vendor_endpoints
from parrot.journal.log import Journal
from parrot.journal.replay import restore
from parrot.protocol.answers import (
    BaseApp,
    ErrorForm,
    Layer,
    RequestIds,
    create_base_app,
    own_layers,
)
from parrot.protocol.endpoint import Access
from parrot.protocol.openapi import install
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.endpoints import endpoints, key_check
from parrot.serve.tenants.keys_file import KeysWatch
from parrot.serve.tenants.table import KeysChange
from parrot.utils.tasks import TaskSet


def create_app(core: ServeCore, journal: Journal | None = None) -> FastAPI:
    """The app of a ServeCore. The app closes the core at its end. With a journal, the core is first
    restored from it. Raises `ConfigError` if the journal cannot be read."""

    forwarding: list[Forwarding] = []

    def forwarded(urls: Sequence[str], routes: ASGIApp) -> ASGIApp:
        forwarding.append(Forwarding(routes, urls, lambda: load_of(core)))
        return forwarding[-1]

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            async with (
                _watched_keys(core, history, None if audit is None else audit.event),
                nullcontext() if upstreams is None else upstreams.followed(),
                nullcontext() if page is None else page.running(),
            ):
                yield
        finally:
            for way in forwarding:
                await way.close()
            await core.close()
            await history.close()
            await responses.close()
            if audit is not None:
                audit.close()

    config = core.config
    audit = None if config.audit_path is None else AuditLog(config.audit_path)
    upstreams = None
    if config.servers:
        from parrot.upstreams.servers import Upstreams  # Imports the openai engine.

        upstreams = Upstreams(config, core.fleet, core.clock)
    turns = Turns(core)
    responses = Responses(turns, config)
    history = History(core)
    if journal is not None:
        _restore(core, journal, turns, responses, history)
    page = Page(core, audit, history) if config.page else None
    app = empty_app(
        config,
        error_form,
        lifespan,
        outer=_outer_layers(config, audit),
        inner=[] if config.shards is None else [partial(forwarded, config.shards.cores)],
    )
    served = endpoints(core)
    if config.shards is not None:
        served = [on_home_shard(core, config.shards.cores, endpoint) for endpoint in served]
    if audit is not None:
        served = [audited(one, audit) if is_operator_endpoint(one) else one for one in served]
    # Routes with parameters are tried in order. The reads of programs are the most frequent.
    served = [*served, *vendor_endpoints(core, turns), *response_endpoints(core, responses)]
    shown = [] if page is None else page.routes()
    install(app, served, shown, access=Access.API_KEY, check=key_check(core))
    return app


def _restore(
    core: ServeCore, journal: Journal, turns: Turns, responses: Responses, history: History
) -> None:
    """Restore everything from the journal, and record changes from now on."""
    kept = responses.kept
    others = {ENDING: turns.restore_ending, **kept.restorers, **history.restorers}
    restore(core, journal, others)
    turns.restored()
    history.journal_to(journal)
    kept.journal_to(journal, lambda: core.is_closing)
    responses.resume(core.fleet.joined)


def empty_app(
    config: CoreConfig,
    error_form: ErrorForm,
    lifespan: Callable[[FastAPI], AbstractAsyncContextManager[None]] | None = None,
    *,
    outer: Sequence[Layer] = (),
    inner: Sequence[Layer] = (),
) -> BaseApp:
    """An app without endpoints, with its host names and error format. `outer` and `inner` are
    layers outside and inside of all others."""
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


def _outer_layers(config: CoreConfig, audit: AuditLog | None) -> list[Layer]:
    """The layer that takes the client's address and scheme from headers of trusted proxies, and
    the layer that notes failed authentication."""
    layers: list[Any] = []
    if config.trusted_proxies:
        from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware

        layers.append(partial(ProxyHeadersMiddleware, trusted_hosts=list(config.trusted_proxies)))
    if audit is not None:
        layers.append(partial(AuditedAuthFailures, audit=audit))
    return layers


@asynccontextmanager
async def _watched_keys(
    core: ServeCore, history: History, note: Callable[..., None] | None
) -> AsyncIterator[None]:
    """Read changes of the keys file during the block. `note` is called for each change."""

    async def changed(change: KeysChange) -> None:
        if note is not None:
            note("keys changed", "ok", **change._asdict())
        for _ in core.sessions.keys_changed():
            await asyncio.sleep(0)  # Let other tasks run.
        history.keys_changed()

    def refused(reason: str) -> None:
        if note is not None:
            note("keys changed", "refused", reason=reason)

    tasks = TaskSet()
    tasks.spawn(KeysWatch(core.tenants, core.clock, changed, refused).run(), name="keys")
    try:
        yield
    finally:
        await tasks.close()
