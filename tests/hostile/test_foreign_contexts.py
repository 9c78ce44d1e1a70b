"""On an engine with several tenants, a tenant cannot use the contexts of another one. The ids of
contexts are small numbers that can be guessed."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import EngineConfig, OpenAIConfig, SimConfig
from parrot.engine.openai.service import OpenAIService
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import FillRequest, GenerateRequest
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NotFound
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI

ZERO = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
TOKENS = {"token_ids": [1, 2, 3, 4] * 8}


@asynccontextmanager
async def served(service: Any, config: EngineConfig) -> AsyncIterator[EngineClient]:
    await service.start()
    app = create_app(service, ReorderBuffer(MonotonicClock()), config)
    async with serve_app(app) as url, HttpClient(url) as http:
        yield EngineClient(http)
    service.check_integrity()
    await service.close()


async def try_all(client: EngineClient, content: dict[str, Any]) -> None:
    await client.fill(FillRequest(context_id=1, cache_salt="victim", **content))
    short = SamplingConfig(max_gen_length=2)
    for salt in ("", "attacker"):
        forks = ({"context_id": 2, "parent_context_id": 1}, {"context_id": 1})
        for fork in forks:
            with pytest.raises(NotFound, match="no context 1"):
                await client.fill(FillRequest(**fork, cache_salt=salt, **content))
            with pytest.raises(NotFound, match="no context 1"):
                await client.generate(
                    GenerateRequest(**fork, cache_salt=salt, sampling_config=short)
                )
    own = {"context_id": 3, "parent_context_id": 1, "cache_salt": "victim"}
    await client.fill(FillRequest(**own, **content))
    for salt in ("", "attacker"):  # a fork belongs to the owner of its root
        with pytest.raises(NotFound, match="no context 3"):
            await client.fill(
                FillRequest(context_id=4, parent_context_id=3, cache_salt=salt, **content)
            )
    assert await client.free_contexts([1, 3]) > 0
    assert await client.free_contexts([2, 4]) == 0


async def test_a_context_is_used_by_its_own_salt_only() -> None:
    config = SimConfig.model_validate({"instance": ZERO})
    async with served(SimService(config), config) as client:
        await try_all(client, TOKENS)


async def test_texts_of_an_openai_engine_are_used_by_their_own_salt_only() -> None:
    async with serve_app(FakeOpenAI().app()) as url:
        config = OpenAIConfig.model_validate(
            {"model": "gpt-fake", "instance": {"base_url": url + "/v1", "api_key": "k"}}
        )
        async with served(OpenAIService(config), config) as client:
            await try_all(client, {"text": "abc"})
