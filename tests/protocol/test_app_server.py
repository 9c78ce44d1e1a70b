import asyncio
import logging
import os
import signal
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from uvicorn.server import ServerState

from parrot.protocol.app_server import (
    AppServer,
    GuardedProtocol,
    guarded_protocol,
    run_server,
    server_options,
)
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


class RecordingTransport(asyncio.Transport):
    """Records each write to the socket."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.is_closed = False

    def write(self, data: Any) -> None:
        self.sent.append(bytes(data))

    def writelines(self, list_of_data: Iterable[Any]) -> None:
        self.write(b"".join(list_of_data))

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def is_closing(self) -> bool:
        return self.is_closed

    def close(self) -> None:
        self.is_closed = True


async def connected(app: FastAPI) -> tuple[GuardedProtocol, RecordingTransport]:
    config = uvicorn.Config(app, ws="none", lifespan="off", access_log=False)
    config.load()
    protocol = guarded_protocol(ConnectionLimits())(config, ServerState(), {})
    transport = RecordingTransport()
    protocol.connection_made(transport)
    return protocol, transport


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_head_and_the_body_of_an_answer_are_one_write() -> None:
    app, more = FastAPI(), asyncio.Event()

    @app.get("/whole")
    async def whole() -> str:
        return "whole"

    @app.get("/stream")
    async def stream() -> StreamingResponse:
        async def pieces() -> AsyncIterator[str]:
            await more.wait()
            yield "first"
            await asyncio.sleep(0)
            yield "second"

        return StreamingResponse(pieces())

    protocol, transport = await connected(app)
    protocol.data_received(b"GET /whole HTTP/1.1\r\n\r\n" * 2)
    await settle()
    assert [(sent[:15], sent[-7:]) for sent in transport.sent] == [
        (b"HTTP/1.1 200 OK", b'"whole"')
    ] * 2
    transport.sent.clear()
    protocol.data_received(b"GET /stream HTTP/1.1\r\n\r\n")
    await settle()
    assert len(transport.sent) == 1  # The head does not wait for a body.
    assert transport.sent[0].endswith(b"transfer-encoding: chunked\r\n\r\n")
    more.set()
    await settle()
    assert transport.sent[1:3] == [b"5\r\nfirst\r\n", b"6\r\nsecond\r\n"]
    transport.sent.clear()
    protocol.data_received(b"GET /whole HTTP/1.1\r\nConnection: close\r\n\r\n")
    await settle()
    assert transport.sent[0].endswith(b'"whole"')
    assert transport.is_closed
    protocol.connection_lost(None)


async def test_a_head_without_a_body_is_sent_before_the_connection_closes() -> None:
    protocol, transport = await connected(FastAPI())
    protocol.data_received(b"HEAD / HTTP/1.1\r\nConnection: close\r\n\r\n")
    await settle()
    assert transport.sent[0].startswith(b"HTTP/1.1 404 Not Found\r\n")
    assert (len(transport.sent), transport.is_closed) == (1, True)
    protocol.connection_lost(None)


def test_logs_go_to_the_given_file(tmp_path: Path) -> None:
    async def serve() -> None:
        logging.getLogger("parrot.test").info("hello file")

    args = server_options("A test.", "x.log").parse_args(["--log_dir", str(tmp_path / "new")])
    with unchanged_root_logger():
        run_server(args, serve())
    assert "INFO parrot.test: hello file" in (tmp_path / "new" / "x.log").read_text()
