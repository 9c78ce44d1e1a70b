"""Calls and responses whose engines return late, or after all timeouts, over HTTP."""

import asyncio
from typing import Any

import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import OutOfMemory
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site
from tests.journal.replayed import MemoryFile
from tests.journal.test_over_http import CALL, journal_of, program, serving
from tests.support.fake_engine import FakeEngine, Script, fake_engine

HURRIED = CoreConfig(no_engine_timeout=0.05)
OTHER_MODEL = "another"


async def join(site: Site, engine: FakeEngine) -> None:
    site.core.fleet._connect = lambda _: engine
    await site.core.register_engine(RegisterRequest(engine_config=engine.info))


async def answer(site: Site, path: str, scope: dict[str, Any]) -> tuple[int, str | None, Any]:
    """Return the status, the header `Retry-After` and the body of a read."""
    async with site.http.get(path, params=scope) as response:
        return response.status, response.headers.get("Retry-After"), await response.json()


async def test_a_call_waits_for_an_engine_that_returns_after_all_timeouts() -> None:
    hanging = fake_engine("e0", model=MODEL, script=Script(hang_after=0))
    async with serving(file := MemoryFile(), hanging) as site, program(site) as scope:
        call = await site.post("/v1/semantic_call", scope | CALL | {"models": [MODEL]})
        path = f"/v1/semantic_var/{call['param_info'][-1]['var_id']}"
        reading = asyncio.ensure_future(site.http.get(path, params=scope))
        while not hanging.requests:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        await journal_of(site).durable()
        records = file.records.copy()
        hanging.resume.set()
        (await reading).release()
    other = fake_engine("e1", model=OTHER_MODEL)
    async with serving(MemoryFile(records), other, HURRIED) as site:
        for _ in range(2):  # a reader may retry any number of times
            status, retry_after, body = await answer(site, path, scope)
            assert (status, retry_after, body["error"]["type"]) == (503, "1", "no_engine")
            assert MODEL in body["error"]["message"]
        reading = asyncio.ensure_future(answer(site, path, scope))
        await asyncio.sleep(0)
        await join(site, fake_engine("e0", model=MODEL))
        while (found := await reading)[0] != 200:
            reading = asyncio.ensure_future(answer(site, path, scope))
        assert found[2]["content"]


async def test_models_of_the_journal_are_known_and_others_are_rejected_at_the_call() -> None:
    async with serving(file := MemoryFile()) as site, program(site) as scope:
        await journal_of(site).durable()
        records = file.records.copy()
    async with serving(MemoryFile(records), fake_engine("e1", model=OTHER_MODEL)) as site:
        await site.post("/v1/semantic_call", scope | CALL | {"models": [MODEL]})
        status, body = await site.send("/v1/semantic_call", scope | CALL | {"models": ["typo"]})
        assert (status, body["error"]["type"]) == (404, "not_found")
        for engine in list(site.core.fleet):
            site.core.fleet.lose(engine, "test")
        status, body = await site.send("/v1/semantic_call", scope | CALL | {"models": ["typo"]})
        assert (status, body["error"]["message"]) == (
            404,
            "model `typo` is not served; available: none now",
        )


async def test_an_accepted_call_waits_for_its_engine_although_another_registers_first() -> None:
    """This also holds after a restart: the journal has the call, but no engine has served its model
    yet."""
    async with serving(file := MemoryFile()) as site, program(site) as scope:
        for engine in list(site.core.fleet):
            site.core.fleet.lose(engine, "test")
        site.core.fleet._known_models.clear()
        call = await site.post("/v1/semantic_call", scope | CALL | {"models": ["later"]})
        await journal_of(site).durable()
        records = [record for record in file.records if record.kind != "model"]
    path = f"/v1/semantic_var/{call['param_info'][-1]['var_id']}"
    other = fake_engine("e1", model=OTHER_MODEL)
    async with serving(MemoryFile(records), other, HURRIED) as site:
        status, retry_after, _ = await answer(site, path, scope)
        assert (status, retry_after) == (503, "1")
        await join(site, fake_engine("e2", model="later"))
        assert (await answer(site, path, scope))[0] == 200


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_background_response_waits_for_its_engine_without_a_limit(
    is_restarted: bool,
) -> None:
    hanging = fake_engine("e0", model=MODEL, script=Script(hang_after=0))
    body = {"model": MODEL, "input": "Hi", "background": True, "store": True}
    async with serving(file := MemoryFile(), hanging, HURRIED) as site:
        began = await site.post("/v1/responses", body)
        await journal_of(site).durable()
        records = file.records.copy()
        if not is_restarted:
            for engine in list(site.core.fleet):
                site.core.fleet.lose(engine, "test")
            await _completes_late(site, began["id"])
    if is_restarted:
        other = fake_engine("e1", model=OTHER_MODEL)
        async with serving(MemoryFile(records), other, HURRIED) as site:
            await _completes_late(site, began["id"])


async def _completes_late(site: Site, response_id: str) -> None:
    await asyncio.sleep(0.2)  # four times `no_engine_timeout`
    path = f"/v1/responses/{response_id}"
    assert (await answer(site, path, {}))[2]["status"] in ("queued", "in_progress")
    await join(site, fake_engine("e0", model=MODEL))
    async with asyncio.timeout(20):
        while (made := (await answer(site, path, {}))[2])["status"] != "completed":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert made["output"][0]["content"][0]["text"]


async def test_a_final_error_has_no_retry_after() -> None:
    engine = fake_engine("e0", model=MODEL, script=Script(error=OutOfMemory("full")))
    async with serving(MemoryFile(), engine) as site, program(site) as scope:
        call = await site.post("/v1/semantic_call", scope | CALL)
        path = f"/v1/semantic_var/{call['param_info'][-1]['var_id']}"
        for _ in range(2):
            status, retry_after, body = await answer(site, path, scope)
            assert (status, retry_after, body["error"]["type"]) == (503, None, "out_of_memory")
