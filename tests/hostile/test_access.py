"""Every route of both servers rejects requests without the credential that its rule requires."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import pytest
from starlette.routing import Route

from parrot.engine.app import ReorderBuffer
from parrot.engine.app import create_app as engine_app
from parrot.engine.config import SimConfig
from parrot.engine.sim import SimService
from parrot.gateway.page.visitors import page_key
from parrot.protocol.answers import create_base_app, own_layers
from parrot.protocol.endpoint import Access, Rule, rules
from parrot.protocol.openapi import install
from parrot.protocol.public import SessionCreateRequest
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app as core_app
from parrot.utils.clock import MonotonicClock
from tests.serve.tenants.keys import entry, write_keys
from tests.support.app_server import serve_app

KEY, TOKEN = "a-key", "a-token"
KEYS = ("other", "admin", "metrics")
FIELDS = {  # Valid bodies, so that a request reaches the check of its credential.
    "/v1/semantic_call": {"template": "{{y}}", "parameters": [{"name": "y", "is_output": True}]},
    "/v1/py_native_call": {"func_name": "f", "func_source": "", "parameters": []},
    "/v1/semantic_graph": {"calls": [], "session": {}},
    "/v1/semantic_var": {"var_name": "x"},
    "/v1/semantic_var/{var_id}": {"content": "x"},
    "/v1/semantic_vars/first": {"var_ids": ["v"]},
    "/v1/admin/engine/{engine_id}/drain": {"is_wanted": True},
}


class Site(NamedTuple):
    url: str
    rules: list[Rule]
    session_id: int
    bearers: dict[str, str]


@pytest.fixture
async def core(tmp_path: Path) -> AsyncIterator[Site]:
    path = write_keys(
        tmp_path / "keys.json",
        entry("another", "other"),
        entry("admin", "admin", scopes=["admin"]),
        entry("metrics", "metrics", scopes=["metrics"]),
    )
    core = ServeCore(CoreConfig(api_keys=(KEY,), keys_file=path, cluster_token=TOKEN))
    scope, other = (
        core.create_session(SessionCreateRequest(api_key=KEY)).model_dump() for _ in range(2)
    )
    app = core_app(core)
    bearers = {
        "nothing": "",
        "garbage": "garbage",
        "key": KEY,
        "token": TOKEN,
        "session": scope["session_auth"],
        "other session": other["session_auth"],
        "page": page_key(TOKEN),
        **{name: name for name in KEYS},
    }
    async with serve_app(app) as url:
        yield Site(url, [*rules(app.routes)], scope["session_id"], bearers)
    core.check_integrity()


LETS_IN = {
    Access.API_KEY: {"key", "other"},
    Access.SESSION: {"session"},
    Access.SESSION_OR_KEY: {"session", "key"},
    Access.CLUSTER: {"token"},
    Access.METRICS: {"token", "metrics"},
    Access.ADMIN: {"token", "admin"},
    Access.VISITOR: set[str](),
}
BY_SCOPE = (Access.API_KEY, Access.METRICS, Access.ADMIN)
IN_SESSIONS = (Access.SESSION, Access.SESSION_OR_KEY)


async def asked(site: Site, rule: Rule, bearer: str) -> int:
    path = rule.path.replace(":path}", "}").format(
        session_id=site.session_id, var_id="v", request_id=1, model_id="m", engine_id=1,
        response_id="r",
    )  # fmt: skip
    body: dict[str, Any] | None = None
    params = {}
    if rule.method == "POST":
        body = {"session_id": site.session_id} | FIELDS.get(rule.path, {})
        if "session" in body or rule.path == "/v1/session":
            del body["session_id"]
    elif rule.access is Access.SESSION and "session_id" not in rule.path:
        params = {"session_id": str(site.session_id)}
    headers = {"Authorization": f"Bearer {bearer}"} if bearer else {}
    method = "GET" if rule.method == "*" else rule.method
    async with (
        aiohttp.ClientSession(site.url, headers=headers) as http,
        http.request(method, path, json=body, params=params, allow_redirects=False) as answer,
    ):
        return answer.status


async def test_a_route_rejects_credentials_that_its_rule_does_not_accept(core: Site) -> None:
    found = {rule.access for rule in core.rules}
    assert found == set(Access)
    for rule in core.rules:
        if rule.method == "DELETE" and "/session/" in rule.path:
            continue  # see the next test
        for name, bearer in core.bearers.items():
            status = await asked(core, rule, bearer)
            lets_in = LETS_IN.get(rule.access)
            if rule.path == "/v1/semantic_graph":
                lets_in = LETS_IN[Access.API_KEY]  # the request creates a session
            if lets_in is None or name in lets_in:
                assert status not in (401, 403) or rule.path == "/ui/api/enter", (rule, name)
            elif (name in ("key", *KEYS) and rule.access in BY_SCOPE) or "_graph" in rule.path:
                assert status == (403 if name in ("key", *KEYS) else 401), (rule, name, status)
            elif bearer and rule.access in IN_SESSIONS:
                assert status == 404, (rule, name, status)
            else:
                assert status in (401, 422), (rule, name, status)
                assert status == 401 or rule.path.startswith("/ui/api/"), (rule, name)


async def test_a_session_is_ended_by_its_own_auth(core: Site) -> None:
    by_admin = Rule("DELETE", "/v1/admin/session/{session_id}", Access.ADMIN)
    assert by_admin in core.rules
    for name, bearer in core.bearers.items():
        if name not in LETS_IN[Access.ADMIN]:
            expected = 403 if name in ("key", *KEYS) else 401
            assert await asked(core, by_admin, bearer) == expected
    rule = Rule("DELETE", "/v1/session/{session_id}", Access.SESSION)
    assert rule in core.rules
    for name, bearer in core.bearers.items():
        if name != "session":
            assert await asked(core, rule, bearer) == (404 if bearer else 401)
    assert await asked(core, rule, core.bearers["session"]) == 200


async def test_open_routes_tell_nothing_of_the_cluster(core: Site) -> None:
    info = {
        "engine_type": "openai", "engine_name": "secret-name", "model": "m", "host": "127.0.0.1",
        "port": 1, "max_seq_len": 10, "tokens_capacity": 10,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with aiohttp.ClientSession(core.url) as http:
        body = {"engine_config": info}
        async with http.post("/register_engine", json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
        for bearer, sees in (("", False), (KEY, False), (TOKEN, True)):
            async with http.get("/ready", headers={"Authorization": f"Bearer {bearer}"}) as answer:
                assert answer.status == 200
                assert ("secret-name" in await answer.text()) is sees


async def test_an_engine_answers_the_cluster_only() -> None:
    config = SimConfig(cluster_token=TOKEN)
    service = SimService(config, MonotonicClock())
    await service.start()
    app = engine_app(service, ReorderBuffer(MonotonicClock()), config)
    found = [*rules(app.routes)]
    is_open = {rule.path for rule in found if rule.access is Access.ANYBODY}
    assert is_open == {"/health", "/ready"}
    assert {rule.access for rule in found} == {Access.ANYBODY, Access.CLUSTER}
    async with serve_app(app) as url:
        site = Site(url, found, 0, {})
        for rule in [*found, Rule("POST", "/nowhere", Access.CLUSTER)]:
            for bearer in ("", "garbage", KEY, page_key(TOKEN)):
                assert (await asked(site, rule, bearer) == 401) != (rule.path in is_open)
    await service.close()


def test_an_app_with_a_route_of_no_rule_does_not_start() -> None:
    app = create_base_app("test", own_layers(max_body_size=1000))
    with pytest.raises(TypeError, match="has no access rule"):
        install(app, [], [Route("/new", lambda request: None)], access=Access.ANYBODY)
