"""The openai engine with the engine's HTTP server and ServeCore's client."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest

from parrot.engine.app import ReorderBuffer, create_app
from parrot.engine.config import OpenAIConfig
from parrot.engine.engine_types import create_service
from parrot.engine.service import EngineService
from parrot.protocol.engine_api import (
    FillPiece,
    FillRequest,
    GenerateRequest,
    GenerateResponse,
    StreamChunk,
)
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import Cancelled, InvalidRequest, NotFound, UnsupportedField
from parrot.protocol.http import HttpClient
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.fake_openai import FakeOpenAI


@pytest.fixture
def fake() -> FakeOpenAI:
    return FakeOpenAI()


@pytest.fixture
async def service(fake: FakeOpenAI) -> AsyncIterator[EngineService]:
    async with serve_app(fake.app()) as url:
        config = OpenAIConfig.model_validate(
            {"model": "gpt-fake", "instance": {"base_url": url + "/v1", "api_key": "k"}}
        )
        service = create_service(config)
        await service.start()
        yield service
        service.check_integrity()
        await service.close()


@pytest.fixture
async def client(service: EngineService) -> AsyncIterator[EngineClient]:
    app = create_app(service, ReorderBuffer(MonotonicClock()), OpenAIConfig(model="gpt-fake"))
    async with serve_app(app) as url, HttpClient(url) as http:
        yield EngineClient(http)


def call(context_id: int, text: str) -> GenerateRequest:
    return GenerateRequest(
        context_id=context_id, fills=[FillPiece(context_id=context_id, text=text)]
    )


async def test_all_verbs(client: EngineClient, fake: FakeOpenAI) -> None:
    assert (await client.fill(FillRequest(context_id=1, text="abc"))).filled_len == 3
    fork = FillPiece(context_id=2, parent_context_id=1, parent_len=3, text="d")
    response = await client.generate(GenerateRequest(context_id=2, fills=[fork]))
    assert response.generated_text == "one two three"
    events = [event async for event in client.generate_stream(GenerateRequest(context_id=2))]
    assert [e.text for e in events if isinstance(e, StreamChunk)] == ["one ", "two ", "three"]
    assert isinstance(events[-1], GenerateResponse)
    assert fake.bodies[1]["prompt"] == "abcdone two three"
    assert (await client.ping()).num_cached_tokens == 3 + 1 + 2 * 13
    assert await client.free_contexts([1, 2]) == 3 + 4 + 2 * 13
    with pytest.raises(NotFound):
        await client.tokenizer()


async def test_following_an_output_is_refused(client: EngineClient) -> None:
    with pytest.raises(UnsupportedField, match="sends the whole answer at once"):
        await anext(client.follow(1))


async def test_the_stop_string_is_reported_if_the_server_reports_it(
    client: EngineClient, fake: FakeOpenAI
) -> None:
    for context_id, (told, wanted) in enumerate([("END", "END"), (7, None), (None, None)]):
        fake.stop_reason = told
        assert (await client.generate(call(2 * context_id, "a"))).stop_string == wanted
        events = [e async for e in client.generate_stream(call(2 * context_id + 1, "a"))]
        assert isinstance(events[-1], GenerateResponse)
        assert events[-1].stop_string == wanted


async def test_refusals_keep_their_type(client: EngineClient) -> None:
    with pytest.raises(InvalidRequest, match="contexts are text"):
        await client.fill(FillRequest(context_id=1, token_ids=[3]))
    request = GenerateRequest(context_id=1, sampling_config=SamplingConfig(top_k=3))
    with pytest.raises(UnsupportedField) as caught:
        await client.generate(request)
    assert caught.value.param == "top_k"
    with pytest.raises(UnsupportedField):
        await anext(client.generate_stream(request))


async def test_freeing_and_disconnecting_stop_the_upstream_request(
    client: EngineClient, fake: FakeOpenAI, service: EngineService
) -> None:
    fake.hold = asyncio.Event()
    freed = asyncio.ensure_future(client.generate(call(1, "a")))
    await fake.wait_for_requests()
    await client.free_contexts([1])
    with pytest.raises(Cancelled):
        await freed
    await asyncio.wait_for(fake.cancelled.wait(), 30)

    fake.cancelled.clear()
    left = asyncio.ensure_future(client.generate(call(2, "a")))
    await fake.wait_for_requests()
    left.cancel()
    await asyncio.wait_for(fake.cancelled.wait(), 30)

    fake.cancelled.clear()
    async with aclosing(client.generate_stream(call(3, "a"))) as stream:  # type: ignore[type-var]
        assert await anext(stream) == StreamChunk(ids=[], text="one ")
    await asyncio.wait_for(fake.cancelled.wait(), 30)
    await service.reset()
    assert service.runtime_info().num_total_jobs == 0
