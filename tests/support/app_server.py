"""Run a FastAPI app on a free loopback port inside the test's own event loop."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from parrot.protocol.app_server import KEEP_ALIVE_S


class _AnnouncingServer(uvicorn.Server):
    """Says when it accepts connections, instead of being asked again and again."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def serve_app(app: FastAPI, port: int = 0) -> AsyncIterator[str]:
    """Yield the app's base URL; the app's lifespan runs around it."""
    listener = socket.create_server(("127.0.0.1", port))
    # asyncio does this only for sockets that it makes; without it each answer may take 40 ms more.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _AnnouncingServer(
        uvicorn.Config(
            app, log_level="error", timeout_keep_alive=KEEP_ALIVE_S, timeout_graceful_shutdown=1
        )
    )
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    listening = asyncio.ensure_future(server.listening.wait())
    await asyncio.wait((serving, listening), return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        listening.cancel()
        serving.result()
        raise RuntimeError("the app did not start")
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
        listener.close()
