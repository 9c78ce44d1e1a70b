import asyncio
import logging
import os
import signal
from pathlib import Path

import aiohttp
import pytest
from fastapi import FastAPI

from parrot.protocol.app_server import AppServer, run_server, server_options
from parrot.protocol.server_config import ConnectionLimits
from tests.support.root_logger import unchanged_root_logger


async def start(app: FastAPI, end_requests: asyncio.Event) -> tuple[AppServer, asyncio.Task[None]]:
    async def end() -> None:
        end_requests.set()

    server = AppServer(app, "127.0.0.1", 0, end, ConnectionLimits())
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(5):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no other signal
            await asyncio.sleep(0.01)
    return server, serving


def url_of(server: AppServer) -> str:
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def test_open_requests_are_ended_before_the_server_waits_for_them() -> None:
    app, ended = FastAPI(), asyncio.Event()

    @app.get("/")
    async def wait() -> str:
        await ended.wait()
        return "ended"

    server, serving = await start(app, ended)
    async with aiohttp.ClientSession() as http:
        answer = asyncio.create_task(http.get(url_of(server)))
        await asyncio.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            assert await (await answer).json() == "ended"
            await serving


@pytest.mark.parametrize("idle_s", [0.0, 6.0])
async def test_idle_connections_stay_open_longer_than_clients_keep_them(idle_s: float) -> None:
    app, ended = FastAPI(), asyncio.Event()

    @app.post("/")
    async def post() -> str:
        return "posted"

    server, serving = await start(app, ended)
    async with aiohttp.ClientSession() as http:
        async with http.post(url_of(server)) as first:
            await first.read()
        connections = set(server.server_state.connections)
        await asyncio.sleep(idle_s)
        async with http.post(url_of(server)) as second:
            assert await second.json() == "posted"
        assert set(server.server_state.connections) == connections
    server.should_exit = True
    await asyncio.wait_for(serving, 30)


def test_logs_go_to_the_given_file(tmp_path: Path) -> None:
    async def serve() -> None:
        logging.getLogger("parrot.test").info("hello file")

    args = server_options("A test.", "x.log").parse_args(["--log_dir", str(tmp_path / "new")])
    with unchanged_root_logger():
        run_server(args, serve())
    assert "INFO parrot.test: hello file" in (tmp_path / "new" / "x.log").read_text()
