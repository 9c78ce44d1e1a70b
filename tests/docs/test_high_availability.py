"""docs/reliability.md: HAProxy sends requests to the active ServeCore."""

import asyncio
from pathlib import Path

import aiohttp
from starlette.types import ASGIApp, Receive, Scope, Send

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.server.standby import standby_app
from tests.docs.haproxy import haproxy_of
from tests.docs.test_proxy import free_port
from tests.support.app_server import serve_app


class Replaceable:
    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


async def test_the_proxy_uses_the_active_servecore(tmp_path: Path) -> None:
    serving, waiting = create_app(ServeCore(CoreConfig())), standby_app(CoreConfig())
    first, second = Replaceable(serving), Replaceable(waiting)
    async with serve_app(first) as a, serve_app(second) as b:
        port = free_port()
        addresses = {
            ":443 ssl crt /etc/ssl/parrot.pem": f"127.0.0.1:{port}",
            "10.0.0.1:9000": a.removeprefix("http://"),
            "10.0.0.2:9000": b.removeprefix("http://"),
        }
        async with (
            haproxy_of("cores", port, addresses, tmp_path),
            aiohttp.ClientSession(f"http://127.0.0.1:{port}") as http,
        ):
            for _ in range(2):
                await begin_session(http)
                async with http.get("/metrics") as response:
                    assert response.status == 403
                first.app, second.app = second.app, first.app


async def begin_session(http: aiohttp.ClientSession) -> None:
    """Wait until HAProxy has found the active ServeCore."""
    async with asyncio.timeout(20):
        while True:
            async with http.post("/v1/session", json={}) as response:
                if response.status == 200:
                    return
                assert response.status == 503
            await asyncio.sleep(0.05)  # HAProxy checks the servers every second
