"""The parts that the commands of all servers share: options, log, and the uvicorn server."""

import argparse
import asyncio
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from parrot.protocol.gate.config import ConnectionLimits
from parrot.protocol.gate.connection import guarded_protocol
from parrot.utils.logs import CALLS, JsonFormatter, LogFile, TextFormatter

# Idle connections must be closed by their clients (aiohttp's do it after 15 s, uvicorn's default
# is 5): a request that is sent while the server closes is lost, and a POST is not sent again.
KEEP_ALIVE_S = 75
_SHUTDOWN_GRACE_S = 5


class AppServer(uvicorn.Server):
    """Serves `app` until SIGTERM or SIGINT. `end_requests` is then called first, so that open
    requests get their answer and shutting down takes no longer than it must; after SIGTERM it is
    called when `drain` has returned or another signal came. Until then it serves as ever."""

    def __init__(
        self,
        app: ASGIApp,
        host: str,
        port: int,
        end_requests: Callable[[], Awaitable[None]],
        limits: ConnectionLimits,
        drain: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                http=guarded_protocol(limits),
                ws="none",
                access_log=False,
                log_config=None,
                proxy_headers=False,  # nobody asks for the client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            )
        )
        self._end_requests = end_requests
        self._drain = drain
        self._draining: asyncio.Task[None] | None = None
        self._signals: list[int] = []

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Do as uvicorn does, but exit with status 0 after a clean end, not by the signal."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True
        self._signals.append(sig)
        if self._draining is not None:
            self._draining.get_loop().call_soon_threadsafe(self._draining.cancel)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            if self._drain is not None and self._signals == [signal.SIGTERM]:
                self._draining = asyncio.create_task(self._drain())
                await asyncio.wait((self._draining,))
                if not self._draining.cancelled():
                    self._draining.result()
        finally:
            await self._end_requests()
            await super().shutdown(sockets)


def server_options(description: str, log_filename: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--config_path", help="JSON or YAML config file")
    parser.add_argument("--host", help="address to bind, instead of the config's")
    parser.add_argument("--port", type=int, help="port to bind, instead of the config's")
    parser.add_argument(
        "--insecure",
        action="store_true",
        default=None,
        help="start without a cluster token: whoever can connect is let in",
    )
    parser.add_argument("--log_dir", help="also write the log to a file in this folder")
    parser.add_argument("--log_filename", default=log_filename)
    parser.add_argument("--release_mode", action="store_true", help="log warnings and errors only")
    parser.add_argument(
        "--log_format", choices=("text", "json"), default="text", help="of each line of the log"
    )
    parser.add_argument(
        "--log_calls", action="store_true", help="log how each session and each call ended, too"
    )
    return parser


def given_options(args: argparse.Namespace, *keys: str) -> dict[str, Any]:
    """The options that replace the config's keys of the same name."""
    return {key: getattr(args, key) for key in keys if getattr(args, key) is not None}


def run_server(args: argparse.Namespace, serve: Coroutine[Any, Any, None]) -> None:
    """Log as `server_options` say, to stderr too, and run until the server ends."""
    handlers: list[logging.Handler] = [logging.StreamHandler()]
    if args.log_dir is not None:
        Path(args.log_dir).mkdir(parents=True, exist_ok=True)
        handlers.append(LogFile(Path(args.log_dir) / args.log_filename))
    level = logging.WARNING if args.release_mode else logging.INFO
    formatter = JsonFormatter() if args.log_format == "json" else TextFormatter()
    for handler in handlers:
        handler.setFormatter(formatter)
    logging.basicConfig(level=level, handlers=handlers, force=True)
    CALLS.setLevel(logging.INFO if args.log_calls else logging.WARNING)
    import uvloop

    uvloop.run(serve)
