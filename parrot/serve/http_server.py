"""ServeCore as a process: its parts put together, and the command that serves them:

`python3 -m parrot.serve.http_server --config_path core.json`
"""

import logging
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import NamedTuple

from fastapi import FastAPI

from parrot.journal.log import Journal, Storage, is_address
from parrot.journal.sqlite import JournalFile
from parrot.observe.call_log import CallLog
from parrot.observe.recorder import Recorder, TraceFile
from parrot.observe.tracer import Tracer
from parrot.protocol.app_server import AppServer, given_options, run_server, server_options
from parrot.protocol.server_config import settled_token
from parrot.serve.app import create_app
from parrot.serve.config import CoreConfig, core_settings
from parrot.serve.core import ServeCore
from parrot.serve.events import Sink
from parrot.utils.addresses import is_loopback
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.collector import bounded_collections
from parrot.utils.config import ConfigError, parse_config
from parrot.utils.logs import CALLS
from parrot.utils.span_export import span_export

logger = logging.getLogger(__name__)


async def serve(config: CoreConfig) -> None:
    """Serve until SIGTERM or SIGINT. Raises `ConfigError` if the trace cannot be written, or keys
    or a cluster token are needed and missing."""
    token = settled_token(
        config.host,
        config.cluster_token,
        insecure=config.insecure,
        has_api_keys=config.needs_keys,
        state_dir=config.state_dir,
    )
    config = config.model_copy(update={"cluster_token": token})
    if not is_loopback(config.host) and not config.needs_keys:
        logger.warning(
            "binding %s without api_keys: whoever reaches this address may use the service",
            config.host,
        )
    if config.journal is not None and is_address(config.journal):
        from parrot.journal.standby import serve_in_turn  # which serves by this module

        await serve_in_turn(config)
        return
    with bounded_collections():
        await _serve(config)


async def _serve(config: CoreConfig) -> None:
    async with serving(config) as parts:

        async def end_requests() -> None:
            parts.core.shut_down()

        server = AppServer(parts.app, config.host, config.port, end_requests, config.connections)
        await server.serve()


def main(argv: Sequence[str] | None = None) -> None:
    args = server_options("Run Parrot's ServeCore.", "core_server.log").parse_args(argv)
    try:
        options = given_options(args, "host", "port", "insecure")
        settings = core_settings(args.config_path, options, os.environ)
        config = parse_config(CoreConfig, settings.payload, settings.blamed)
        run_server(args, serve(config))
    except ConfigError as error:
        sys.exit(f"error: {error}")


class Serving(NamedTuple):
    """A ServeCore and its app, whose lifespan ends it."""

    core: ServeCore
    app: FastAPI


@asynccontextmanager
async def serving(config: CoreConfig, storage: Storage | None = None) -> AsyncIterator[Serving]:
    """A ServeCore that goes on where the records of `storage` end, or those of the journal's file.
    Raises `ConfigError` if the journal cannot be had or the trace cannot be written."""
    with ExitStack() as stack:
        trace = None
        if config.trace_path is not None:
            trace = TraceFile(config.trace_path)
            stack.callback(trace.close)
        clock: Clock = MonotonicClock()
        if storage is None and config.journal is not None:
            storage = JournalFile(config.journal, config.journal_size)
        journal = None
        if storage is not None:
            journal = Journal(storage, clock, config.journal_timeout)
            clock = journal.clock
        sinks: list[Sink] = [] if trace is None else [Recorder(trace, clock).sink]
        if config.otlp_endpoint is not None:
            export = span_export(config.otlp_endpoint, "parrot", "parrot.observe.spans")
            stack.callback(export.close)
            sinks.append(Tracer(export, clock).sink)
        if CALLS.isEnabledFor(logging.INFO):
            sinks.append(CallLog().sink)
        core = ServeCore(config, clock=clock, sinks=sinks, first_session_id=_first_session_id())
        try:
            yield Serving(core, create_app(core, journal))
        finally:
            if journal is not None:
                await journal.close()


def _first_session_id() -> int:
    """Milliseconds since 1970: above every id that an earlier process gave out, unless that made
    more than a thousand sessions a second for all of its life. So a program that outlives a restart
    never names a session of another's."""
    return time.time_ns() // 1_000_000


if __name__ == "__main__":
    main()
