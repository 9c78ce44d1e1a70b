"""ServeCore's process: the app from its parts, and the command that serves it.

`python3 -m parrot.serve.http_server --config_path core.json`
"""

import gc
import logging
import os
import sys
import time
from collections.abc import Sequence

from parrot.protocol.app_server import AppServer, given_options, run_server, server_options
from parrot.protocol.gate.cluster_token import settled_token
from parrot.protocol.gate.names import is_loopback
from parrot.serve.api.app import create_app
from parrot.serve.call_log import CallLog
from parrot.serve.config import CoreConfig, core_settings
from parrot.serve.core import ServeCore
from parrot.serve.journal.journal import Journal
from parrot.serve.observers import Observer
from parrot.serve.recorder import Recorder, TraceFile
from parrot.serve.traces.tracer import Tracer
from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.config import ConfigError, parse_config
from parrot.utils.logs import CALLS
from parrot.utils.traces.export import span_export

logger = logging.getLogger(__name__)

_YOUNG_OBJECTS = 10_000  # the interpreter's 700 are a call's or two


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
    trace = None if config.trace_path is None else TraceFile(config.trace_path)
    clock: Clock = MonotonicClock()
    journal = None
    if config.journal is not None:
        journal = Journal.at(config.journal, config.journal_size, clock, config.journal_timeout)
        clock = journal.clock
    observers: list[Observer] = [] if trace is None else [Recorder(trace, clock)]
    export = (
        None
        if config.otlp_endpoint is None
        else span_export(config.otlp_endpoint, "parrot", "parrot.serve.traces.spans")
    )
    if export is not None:
        observers.append(Tracer(export, clock))
    if CALLS.isEnabledFor(logging.INFO):
        observers.append(CallLog(clock))
    core = ServeCore(config, clock=clock, observers=observers, first_session_id=_first_session_id())

    async def end_requests() -> None:
        core.shut_down()

    try:
        app = create_app(core, journal)
        await AppServer(app, config.host, config.port, end_requests, config.connections).serve()
    finally:
        if journal is not None:
            await journal.close()
        if trace is not None:
            trace.close()
        if export is not None:
            export.close()


def _first_session_id() -> int:
    """Milliseconds since 1970: above every id that an earlier process gave out, unless that made
    more than a thousand sessions a second for all of its life. So a program that outlives a restart
    never names a session of another's."""
    return time.time_ns() // 1_000_000


def _spare_garbage_collection() -> None:
    """Modules live as long as the process, and nearly all that a call makes is freed without the
    collector: let it pass over the first, and look at the others less often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS)


def main(argv: Sequence[str] | None = None) -> None:
    args = server_options("Run Parrot's ServeCore.", "core_server.log").parse_args(argv)
    try:
        options = given_options(args, "host", "port", "insecure")
        settings = core_settings(args.config_path, options, os.environ)
        config = parse_config(CoreConfig, settings.payload, settings.blamed)
        _spare_garbage_collection()
        run_server(args, serve(config))
    except ConfigError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
