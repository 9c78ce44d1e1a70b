"""The engine refuses requests from before its last registration, and earlier attempts of a call."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest
from starlette.requests import Request

from parrot.engine import app
from parrot.engine.app import Fence, ReorderBuffer, create_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import FillRequest, GenerateRequest
from parrot.protocol.engine_client import REGISTRATION_HEADER, EngineClient
from parrot.protocol.errors import Cancelled, StaleCore
from parrot.protocol.http import HttpClient
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app

INSTANT = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}


@asynccontextmanager
async def registered() -> AsyncIterator[tuple[EngineClient, Fence, SimService, ReorderBuffer, str]]:
    service = SimService(config := SimConfig(instance=INSTANT))
    await service.start()
    reorder = ReorderBuffer(MonotonicClock())
    app = create_app(service, reorder, config)
    owner = app.state.front
    fence: Fence = owner.fence
    async with serve_app(app) as url:
        headers = {REGISTRATION_HEADER: fence.begin_registration()}
        fence.end_registration()
        async with HttpClient(url, headers=headers) as http:
            yield EngineClient(http), fence, service, reorder, url
    service.check_integrity()
    await service.close()


async def register_again(fence: Fence, service: SimService, reorder: ReorderBuffer) -> None:
    """Register again, as the engine's heartbeat does."""
    fence.released()
    reorder.reset()
    await service.reset()
    fence.begin_registration()
    fence.end_registration()


def fill(context_id: int, parent_id: int = -1) -> FillRequest:
    return FillRequest(context_id=context_id, parent_context_id=parent_id, token_ids=[97] * 20)


def attempt(number: int, task_id: int = 7, context_id: int = 1) -> GenerateRequest:
    return GenerateRequest.model_validate(
        {
            "session_id": 1,
            "task_id": task_id,
            "attempt": number,
            "context_id": context_id,
            "fills": [{"context_id": context_id, "token_ids": [97] * 20}],
            "sampling_config": {"max_gen_length": 3},
        }
    )


async def test_a_request_that_waits_for_its_parent_is_refused_after_a_new_registration() -> None:
    async with registered() as (client, fence, service, reorder, _):
        waiting = asyncio.ensure_future(client.fill(fill(2, parent_id=1)))
        whole = asyncio.ensure_future(client.fill(fill(3)))
        await whole
        await register_again(fence, service, reorder)
        with pytest.raises(StaleCore):
            await waiting
        assert service.runtime_info().num_cached_tokens == 0


@pytest.mark.parametrize("path", ["/fill", "/generate", "/generate_stream", "/free_context"])
async def test_a_request_whose_body_arrives_after_a_new_registration_is_refused(
    path: str,
) -> None:
    async with registered() as (_, fence, service, reorder, url):
        registration = fence.registration
        body = orjson.dumps({"context_id": 1, "token_ids": [97] * 20})
        host, _, port = url.removeprefix("http://").partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
            f"{REGISTRATION_HEADER}: {registration}\r\nContent-Length: {len(body)}\r\n"
            "Connection: close\r\nExpect: 100-continue\r\n\r\n"
        )
        writer.write(head.encode())
        assert b"100" in await reader.readline()  # The headers have passed the first check.
        await register_again(fence, service, reorder)
        writer.write(body)
        answer = await reader.read()
        assert b"stale_core" in answer, answer
        writer.close()
        assert service.runtime_info().num_cached_tokens == 0


async def test_requests_that_overtake_the_registration_answer_wait_for_it() -> None:
    async with (
        registered() as (_, fence, service, reorder, url),
        HttpClient(url) as http,
        HttpClient(url, headers={REGISTRATION_HEADER: fence.begin_registration()}) as of_core,
    ):
        direct, core = EngineClient(http), EngineClient(of_core)
        await direct.fill(fill(1))
        calling = asyncio.ensure_future(core.fill(fill(1)))
        freeing = asyncio.ensure_future(core.free_contexts([2]))
        await direct.fill(fill(1))
        assert service.runtime_info().num_cached_tokens == 48  # Three blocks hold 40 tokens.
        fence.begin_era()
        reorder.reset()
        await service.reset()
        fence.end_registration()
        await asyncio.gather(calling, freeing)
        assert service.runtime_info().num_cached_tokens == 32
        fence.begin_registration()
        late = asyncio.ensure_future(core.fill(fill(3)))
        with pytest.raises(StaleCore):
            await late


async def test_an_older_attempt_of_a_call_is_refused() -> None:
    async with registered() as (client, fence, service, reorder, _):
        await client.generate(attempt(2, context_id=1))
        with pytest.raises(Cancelled, match="attempt 1 is outdated: attempt 2"):
            await client.generate(attempt(1, context_id=2))
        with pytest.raises(Cancelled):
            async for _ in client.generate_stream(attempt(1, context_id=3)):
                pass
        await client.generate(attempt(1, task_id=8, context_id=4))
        for number, context_id in ((2, 5), (0, 6), (3, 7)):
            await client.generate(attempt(number, context_id=context_id))
        assert await client.free_contexts([2, 3]) == 0  # The refused requests created no contexts.
        assert len(fence._attempts) == 1  # Only retried calls are recorded.
        await register_again(fence, service, reorder)
        assert not fence._attempts


def test_the_number_of_recorded_calls_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "_MAX_CALLS", 64)
    fence = Fence()
    for task_id in range(65):
        fence.check_submission(
            GenerateRequest.model_construct(task_id=task_id, attempt=2), fence.era
        )
    late = GenerateRequest.model_construct(task_id=1, attempt=1)
    with pytest.raises(Cancelled):
        fence.check_submission(late, fence.era)
    assert len(fence._attempts) == 64
    # The oldest call is no longer recorded.
    fence.check_submission(late.model_copy(update={"task_id": 0}), fence.era)


def test_requests_with_an_ended_registration_are_refused() -> None:
    fence = Fence()
    name = fence.begin_registration().encode()
    late = Request({"type": "http", "headers": [(REGISTRATION_HEADER.lower().encode(), name)]})
    fence.check(late)
    fence.released()
    with pytest.raises(StaleCore):
        fence.check(late)
