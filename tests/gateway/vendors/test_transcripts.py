"""Recorded requests of vendors' clients still get the same statuses and the fields they need.

`record.py` has recorded the transcripts."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from parrot.server.app import create_app
from tests.gateway.vendors.scripted import KEY, ScriptedEngine, scripted_core
from tests.gateway.vendors.transcripts import GivenIds, lacks, lengthened, shape_of
from tests.support.app_server import serve_app

TRANSCRIPTS = {
    path.stem: json.loads(path.read_text())
    for path in sorted((Path(__file__).parent / "transcripts").glob("*.json"))
}


@pytest.mark.parametrize("name", TRANSCRIPTS)
async def test_a_client_gets_the_recorded_answers(name: str) -> None:
    transcript = TRANSCRIPTS[name]
    assert transcript["requests"]
    async with (
        scripted_core(max_text=transcript["max_text"]) as (core, engine),
        serve_app(create_app(core)) as url,
        aiohttp.ClientSession(url) as http,
    ):
        await replay(http, transcript["requests"], engine)
        core.check_integrity()


async def replay(
    http: aiohttp.ClientSession, requests: Sequence[Any], engine: ScriptedEngine
) -> None:
    """Send recorded requests, and compare their statuses and the shapes of their answers."""
    ids = GivenIds()
    for request in requests:
        if request["is_gone"]:
            await go_away(http, request, ids, engine)
            continue
        async with send(http, request, ids) as response:
            answer = await response.text()
            assert response.status == request["status"], (request, answer)
            assert lacks(shape_of(answer), request["answer"]) == [], (request, answer)
            ids.note(answer)


def send(http: aiohttp.ClientSession, request: Any, ids: GivenIds) -> Any:
    headers = request["headers"] | {"authorization": f"Bearer {KEY}"}
    if not request["is_key_right"]:
        headers["authorization"] = "Bearer wrong"
    body = request.get("body")
    data = None if body is None else ids.as_ids(json.dumps(lengthened(body)))
    return http.request(request["method"], ids.as_ids(request["path"]), headers=headers, data=data)


async def go_away(
    http: aiohttp.ClientSession, request: Any, ids: GivenIds, engine: ScriptedEngine
) -> None:
    """Disconnect while the engine is running, and check that it stops."""

    async def ask() -> None:
        async with send(http, request, ids) as response:
            await response.read()

    engine.hung.clear()
    engine.aborted.clear()
    asking = asyncio.create_task(ask())
    await engine.hung.wait()
    asking.cancel()
    await engine.aborted.wait()
