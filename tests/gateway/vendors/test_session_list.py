"""Sessions of conversations, and the callers that may see them."""

from typing import Any

import pytest

from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.support.fake_engine import Script, fake_engine

CHAT = "/v1/chat/completions"


def keyed(key: str | None) -> dict[str, Any]:
    return {} if key is None else {"headers": {"authorization": f"Bearer {key}"}}


async def say(site: Site, *texts: str, key: str | None = None, system: str = "Be kind.") -> Any:
    """Send a turn of the program `mine`, with the user's texts and answers between them."""
    roles = ["user", "assistant"] * len(texts)
    spoken = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
    messages = [{"role": "system", "content": system}, *spoken]
    body = {"model": MODEL, "messages": messages, "prompt_cache_key": "mine", "temperature": 0}
    answer = await site.post(CHAT, body, **keyed(key))
    return answer["choices"][0]["message"]["content"]


async def get(site: Site, path: str, key: str | None = None) -> tuple[int, Any]:
    async with site.http.get(path, **keyed(key)) as response:
        return response.status, await response.json()


async def listed(site: Site, key: str | None = None, query: str = "") -> list[Any]:
    status, answer = await get(site, f"/v1/sessions{query}", key)
    assert status == 200, answer
    sessions: list[Any] = answer["sessions"]
    return sessions


async def test_the_totals_of_a_conversation(site: Site) -> None:
    site.engine.script = Script(text=lambda prompt: "A fine and long answer.")
    answer = await say(site, "Hello, is anybody there?")
    await say(site, "Hello, is anybody there?", answer, "Go on.")
    await say(site, "Hello, is anybody there?", answer, "Go on.", system="It is 2026-11-22.")
    (session,) = await listed(site)
    assert (session["kind"], session["apps"]) == ("conversation", ["mine"])
    assert (session["turns"], session["calls"], session["done"]) == (3, 3, 3)
    assert (session["models"], session["prefix_breaks"]) == ([MODEL], 1)
    assert 0 < session["cached_share"] < 1
    assert session["cached_tokens"] == session["cached_share"] * session["prompt_tokens"]
    status, info = await get(site, f"/v1/session/{session['session_id']}")
    assert (status, len(info["calls"])) == (200, 3)
    assert info["calls"][2]["remark"].startswith("prefix: ")
    assert info["calls"][1]["cached_tokens"] > 0


async def test_a_key_sees_its_own_sessions() -> None:
    config = CoreConfig(api_keys=("one", "two"), cluster_token="token")
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        await say(site, "Hi", key="one")
        await say(site, "Hi", key="two")
        program = site.core.create_session(SessionCreateRequest(api_key="one"))
        mine, theirs = await listed(site, "one"), await listed(site, "two")
        assert [s["kind"] for s in mine] == ["program", "conversation"]
        assert mine[0]["session_id"] == program.session_id
        assert mine[0]["cached_share"] is None
        assert [s["kind"] for s in theirs] == ["conversation"]
        for session in mine:
            path = f"/v1/session/{session['session_id']}"
            assert (await get(site, path, "one"))[0] == 200
            assert (await get(site, path, "two"))[0] == 404
            assert (await get(site, path, "three"))[0] == 404
            assert (await get(site, path))[0] == 401
        path = f"/v1/session/{program.session_id}"
        assert (await get(site, path, program.session_auth))[0] == 200
        assert (await get(site, "/v1/sessions", "three"))[0] == 401
        assert (await get(site, "/v1/sessions"))[0] == 401


async def test_without_keys_a_programs_session_is_its_own(site: Site) -> None:
    await say(site, "Hi")
    await say(site, "Hi", key="somebody")
    program = site.core.create_session(SessionCreateRequest())
    (public,), (somebodys,) = await listed(site), await listed(site, "somebody")
    assert public["session_id"] != somebodys["session_id"]
    assert (await get(site, f"/v1/session/{public['session_id']}"))[0] == 200
    assert (await get(site, f"/v1/session/{somebodys['session_id']}"))[0] == 401
    assert (await get(site, f"/v1/session/{somebodys['session_id']}", "somebody"))[0] == 200
    assert (await get(site, f"/v1/session/{program.session_id}"))[0] == 401


async def test_the_newest_first_and_in_parts(site: Site) -> None:
    for name in "abcde":
        messages = [{"role": "user", "content": "Hi"}]
        body = {"model": MODEL, "messages": messages, "prompt_cache_key": name}
        await site.post(CHAT, body)
    found: list[str] = []
    query = "?limit=2"
    while sessions := await listed(site, query=query):
        found += [session["apps"][0] for session in sessions]
        query = f"?limit=2&before={sessions[-1]['session_id']}"
    assert "".join(found) == "edcba"
    assert (await get(site, "/v1/sessions?limit=2"))[1]["has_more"]
    assert not (await get(site, "/v1/sessions"))[1]["has_more"]


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "before=x", "foo=1"])
async def test_invalid_requests(site: Site, query: str) -> None:
    assert (await get(site, f"/v1/sessions?{query}"))[0] in (400, 422)
