"""An id of another tenant counts as unknown, on every route that takes an id."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from parrot.protocol.endpoint import Access, Rule, rules
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.gateway.vendors.conftest import MODEL, Site, serve
from tests.hostile.test_access import FIELDS
from tests.serve.tenants.keys import entry, write_keys
from tests.support.fake_engine import fake_engine

UNOWNED = {"/v1/models/{model_id}"}  # Models belong to no tenant.
FORBIDDEN = {"/ui/api/engines/{engine_id}/drain"}  # Only operators may use it.


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    path = write_keys(tmp_path / "keys.json", entry("victim", "k1"), entry("attacker", "k2"))
    config = CoreConfig(keys_file=path, cluster_token="t")
    async with serve(config, fake_engine("e0", model=MODEL)) as site:
        yield site


async def begun(site: Site, key: str, num_calls: int) -> dict[str, Any]:
    """Create objects of a tenant, and return their ids and its credentials. `request_id` is that of
    the last call, since ids of calls count within a session."""
    bearer = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "input": "Hello"}
    response = await site.post("/v1/responses", body, headers=bearer)
    scope = await site.post("/v1/session", {"api_key": key})
    fields = {"template": "Say {{y}}", "parameters": [{"name": "y", "is_output": True}]}
    for _ in range(num_calls):
        call = await site.post("/v1/semantic_call", scope | fields)
    async with site.http.post("/ui/api/enter", json={"key": key}) as answer:
        cookie = answer.headers["Set-Cookie"].partition(";")[0]
    site.http.cookie_jar.clear()
    return scope | {
        "key": key,
        "cookie": cookie,
        "var_id": call["param_info"][0]["var_id"],
        "request_id": call["request_id"],
        "response_id": response["id"],
    }


async def test_ids_of_another_tenant_are_unknown(site: Site) -> None:
    victim, attacker = await begun(site, "k1", 2), await begun(site, "k2", 1)
    before = [session.id for session in site.core.sessions]
    found = set[str]()
    for rule in rules(create_app(ServeCore(site.core.config)).routes):
        path = rule.path.replace(":path}", "}")
        if "{" not in path or path in UNOWNED:
            continue
        expected = 404
        if path in FORBIDDEN or rule.access is Access.ADMIN:
            expected = 403
        # Use the victim's session, or the attacker's session with other ids of the victim.
        in_path = "{session_id}" in path
        for scope in (victim,) if in_path else (victim, attacker):
            status = await ask(site, rule, path, victim, attacker, scope["session_id"])
            assert status == expected, (rule, scope["key"])
        found.add(path)
    assert len(found) > 12
    assert [session.id for session in site.core.sessions] == before
    # The owner can use the same ids.
    rule = Rule("GET", "/v1/session/{session_id}", Access.SESSION)
    assert await ask(site, rule, rule.path, victim, victim, victim["session_id"]) == 200


async def ask(
    site: Site,
    rule: Rule,
    path: str,
    named: dict[str, Any],
    caller: dict[str, Any],
    session_id: int,
) -> int:
    names = {name: named[name] for name in ("var_id", "request_id", "response_id")}
    path = path.format(**names, session_id=session_id, engine_id=0)
    headers = {"Cookie": caller["cookie"]}
    is_of_session = rule.access in (Access.SESSION, Access.SESSION_OR_KEY)
    headers["Authorization"] = (
        f"Bearer {caller['session_auth'] if is_of_session else caller['key']}"
    )
    body: dict[str, Any] | None = None
    params: dict[str, str] = {}
    if rule.method == "POST":
        body = FIELDS.get(rule.path, {"is_wanted": True} if "drain" in path else {})
    if is_of_session and "{session_id}" not in rule.path:
        params = {"session_id": str(session_id)}
    async with site.http.request(
        rule.method, path, json=body, params=params, headers=headers
    ) as answer:
        text = await answer.text()
        assert "error" in json.loads(text) or answer.status == 200, (rule, text)
        return answer.status
