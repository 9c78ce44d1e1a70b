"""The process of an engine: its service, its HTTP app, its heartbeat and its command.

`python3 -m parrot.engine.http_server --config_path engine.json`
"""

import asyncio
import gc
import logging
import os
import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import AnyEngineConfig, engine_settings, parse_engine_config
from parrot.engine.core.steps import DeviceLost
from parrot.engine.engine_types import create_service
from parrot.engine.heartbeat import Heartbeat, registration
from parrot.engine.service import EngineService, ServiceState, core_thread_is_alive
from parrot.protocol.app_server import AppServer, given_options, run_server, server_options
from parrot.protocol.errors import Unavailable
from parrot.protocol.server_config import settled_token
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from parrot.utils.ids import new_token
from parrot.utils.logs import LastWarning

logger = logging.getLogger(__name__)

# Time, in seconds, after which the core thread gets the GIL from a busy event loop. It waits for
# the GIL after each GPU operation. Python's default of 5 ms is as long as a step.
_SWITCH_INTERVAL_S = 2e-4

# Thresholds of Python's garbage collector for its three generations. A step of 256 sequences
# creates thousands of objects that live for one step. The default (700, 10, 10) collected every
# other step, which took a tenth of the CPU time.
_GC_THRESHOLDS = (10_000, 4, 2)


async def serve(config: AnyEngineConfig, *, with_core: bool = True) -> None:
    """Serve until SIGTERM or SIGINT.

    The port is open at once. The engine becomes ready and registers when the model is loaded.
    Raises the errors of loading, and `ConfigError` if a required cluster token is missing."""
    token = settled_token(
        config.host,
        config.cluster_token,
        insecure=config.insecure,
        is_alone=not with_core,
        state_dir=config.state_dir,
    )
    config = config.model_copy(update={"cluster_token": token})
    service, incarnation = create_service(config), new_token()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config, incarnation)
    warnings, front = LastWarning(), app.state.front
    heartbeat = registration(config, front, warnings, incarnation) if with_core else None

    async def end_requests() -> None:
        await service.close()
        app.state.front.channels.close()

    async def drain() -> None:
        if heartbeat is not None and config.drain_timeout:
            await heartbeat.leave(config.drain_timeout)

    server = AppServer(app, config.host, config.port, end_requests, config.connections, drain)
    engine = asyncio.create_task(run_engine(config, service, heartbeat))
    engine.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        with warnings.listening():
            await server.serve()
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
        if heartbeat is not None:
            await heartbeat.close()
    if not engine.cancelled() and (error := engine.exception()) is not None:
        raise error


async def run_engine(
    config: AnyEngineConfig, service: EngineService, heartbeat: Heartbeat | None
) -> None:
    """Load the model and keep the engine registered until it has left. Without a heartbeat, serve
    until cancelled.

    Raises `DeviceLost`, so that the process exits and a new process can use the device."""
    try:
        await service.start()
    except Unavailable:
        if service.state() is ServiceState.CLOSED:
            return  # A signal ended the warm-up.
        raise
    logger.info("%s is ready on %s:%d", config.engine_name, config.host, config.port)
    if heartbeat is None:
        await asyncio.Event().wait()
    else:
        await heartbeat.run()


def engine_options() -> ArgumentParser:
    options = server_options("Run one Parrot engine.", "engine_server.log")
    options.add_argument("--engine-name", help="name to register; overrides the config")
    options.add_argument("--device", help="auto, cpu, cuda or cuda:N; overrides the config")
    options.add_argument("--without-core", action="store_true", help="serve without ServeCore")
    return options


def main(argv: Sequence[str] | None = None) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.set_threshold(*_GC_THRESHOLDS)
    args = engine_options().parse_args(argv)
    try:
        given = given_options(args, "host", "port", "engine_name", "device", "insecure")
        settings = engine_settings(args.config_path, given, os.environ)
        config = parse_engine_config(settings.payload, settings.blamed)
        run_server(args, serve(config, with_core=not args.without_core))
    except (ConfigError, DeviceLost) as error:
        sys.exit(f"error: {error}")
    if core_thread_is_alive():
        # Native code that is still loading weights would crash during the interpreter's shutdown.
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    main()
