"""Limits of keys, over HTTP."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from parrot.protocol.engine_api import EmbedRequest, EmbedResponse
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.serve.tenants.keys import entry, write_keys
from tests.support.fake_engine import Script, fake_engine

CHAT = "/v1/chat/completions"
KEYS = {
    "few": {"sessions": 2},
    "small": {"variables": 2, "text_bytes": 1000},
    "slow": {"tokens_per_minute": 60},
    "rare": {"requests_per_minute": 2},
    "one": {"calls_in_flight": 1},
    "free": {},
}


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    entries = [entry(name, f"key {name}", limits=limits) for name, limits in KEYS.items()]
    path = write_keys(tmp_path / "keys.json", *entries)
    async with serve(CoreConfig(keys_file=path), fake_engine("e0", model=MODEL)) as site:
        yield site


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], **fields}


async def ask(site: Site, path: str, body: Any, name: str) -> tuple[int, Any, str | None]:
    """Send a request, and return its status, its error message and `Retry-After`."""
    headers = {"Authorization": f"Bearer key {name}"}
    async with site.http.post(path, json=body, headers=headers) as response:
        answer = json.loads(await response.text())
        message = answer.get("error", {}).get("message")
        return response.status, message, response.headers.get("Retry-After")


async def test_sessions(site: Site) -> None:
    for _ in range(2):
        assert (await ask(site, "/v1/session", {}, "few"))[0] == 200
    status, message, _ = await ask(site, "/v1/session", {}, "few")
    assert (status, "`limits.sessions`" in message) == (429, True)
    assert (await ask(site, "/v1/session", {}, "free"))[0] == 200


async def test_conversations_replace_only_those_of_the_same_tenant(site: Site) -> None:
    await ask(site, CHAT, chat("of another"), "free")
    others = [session.id for session in site.core.sessions]
    for n in range(4):
        assert (await ask(site, CHAT, chat(f"question {n}"), "few"))[0] == 200
    tenants = [session.tenant for session in site.core.sessions]
    assert sorted(tenants) == ["few", "few", "free"]
    for session in list(site.core.sessions):
        if session.tenant == "few":
            site.core.delete_session(session.id, session.auth)
    for _ in range(2):  # sessions of programs evict no conversations
        assert (await ask(site, "/v1/session", {}, "few"))[0] == 200
    assert (await ask(site, CHAT, chat("one more"), "few"))[0] == 429
    assert site.core.sessions.find(others[0]) is not None


async def test_variables_and_bytes(site: Site) -> None:
    session = await site.post("/v1/session", {"api_key": "key small"})
    for name in "ab":
        await site.post("/v1/semantic_var", session | {"var_name": name})
    status, answer = await site.send("/v1/semantic_var", session | {"var_name": "c"})
    assert (status, "`limits.variables`" in answer["error"]["message"]) == (429, True)
    session = await site.post("/v1/session", {"api_key": "key free"})
    await site.post("/v1/semantic_var", session | {"var_name": "a", "content": "x" * 2000})
    assert (await ask(site, CHAT, chat("x" * 2000), "small"))[0] == 429


async def test_tokens_per_minute(site: Site) -> None:
    assert (await ask(site, CHAT, chat("A long question. " * 10), "slow"))[0] == 200
    for path, body in (
        (CHAT, chat("Again")),
        ("/v1/completions", {"model": MODEL, "prompt": "Again"}),
        ("/v1/embeddings", {"model": MODEL, "input": "Again"}),
        ("/v1/messages", chat("Again", max_tokens=5)),
    ):
        status, message, retry_after = await ask(site, path, body, "slow")
        assert (status, "`limits.tokens_per_minute`" in message) == (429, True)
        assert retry_after is not None
        assert 60 < int(retry_after) < 300
    assert (await ask(site, CHAT, chat("Hi"), "free"))[0] == 200


async def test_embeddings_count(site: Site) -> None:
    body = {"model": MODEL, "input": "x" * 500}
    assert (await ask(site, "/v1/embeddings", body, "slow"))[0] == 200
    assert (await ask(site, "/v1/embeddings", body, "slow"))[0] == 429


async def test_embeddings_are_charged_before_they_are_computed(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    embed, begun, gate = site.engine.embed, asyncio.Event(), asyncio.Event()

    async def later(request: EmbedRequest) -> EmbedResponse:
        begun.set()
        await gate.wait()
        return await embed(request)

    monkeypatch.setattr(site.engine, "embed", later)
    body = {"model": MODEL, "input": "x" * 500}
    first = asyncio.create_task(ask(site, "/v1/embeddings", body, "slow"))
    await begun.wait()
    assert (await ask(site, "/v1/embeddings", body, "slow"))[0] == 429
    gate.set()
    assert (await first)[0] == 200


@pytest.mark.parametrize("is_chat", [True, False])
async def test_the_tokens_of_an_abandoned_read_are_charged(site: Site, is_chat: bool) -> None:
    site.engine.script = Script(hang_after=1)
    text = "word " * 100
    if is_chat:
        headers = {"Authorization": "Bearer key slow"}
        reading = site.http.post(CHAT, json=chat(text, stream=True), headers=headers)
    else:
        session = await site.post("/v1/session", {"api_key": "key slow"})
        output = {"name": "y", "is_output": True}
        call = {"template": text + "{{y}}", "parameters": [output], "func_name": "f"}
        made = await site.post("/v1/semantic_call", session | call)
        path = f"/v1/semantic_var/{made['param_info'][0]['var_id']}/stream"
        reading = site.http.get(path, params=session)
    async with reading as stream:
        await stream.content.readline()
    await site.engine.aborted.wait()
    status, message, _ = await ask(site, CHAT, chat("Again"), "slow")
    assert (status, "`limits.tokens_per_minute`" in message) == (429, True)


async def test_requests_per_minute(site: Site) -> None:
    found = [await ask(site, CHAT, chat(f"{n}"), "rare") for n in range(3)]
    assert [status for status, *_ in found] == [200, 200, 429]
    assert "`limits.requests_per_minute`" in found[2][1]
    assert 25 <= int(found[2][2] or 0) <= 30


async def test_calls_in_flight(site: Site) -> None:
    site.engine.script = Script(hang_after=1)
    headers = {"Authorization": "Bearer key one"}
    async with site.http.post(CHAT, json=chat("first", stream=True), headers=headers) as first:
        await first.content.readline()
        status, message, retry_after = await ask(site, CHAT, chat("second"), "one")
        assert (status, "`limits.calls_in_flight`" in message) == (429, True)
        assert retry_after == "1"
        site.engine.script = Script()
        site.engine.resume.set()
        assert "[DONE]" in await first.text()
    assert (await ask(site, CHAT, chat("third"), "one"))[0] == 200
