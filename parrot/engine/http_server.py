"""An engine's process: its service, its app, its heartbeat, and the command that serves them.

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
from parrot.engine.service import EngineService, core_thread_is_alive
from parrot.protocol.app_server import AppServer, given_options, run_server, server_options
from parrot.protocol.server_config import settled_token
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from parrot.utils.ids import new_token

logger = logging.getLogger(__name__)

# How long the thread that makes steps waits for the interpreter while the event loop is busy with
# streams. Python's own 5 ms, each time that an operation on the device returns, is a step's length.
_SWITCH_INTERVAL_S = 2e-4

# Objects that are made before Python looks for garbage among them, collections before it looks at
# older ones, and at the oldest. A step of 256 sequences makes thousands that go with it: with the
# interpreter's own 700, 10, 10 it looked at them every other step, a tenth of the host's time.
_COLLECTED_EVERY = (10_000, 4, 2)


async def serve(config: AnyEngineConfig, *, with_core: bool = True) -> None:
    """Serve until SIGTERM or SIGINT. The port answers at once, /ready when the model is loaded;
    only then does the engine register. Raises what loading raises, and `ConfigError` if a cluster
    token is needed and missing."""
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
    heartbeat = registration(config, app.state.front, incarnation) if with_core else None

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
    """Load, then stay registered, until the engine has left, or alone. Else it ends only by an
    error: another process may have more luck with the device that this one has lost."""
    await service.start()
    logger.info("%s is ready on %s:%d", config.engine_name, config.host, config.port)
    if heartbeat is None:
        await asyncio.Event().wait()
    else:
        await heartbeat.run()


def engine_options() -> ArgumentParser:
    options = server_options("Run one Parrot engine.", "engine_server.log")
    options.add_argument("--engine-name", help="name to register; replaces the config's")
    options.add_argument("--device", help="auto, cpu, cuda or cuda:N; replaces the config's")
    options.add_argument(
        "--without-core", action="store_true", help="serve alone, without ServeCore"
    )
    return options


def main(argv: Sequence[str] | None = None) -> None:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.set_threshold(*_COLLECTED_EVERY)
    args = engine_options().parse_args(argv)
    try:
        given = given_options(args, "host", "port", "engine_name", "device", "insecure")
        settings = engine_settings(args.config_path, given, os.environ)
        config = parse_engine_config(settings.payload, settings.blamed)
        run_server(args, serve(config, with_core=not args.without_core))
    except (ConfigError, DeviceLost) as error:
        sys.exit(f"error: {error}")
    if core_thread_is_alive():
        # Native code that still loads weights would abort the process in Python's own shutdown.
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    main()
