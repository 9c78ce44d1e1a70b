"""The uvicorn server that every Parrot process runs its app with."""

import signal
import socket
from collections.abc import Awaitable, Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

# Idle connections must be closed by their clients (aiohttp's do it after 15 s, uvicorn's default
# is 5): a request that is sent while the server closes is lost, and a POST is not sent again.
KEEP_ALIVE_S = 75
_SHUTDOWN_GRACE_S = 5


class AppServer(uvicorn.Server):
    """Serves `app` until SIGTERM or SIGINT. `end_requests` is then called first, so that open
    requests get their answer and shutting down takes no longer than it must."""

    def __init__(
        self, app: FastAPI, host: str, port: int, end_requests: Callable[[], Awaitable[None]]
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                access_log=False,
                log_config=None,
                proxy_headers=False,  # nobody asks for the client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=_SHUTDOWN_GRACE_S,
            )
        )
        self._end_requests = end_requests

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Do as uvicorn does, but exit with status 0 after a clean end, not by the signal."""
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._end_requests()
        await super().shutdown(sockets)
