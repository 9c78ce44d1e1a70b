"""An engine's process: its service, its app, its heartbeat, and the command that serves them.

`python3 -m parrot.engine.http_server --config_path engine.json`
"""

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Sequence

from parrot.engine.app import create_app
from parrot.engine.config import AnyEngineConfig, load_engine_config, parse_engine_config
from parrot.engine.core.driver import core_thread_is_alive
from parrot.engine.core.plan import DeviceLost
from parrot.engine.engine_types import create_service
from parrot.engine.heartbeat import Heartbeat
from parrot.engine.reorder import ReorderBuffer
from parrot.engine.service import EngineService
from parrot.protocol.app_server import AppServer
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import RegistrationClient
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from parrot.utils.logging import setup_logging

logger = logging.getLogger(__name__)


async def serve(config: AnyEngineConfig, *, with_core: bool = True) -> None:
    """Serve until SIGTERM or SIGINT. The port answers at once, /ready when the model is loaded;
    only then does the engine register. Raises what loading raises."""
    service, reorder = create_service(config), ReorderBuffer(MonotonicClock())
    app = create_app(service, reorder, config)
    server = AppServer(app, config.host, config.port, service.close)
    engine = asyncio.create_task(run_engine(config, service, reorder, with_core=with_core))
    engine.add_done_callback(lambda _: setattr(server, "should_exit", True))
    try:
        await server.serve()
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
    if not engine.cancelled() and (error := engine.exception()) is not None:
        raise error


async def run_engine(
    config: AnyEngineConfig, service: EngineService, reorder: ReorderBuffer, *, with_core: bool
) -> None:
    """Load, then stay registered. Ends only by an error: another process may have more luck with
    the device that this one has lost."""
    await service.start()
    logger.info("%s is ready on %s:%d", config.engine_name, config.host, config.port)
    if not with_core:
        await asyncio.Event().wait()
    core = config.serve_core
    url = f"http://{core.host}:{core.port}"
    async with HttpClient(url, bearer_token=config.cluster_token) as http:
        heartbeat = Heartbeat(
            RegistrationClient(http),
            service,
            reorder,
            MonotonicClock(),
            interval_s=config.heartbeat_interval,
            core=(core.host, core.port),
        )
        await heartbeat.run()


def _parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Run one Parrot engine.")
    parser.add_argument("--config_path", help="JSON config file; without it: builtin, embedded")
    parser.add_argument("--host", help="address to bind, instead of the config's")
    parser.add_argument("--port", type=int, help="port to bind, instead of the config's")
    parser.add_argument("--engine_name", help="name to register, instead of the config's")
    parser.add_argument("--device", help="auto, cpu, cuda or cuda:N, instead of the config's")
    parser.add_argument(
        "--without_core", action="store_true", help="serve alone, do not register with ServeCore"
    )
    parser.add_argument("--log_dir", help="also write the log to a file in this folder")
    parser.add_argument("--log_filename", default="engine_server.log")
    parser.add_argument("--release_mode", action="store_true", help="log warnings and errors only")
    return parser.parse_args(argv)


def _configure(args: argparse.Namespace) -> AnyEngineConfig:
    keys = ("host", "port", "engine_name", "device")
    given = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    if args.config_path is None:
        return parse_engine_config(given, "command line")
    return load_engine_config(args.config_path, given)


def main(argv: Sequence[str] | None = None) -> None:
    args = _parse_args(argv)
    try:
        config = _configure(args)
    except ConfigError as error:
        sys.exit(f"error: {error}")
    level = logging.WARNING if args.release_mode else logging.INFO
    setup_logging(level, args.log_dir, args.log_filename)
    import uvloop

    try:
        uvloop.run(serve(config, with_core=not args.without_core))
    except (ConfigError, DeviceLost) as error:
        sys.exit(f"error: {error}")
    if core_thread_is_alive():
        # Native code that still loads weights would abort the process in Python's own shutdown.
        logging.shutdown()
        os._exit(0)


if __name__ == "__main__":
    main()
