"""Only servers with the cluster's token may register as engines or use engines. Real HTTP."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest

from parrot.cluster.ports import free_port
from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as create_engine_app
from parrot.engine.config import SimConfig
from parrot.engine.engine_types import create_service
from parrot.engine.heartbeat import registration
from parrot.engine.http_server import run_engine
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app as create_core_app
from parrot.utils.clock import MonotonicClock
from parrot.utils.logs import LastWarning
from tests.e2e.programs import program
from tests.support.app_server import serve_app


@asynccontextmanager
async def cluster(core_token: str | None, engine_token: str | None) -> AsyncIterator[HttpClient]:
    """Run a ServeCore and an engine that tries to register with it."""
    core = ServeCore(CoreConfig(cluster_token=core_token))
    async with serve_app(create_core_app(core)) as url, HttpClient(url) as http:
        port = free_port("127.0.0.1", set())
        address = {"host": "127.0.0.1", "port": urlsplit(url).port}
        config = SimConfig.model_validate(
            {"host": "127.0.0.1", "port": port, "serve_core": address, "heartbeat_interval": 0.05}
            | {"cluster_token": engine_token}
        )
        service = create_service(config)
        app = create_engine_app(service, ReorderBuffer(MonotonicClock()), config)
        async with serve_app(app, port):
            heartbeat = registration(config, app.state.front, LastWarning())
            engine = asyncio.create_task(run_engine(config, service, heartbeat))
            yield http
            engine.cancel()
            await asyncio.gather(engine, return_exceptions=True)
            await heartbeat.close()
            await service.close()


async def models(http: HttpClient) -> list[Any]:
    found: list[Any] = (await http.request("GET", "/v1/models"))["data"]
    return found


async def test_with_the_same_token_calls_run_and_engines_stay() -> None:
    async with cluster("sesame", "sesame") as http, asyncio.timeout(30):
        while not await models(http):
            await asyncio.sleep(0.02)
        async with program(ServeClient(http)) as session:
            for _ in range(3):
                assert await session.get(await session.call("Say something: {{out}}"))
                await asyncio.sleep(0.1)


@pytest.mark.parametrize("engine_token", [None, "open"])
async def test_an_engine_with_another_token_does_not_join(
    engine_token: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async with cluster("sesame", engine_token) as http, asyncio.timeout(30):
        while "cluster token" not in caplog.text:
            await asyncio.sleep(0.02)
        assert await models(http) == []


async def test_an_engine_with_a_token_does_not_join_a_servecore_without_one(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """ServeCore requires no token here, but it cannot fetch the engine's tokenizer."""
    async with cluster(None, "sesame") as http, asyncio.timeout(30):
        while "returned no tokenizer" not in caplog.text:
            await asyncio.sleep(0.02)
        assert await models(http) == []
