"""Runs an app on a free loopback port, in the test's own event loop or in a thread."""

import asyncio
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from parrot.protocol.app_server import KEEP_ALIVE_S


class _AnnouncingServer(uvicorn.Server):
    """A server with an event for the moment at which it accepts connections."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()


@asynccontextmanager
async def serve_app(app: ASGIApp, port: int = 0, **options: Any) -> AsyncIterator[str]:
    """Yield the app's base URL while the app runs. `options` are passed to uvicorn."""
    listener = socket.create_server(("127.0.0.1", port))
    # asyncio sets this option only for sockets that it creates. Without it, answers may take 40 ms
    # longer.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    server = _AnnouncingServer(
        uvicorn.Config(
            app,
            log_level="error",
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
            proxy_headers=False,  # The real server has the same setting.
            **options,
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


@contextmanager
def running_in_thread(app: ASGIApp) -> Iterator[str]:
    """Run an app in a thread, for blocking programs. Yields the base URL."""
    urls: list[str] = []
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        try:
            async with serve_app(app) as url:
                urls.append(url)
                started.set()
                await stop.wait()
        finally:
            started.set()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), name="server")
    thread.start()
    started.wait()
    try:
        yield urls[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
