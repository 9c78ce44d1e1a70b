"""A request repeated with its `Idempotency-Key` runs once, and receives the first result."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.journal.replayed import MemoryFile
from tests.journal.test_over_http import serving
from tests.support.fake_engine import Script, fake_engine

PATH = "/v1/responses"


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    config = CoreConfig(api_keys=("one", "two"))
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        site.engine.script = Script(text=lambda prompt: "Paris.")
        yield site


def keyed(key: str, tenant: str = "one") -> dict[str, str]:
    return {"Idempotency-Key": key, "Authorization": f"Bearer {tenant}"}


def body(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "input": "Capital of France?"} | fields


async def events(site: Site, key: str, **fields: Any) -> list[Any]:
    given = body(stream=True, **fields)
    async with site.http.post(PATH, json=given, headers=keyed(key)) as answer:
        assert answer.status == 200
        lines = [line for line in (await answer.text()).split("\n") if line.startswith("data: ")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


async def test_a_response_is_computed_once(site: Site) -> None:
    first = await site.post(PATH, body(), headers=keyed("k"))
    assert await site.post(PATH, body(), headers=keyed("k")) == first
    assert len(site.engine.requests) == 1
    repeated = await events(site, "k")
    assert repeated[-1]["response"] == first
    assert [event["delta"] for event in repeated if "delta" in event] == ["Paris."]
    assert [event["sequence_number"] for event in repeated] == list(range(len(repeated)))
    status, answer = await site.send(PATH, body(input="Of Spain?"), headers=keyed("k"))
    assert (status, answer["error"]["param"]) == (409, "Idempotency-Key")
    for others in (keyed("l"), keyed("k", "two"), {"Authorization": "Bearer one"}):
        assert (await site.post(PATH, body(), headers=others))["id"] != first["id"]
    forgotten = body(store=False)  # nothing is stored that could be sent again
    ids = {(await site.post(PATH, forgotten, headers=keyed("m")))["id"] for _ in range(2)}
    assert len(ids) == 2
    status, answer = await site.send(PATH, body(), headers=keyed("x" * 257))
    assert (status, answer["error"]["param"]) == (400, "Idempotency-Key")


async def test_a_stream_is_repeated_unchanged(site: Site) -> None:
    first = await events(site, "k")
    again = await events(site, "k")
    assert first[0]["response"]["id"] == again[0]["response"]["id"]
    assert first[-1] == again[-1] | {"sequence_number": first[-1]["sequence_number"]}
    kinds = [event["type"] for event in again]
    assert [kind for kind in kinds if "delta" not in kind] == [
        event["type"] for event in first if "delta" not in event["type"]
    ]


async def test_a_running_request_is_not_started_twice(site: Site) -> None:
    site.engine.script.hang_after = 1
    asking = asyncio.ensure_future(site.post(PATH, body(), headers=keyed("k")))
    while not site.engine.requests:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    status, answer = await site.send(PATH, body(), headers=keyed("k"))
    assert (status, answer["error"]["param"]) == (409, "Idempotency-Key")
    asking.cancel()  # its client disconnects, so the next request runs again
    async with asyncio.timeout(20):
        await site.engine.all_aborted()
        site.engine.resume.set()
        while (await site.send(PATH, body(), headers=keyed("k")))[0] != 200:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(site.engine.requests) == 2


async def test_a_background_response_is_the_same(site: Site) -> None:
    site.engine.script.hang_after = 1
    given = body(background=True)
    first = await site.post(PATH, given, headers=keyed("k"))
    again = await site.post(PATH, given, headers=keyed("k"))
    assert again["id"] == first["id"]
    site.engine.resume.set()
    repeated = await events(site, "k", background=True)
    assert repeated[-1]["response"]["id"] == first["id"]
    async with site.http.delete(f"{PATH}/{first['id']}", headers=keyed("k")) as answer:
        assert answer.status == 200
    assert (await site.post(PATH, given, headers=keyed("k")))["id"] != first["id"]


async def test_a_key_is_known_after_a_restart() -> None:
    file = MemoryFile()
    headers = {"Idempotency-Key": "k"}
    async with serving(file) as site:
        first = await site.post(PATH, body(), headers=headers)
    async with serving(MemoryFile(file.records)) as site:
        assert await site.post(PATH, body(), headers=headers) == first
        assert not site.engine.requests


async def test_the_header_is_equivalent_to_the_field_of_a_call(site: Site) -> None:
    scope = await site.post("/v1/session", {}, headers={"Authorization": "Bearer one"})
    auth = keyed("k", scope["session_auth"])
    call = {
        "session_id": scope["session_id"],
        "template": "Say {{out}}",
        "parameters": [{"name": "out", "is_output": True}],
    }
    first = await site.post("/v1/semantic_call", call, headers=auth)
    assert await site.post("/v1/semantic_call", call, headers=auth) == first
    assert await site.post("/v1/semantic_call", call | {"idempotency_key": "l"}, headers=auth) != (
        first
    )


@pytest.mark.parametrize(
    "other",
    [
        {"instructions": "Answer in verse."},
        {"tools": [{"type": "function", "name": "look", "parameters": {"type": "object"}}]},
        {"temperature": 0.1},
        {"max_output_tokens": 5},
    ],
)
async def test_a_key_with_another_request_is_a_conflict(site: Site, other: dict[str, Any]) -> None:
    await site.post(PATH, body(), headers=keyed("k"))
    status, answer = await site.send(PATH, body(**other), headers=keyed("k"))
    assert (status, answer["error"]["param"]) == (409, "Idempotency-Key")
    assert len(site.engine.requests) == 1
