"""A ServeCore in front of servers, and its client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson
import pytest

from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.upstreams import servers
from parrot.utils.config import parse_config
from tests.support.app_server import serve_app


@pytest.fixture(autouse=True)
def lists_are_read_often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servers, "_LIST_INTERVAL_S", 0.02)


class Client:
    """Calls a ServeCore as an OpenAI client does."""

    def __init__(self, http: aiohttp.ClientSession, core: ServeCore) -> None:
        self._http = http
        self.core = core
        self.retry_after: str | None = None  # Of the last answer.

    async def models(self) -> list[str]:
        async with self._http.get("/v1/models") as response:
            return [card["id"] for card in (await response.json())["data"]]

    async def ask(self, model: str = "gpt-fake", **fields: Any) -> tuple[int, Any]:
        body = chat(model) | fields
        async with self._http.post("/v1/chat/completions", json=body) as response:
            self.retry_after = response.headers.get("retry-after")
            return response.status, await response.json()

    async def said(self) -> str:
        """Return the text of an answer."""
        status, answer = await self.ask()
        assert status == 200, answer
        text: str = answer["choices"][0]["message"]["content"]
        return text

    async def embedded(self, text: str) -> int:
        """Return the number of embeddings of a text."""
        body = {"model": "gpt-fake", "input": text}
        async with self._http.post("/v1/embeddings", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return len(answer["data"])

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[Any]:
        async with self._http.post(path, json=body | {"stream": True}) as response:
            assert response.status == 200, await response.text()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    yield orjson.loads(line[6:])

    async def until_served(self, *models: str, times: int = 1) -> None:
        """Wait until these models are listed, each with the given number of engines."""
        async with asyncio.timeout(20):
            while (  # noqa: ASYNC110 - there is no event to wait for
                await self.models() != list(models) or self.num_engines != times * len(models)
            ):
                await asyncio.sleep(0.01)

    @property
    def num_engines(self) -> int:
        return len(self.core.fleet.engines)


def chat(model: str = "gpt-fake") -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": "x"}]}


@asynccontextmanager
async def core_of(*entries: dict[str, Any], **keys: Any) -> AsyncIterator[Client]:
    """A ServeCore whose config key `servers` has these entries."""
    config = parse_config(CoreConfig, {"servers": list(entries), **keys}, "test")
    core = ServeCore(config)
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        yield Client(http, core)
        core.check_integrity()
