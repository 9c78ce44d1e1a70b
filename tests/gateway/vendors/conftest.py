"""ServeCore over real HTTP, with an engine in the test's process that records its prompts."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_engine import FakeEngine, fake_engine

MODEL = "tiny"


@dataclass
class Site:
    core: ServeCore
    engine: FakeEngine
    http: aiohttp.ClientSession

    async def send(self, path: str, body: Any, **options: Any) -> tuple[int, Any]:
        async with self.http.post(path, json=body, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any, **options: Any) -> Any:
        status, answer = await self.send(path, body, **options)
        assert status == 200, answer
        return answer

    async def stream(
        self, path: str, body: Any, method: str = "POST"
    ) -> list[tuple[str | None, str]]:
        """Return the name and data of each event of a stream."""
        events: list[tuple[str | None, str]] = []
        async with self.http.request(method, path, json=body) as response:
            assert response.status == 200, await response.text()
            assert response.headers["content-type"].startswith("text/event-stream")
            for block in (await response.text()).split("\n\n"):
                fields = dict(line.split(": ", 1) for line in block.splitlines() if line)
                if "data" in fields:
                    events.append((fields.get("event"), fields["data"]))
        return events


def payloads(events: list[tuple[str | None, str]]) -> list[Any]:
    """Return the JSON of the events of a stream that ends with `[DONE]`."""
    assert events[-1] == (None, "[DONE]")
    assert {name for name, _ in events} == {None}
    return [json.loads(data) for _, data in events[:-1]]


@pytest.fixture
def core_config() -> CoreConfig:
    return CoreConfig()


@asynccontextmanager
async def serve(config: CoreConfig, engine: FakeEngine) -> AsyncIterator[Site]:
    clock = MonotonicClock()
    dispatcher = Dispatcher(config, clock, lambda info: engine)
    core = ServeCore(config, clock=clock, dispatcher=dispatcher)
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        await core.register_engine(RegisterRequest(engine_config=engine.info))
        yield Site(core, engine, http)
        core.check_integrity()


@pytest.fixture
async def site(core_config: CoreConfig) -> AsyncIterator[Site]:
    async with serve(core_config, fake_engine("e0", model=MODEL)) as site:
        yield site
