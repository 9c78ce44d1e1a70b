"""Several ServeCores with one journal: the holder of its lease serves, the others stand by."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.gateway.vendors.routes import error_form
from parrot.journal.log import RecordsLost
from parrot.protocol.app_server import AppServer
from parrot.protocol.endpoint import Access, Endpoint
from parrot.protocol.errors import Standby
from parrot.serve.config import CoreConfig
from parrot.server.app import empty_app
from parrot.server.serving import Serving, serving
from parrot.utils.collector import bounded_collections
from parrot.utils.config import ConfigError
from parrot.utils.installation import install_line

logger = logging.getLogger(__name__)

# Always accepted: an engine that is rejected drops its work, but the lease may still be renewed.
_OF_ENGINES = frozenset({"/register_engine", "/engine_heartbeat", "/engine_leave"})


class Front:
    """The app of a process that may stand by. It rejects programs' requests on standby, and as soon
    as another process may serve: that process's changes are not known here."""

    def __init__(self, config: CoreConfig) -> None:
        self._standby = standby_app(config)
        self._serving: Serving | None = None
        self._is_alone: Callable[[], bool] = bool

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app: ASGIApp = self._standby
        if self._serving is not None and self._is_open(scope):
            app = self._serving.app
        await app(scope, receive, send)

    def _is_open(self, scope: Scope) -> bool:
        is_request = scope["type"] != "lifespan"
        return is_request and (self._is_alone() or scope["path"] in _OF_ENGINES)

    @contextmanager
    def turn(self, serving: Serving, is_alone: Callable[[], bool]) -> Iterator[None]:
        """Pass requests to this app until the block ends, while the process surely `is_alone`."""
        self._serving, self._is_alone = serving, is_alone
        try:
            yield
        finally:
            self.end_requests()
            self._serving = None

    def end_requests(self) -> None:
        """End all open requests."""
        if self._serving is not None:
            self._serving.core.shut_down()


async def serve_in_turn(config: CoreConfig) -> None:
    """Serve until SIGTERM or SIGINT. While this process holds the lease of the PostgreSQL journal,
    it serves the API. Otherwise it only answers `/health`. Raises `ConfigError` if the journal
    cannot be used."""
    try:
        from parrot.journal.postgres import prepare
    except ImportError as missing:
        raise ConfigError(
            f"journal: needs psycopg ({missing}): {install_line('postgres')}"
        ) from None
    assert config.journal is not None
    prepare(config.journal)
    front = Front(config)

    async def end_requests() -> None:
        front.end_requests()

    server = AppServer(front, config.host, config.port, end_requests, config.connections)
    turns = asyncio.create_task(_take_turns(config, config.journal, front))
    turns.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve()
    finally:
        turns.cancel()
        await asyncio.gather(turns, return_exceptions=True)
    if not turns.cancelled() and (error := turns.exception()) is not None:
        raise error


async def _take_turns(config: CoreConfig, address: str, front: Front) -> None:
    while True:
        with bounded_collections():  # It starts with the garbage of the last turn.
            await _take_turn(config, address, front)


async def _take_turn(config: CoreConfig, address: str, front: Front) -> None:
    from parrot.journal.postgres import Lease, PostgresRecords

    lease = Lease(address)
    stands_by = False
    try:
        await lease.acquire()
        logger.info("this ServeCore now serves, with epoch %d", lease.epoch)
        records = PostgresRecords(lease, config.journal_size)
        async with serving(config, records) as it, it.app.router.lifespan_context(it.app):
            with front.turn(it, lease.is_held):
                await lease.lost()
            stands_by = True
            logger.error("another ServeCore may hold the journal's lease: this is a standby now")
    except RecordsLost:  # The log names them.
        if not stands_by:
            raise
    finally:
        await lease.close()


def standby_app(config: CoreConfig) -> FastAPI:
    """The app of a standby: answers `/health`, and rejects all other requests."""
    app = empty_app(config, error_form)

    async def refuse(scope: Scope, receive: Receive, send: Send) -> None:
        raise Standby("this ServeCore is a standby: another one on its journal may be active")

    def alive() -> None: ...

    health = Endpoint("GET", "/health", alive, "The process is alive", access=Access.ANYBODY)
    app.router.routes[:] = [health.route()]
    app.router.default = refuse
    app.router.redirect_slashes = False
    return app
