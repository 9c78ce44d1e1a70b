"""ServeCore in front of servers of other projects, without an engine process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from tests.foreign.servers import MODEL, ForeignServer, LlamaCppPython
from tests.foreign.test_foreign_engines import BY_LENGTH, answer, chat, completion, events

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

TOO_LONG = [{"role": "user", "content": "word " * 2500}]


@pytest.fixture
async def http(server: ForeignServer) -> AsyncIterator[aiohttp.ClientSession]:
    core = {"servers": [{"url": f"{server.url}/v1"}]}
    with Cluster(core=core, engines=[]) as cluster:
        await until_served(cluster.core_url)
        async with aiohttp.ClientSession(cluster.core_url) as session:
            yield session


async def until_served(url: str) -> None:
    async with aiohttp.ClientSession(url) as http, asyncio.timeout(60):
        while True:
            async with http.get("/v1/models") as response:
                if (await response.json())["data"]:
                    return
            await asyncio.sleep(0.05)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Say yes."}]}),
        ("/v1/responses", {"input": "Say yes."}),
        ("/v1/messages", chat(messages=chat()["messages"][1:], max_tokens=32_000)),
    ],
)
async def test_a_limit_above_the_context_does_not_matter(http: Any, path: str, body: Any) -> None:
    """A missing limit, or one above the server's 2,048 tokens, works."""
    status, payload = await answer(http, {"model": MODEL} | body, path)
    assert status == 200, payload


async def test_a_prompt_that_is_too_long_is_named(http: Any) -> None:
    status, payload = await answer(http, chat(messages=TOO_LONG), "/v1/chat/completions")
    assert (status, payload["error"]["code"]) == (400, "context_length_exceeded"), payload


async def test_a_long_answer_is_not_cut_off(http: Any, server: ForeignServer) -> None:
    """The answer takes longer than the 10 s between two requests for the server's models."""
    if not isinstance(server, LlamaCppPython):
        pytest.skip("only llama-cpp-python cuts off answers")
    body = completion(max_tokens=1200) | BY_LENGTH
    seen = [event async for event in events(http, body)]
    assert seen[-1]["choices"][0]["finish_reason"] == "length"
    assert len(seen) >= 1000
