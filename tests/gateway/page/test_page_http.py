"""The page over real HTTP: sign-in, visible data and permitted actions of visitors."""

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from parrot.gateway.page.visitors import VISIT_S, Visitors, page_key
from parrot.protocol.errors import AuthenticationFailed
from parrot.serve.config import CoreConfig
from parrot.serve.tenants.table import TenantTable
from tests.server.test_serve_http import ENGINE, Site, open_site
from tests.support.manual_clock import ManualClock

TOKEN = "inside"
KEY = page_key(TOKEN)


@asynccontextmanager
async def served(**config: Any) -> AsyncIterator[Site]:
    async for site in open_site(CoreConfig(cluster_token=TOKEN, **config)):
        # Accept cookies of IP addresses, like browsers. aiohttp does so only if configured.
        async with aiohttp.ClientSession(
            site.http._base_url, cookie_jar=aiohttp.CookieJar(unsafe=True)
        ) as http:
            site.http = http
            yield site


async def enter(site: Site, key: str = KEY) -> Any:
    return await site.post("/ui/api/enter", {"key": key})


class Watch:
    """A page that draws one feed."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response = response
        self.rows: dict[str, Any] = {}
        self.version = ""
        self.events: list[str] = []

    async def next(self) -> None:
        """Take the next event."""
        name = ""
        async with asyncio.timeout(20):
            async for line in self._response.content:
                field, _, data = line.decode().rstrip("\n").partition(": ")
                if field == "event":
                    name = data
                elif field == "data":
                    self.events.append(name)
                    payload = json.loads(data)
                    if name == "changes":
                        self._apply(payload)
                    return
        raise AssertionError("the feed has ended")

    def _apply(self, payload: Any) -> None:
        if payload["whole"]:
            self.rows = {}
        for key in payload["gone"]:
            self.rows.pop(key, None)
        self.rows |= payload["rows"]
        self.version = payload["version"]

    async def until(self, key: str, **fields: Any) -> dict[str, Any]:
        """Read events until a row has these fields."""
        while not fields.items() <= self.rows.get(key, {}).items():
            await self.next()
        row: dict[str, Any] = self.rows[key]
        return row


@asynccontextmanager
async def watching(site: Site, path: str, **params: str) -> AsyncIterator[Watch]:
    async with site.http.get(f"/ui/api/{path}", params=params) as response:
        assert response.status == 200, await response.text()
        yield Watch(response)


async def test_nothing_is_shown_without_a_key() -> None:
    async with served() as site:
        scope = await site.session()
        session = f"/ui/api/sessions/{scope['session_id']}"
        for path in ("/ui/api/me", "/ui/api/overview", session, f"{session}/vars/x"):
            assert (await site.send("GET", path))[0] == 401, path
        deletion = session.replace("sessions", "runs") + "/delete"
        for path in ("/ui/api/sessions", f"{session}/end", f"{session}/cancel/1", deletion):
            assert (await site.send("POST", path, json={}))[0] == 401, path
        for key in ("", TOKEN, KEY + "0"):
            assert (await site.send("POST", "/ui/api/enter", json={"key": key}))[0] == 401
        status, error = await site.send("POST", "/ui/api/enter", data=b'{"key":', headers={})
        assert status == 400, error
        assert (await site.send("POST", "/ui/api/enter", json={}))[0] == 422
        assert site.core.sessions.find(scope["session_id"]) is not None


async def test_the_operator_sees_everything_of_a_service_without_api_keys() -> None:
    async with served() as site:
        assert await enter(site) == {"tenant": None, "sees_values": True}
        assert await site.get("/ui/api/me") == {"tenant": None, "sees_values": True}
        scope = await site.session()
        async with watching(site, "overview") as watch:
            row = await watch.until(f"session:{scope['session_id']}", calls=0)
            assert row["tenant"] == "public"
            await site.call(scope, "out")
            await watch.until(f"session:{scope['session_id']}", calls=1, done=0)
            await site.post(f"/ui/api/sessions/{scope['session_id']}/end", {})
            row = await watch.until(f"session:{scope['session_id']}", state="finished")
            assert row["ended_at"] >= row["created_at"]
            assert (row["calls"], row["cancelled"]) == (1, 0)  # No reader needed the call.
        await site.post("/ui/api/leave", {})
        assert (await site.send("GET", "/ui/api/me"))[0] == 401


async def test_the_load_of_other_clients_on_a_server_is_shown() -> None:
    async with served() as site:
        await enter(site)
        inside = {"Authorization": f"Bearer {TOKEN}"}
        await site.post("/register_engine", {"engine_config": ENGINE}, headers=inside)
        beat = {"engine_id": 0, "engine_name": "e0", "runtime_info": {}}
        load = {"num_running": 6, "num_waiting": 2, "num_others": 4, "kv_usage": 0.401}
        async with watching(site, "overview") as watch:
            assert "server" not in await watch.until("engine:0", engine_name="e0")
            for shown, seen in (
                (load, {"kv": 0.4, "others_kv": 0.2}),
                ({**load, "kv_usage": None}, {}),  # like newer versions of llama.cpp
            ):
                beat["runtime_info"] = {"server_load": shown}
                await site.post("/engine_heartbeat", beat, headers=inside)
                row = {"running": 6, "waiting": 2, "others": 4} | seen
                await watch.until("engine:0", server=row)
            beat["runtime_info"] = {}
            await site.post("/engine_heartbeat", beat, headers=inside)
            while "server" in watch.rows["engine:0"]:
                await watch.next()


async def test_the_last_warning_of_an_engine_is_shown_to_operators() -> None:
    async with served(api_keys=("k1",)) as site:
        await enter(site)
        inside = {"Authorization": f"Bearer {TOKEN}"}
        await site.post("/register_engine", {"engine_config": ENGINE}, headers=inside)
        info = {"last_warning": "steps run slowly", "warned_at": 7.5}
        beat = {"engine_id": 0, "engine_name": "e0", "runtime_info": info}
        await site.post("/engine_heartbeat", beat, headers=inside)
        async with watching(site, "overview") as watch:
            await watch.until("engine:0", warning="steps run slowly", warned_at=7.5)
        await enter(site, "k1")
        async with watching(site, "overview") as watch:
            assert "warning" not in await watch.until("engine:0", engine_name="e0")


async def test_a_call_is_seen_from_its_submission_to_its_value() -> None:
    async with served() as site:
        await enter(site)
        await site.join()
        scope = await site.session()
        first = await site.call(scope, "one")
        second = await site.call(scope, "two", first)
        path = f"sessions/{scope['session_id']}"
        async with (
            watching(site, path) as graph,
            watching(site, f"{path}/vars/{second}") as value,
        ):
            call = await graph.until(f"call:{second}", state="idle")
            assert call["inputs"] == [first]
            read = asyncio.create_task(site.get(f"/v1/semantic_var/{second}", **scope))
            await graph.until(f"call:{first}", state="running")
            await site.started()
            site.engine.answer(site.engine.held[0], "first text")
            await graph.until(f"var:{first}", state="ready", chars=10)
            await site.started()
            site.engine.answer(site.engine.held[0], "x" * 5000)
            await graph.until(f"call:{second}", state="done")
            await value.until("text:1", text="x" * (5000 - 4096))
            assert value.rows["text:0"] == {"text": "x" * 4096}
            assert value.rows["call"]["prompt"] == [
                {"text": "f"},
                {"var": first, "name": "one"},
            ]
            await read
        async with watching(site, path, since=graph.version) as again:
            await site.post("/v1/semantic_var", scope | {"var_name": "late"})
            await again.next()
            assert [row["name"] for row in again.rows.values() if "chars" in row] == ["late"]


async def test_a_failure_shows_its_causes_and_a_running_call_can_be_cancelled() -> None:
    async with served() as site:
        await enter(site)
        await site.join()
        scope = await site.session()
        first = await site.call(scope, "one")
        second = await site.call(scope, "two", first)
        read = asyncio.create_task(site.send("GET", f"/v1/semantic_var/{second}", params=scope))
        await site.started(1)
        path = f"sessions/{scope['session_id']}"
        async with watching(site, path) as graph:
            call = await graph.until(f"call:{first}", state="running")
            await site.post(f"/ui/api/{path}/cancel/{call['request_id']}", {})
            row = await graph.until(f"var:{second}", state="failed")
            assert [error["type"] for error in row["errors"]] == ["cancelled", "cancelled"]
        assert (await read)[0] == 499


async def test_tenants_see_their_own_and_the_operator_no_texts() -> None:
    async with served(api_keys=("k1", "k2")) as site:
        mine = await site.post("/v1/session", {"api_key": "k1"})
        other = await site.post("/v1/session", {"api_key": "k2"})
        var = (await site.post("/v1/semantic_var", mine | {"var_name": "v", "content": "secret"}))[
            "var_id"
        ]
        me = await enter(site, "k1")
        assert me["tenant"] is not None
        assert me["sees_values"]
        async with watching(site, "overview") as watch:
            await watch.next()
            assert f"session:{mine['session_id']}" in watch.rows
            assert f"session:{other['session_id']}" not in watch.rows
        async with watching(site, f"sessions/{mine['session_id']}/vars/{var}") as watch:
            await watch.until("text:0", text="secret")
        status, _ = await site.send("GET", f"/ui/api/sessions/{other['session_id']}")
        assert status == 404
        status, _ = await site.send("POST", f"/ui/api/sessions/{other['session_id']}/end", json={})
        assert status == 404

        assert await enter(site, KEY) == {"tenant": None, "sees_values": False}
        async with watching(site, f"sessions/{mine['session_id']}/vars/{var}") as watch:
            await watch.until("var", chars=6)
            assert set(watch.rows) == {"var"}
        assert (await site.send("POST", "/ui/api/sessions", json={}))[0] == 401


async def test_finished_runs_have_the_visitors_of_live_sessions() -> None:
    async with served(api_keys=("k1", "k2")) as site:
        await site.join()
        scope = await site.post("/v1/session", {"api_key": "k1"})
        names = scope | {"var_name": "v", "content": "the secret"}
        given_id = (await site.post("/v1/semantic_var", names))["var_id"]
        output = await site.call(scope, "out", given_id)
        read = asyncio.create_task(site.get(f"/v1/semantic_var/{output}", **scope))
        await site.started()
        site.engine.answer(site.engine.held[0], "a secret answer")
        await read
        run = f"sessions/{scope['session_id']}"
        await enter(site, "k1")
        async with watching(site, run) as graph, watching(site, f"{run}/vars/{output}") as value:
            await graph.until(f"call:{output}", state="done")
            await value.until("text:0", text="a secret answer")
            path = f"/v1/session/{scope['session_id']}"
            assert (await site.send("DELETE", path, params=scope))[0] == 200
            await graph.until("session", state="finished")  # The open view stays.
        async with watching(site, f"{run}/vars/{output}") as value:
            await value.until("text:0", text="a secret answer")
            assert {"var": given_id, "name": "v"} in value.rows["call"]["prompt"]

        await enter(site, "k2")
        async with watching(site, "overview") as watch:
            await watch.next()
            assert f"session:{scope['session_id']}" not in watch.rows
        for path in (run, f"{run}/vars/{output}"):
            status, error = await site.send("GET", f"/ui/api/{path}")
            assert (status, error["error"]["type"]) == (404, "not_found")
            unknown = await site.send("GET", f"/ui/api/{path.replace(run, 'sessions/7777')}")
            own_id = str(scope["session_id"])
            assert (
                unknown[1]["error"]["message"].replace("7777", own_id)
                == (error["error"]["message"])
            )

        deletion = f"/ui/api/runs/{scope['session_id']}/delete"
        assert (await site.send("POST", deletion, json={}))[0] == 404
        await enter(site, KEY)
        for path in (run, f"{run}/vars/{output}", f"{run}/vars/{given_id}", "overview"):
            async with watching(site, path) as watch:
                await watch.next()
                assert watch.rows
                assert "secret" not in json.dumps(watch.rows)

        await enter(site, "k1")
        async with watching(site, run) as graph:
            await graph.next()
            await site.post(deletion, {})
            await graph.next()
            assert graph.events == ["changes", "error"]
        assert (await site.send("GET", f"/ui/api/{run}"))[0] == 404
        assert (await site.send("POST", deletion, json={}))[0] == 404


def write_keys(path: Path, **histories: bool) -> None:
    """Write a keys file. The key of a tenant is `key ID`; the arguments are the tenants'
    histories."""
    keys = [
        {"id": name, "sha256": hashlib.sha256(f"key {name}".encode()).hexdigest(), "history": on}
        for name, on in histories.items()
    ]
    path.with_suffix(".new").write_text(json.dumps({"keys": keys}))
    path.with_suffix(".new").rename(path)


async def test_a_tenant_can_have_no_history(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    write_keys(path, a=True, b=False)
    async with served(keys_file=str(path)) as site:

        async def finish(tenant: str) -> str:
            scope = await site.post("/v1/session", {"api_key": f"key {tenant}"})
            await site.call(scope, "out")
            url = f"/v1/session/{scope['session_id']}"
            assert (await site.send("DELETE", url, params=scope))[0] == 200
            return f"session:{scope['session_id']}"

        await enter(site)
        runs = {tenant: await finish(tenant) for tenant in ("a", "b")}
        async with watching(site, "overview") as watch:
            await watch.until(runs["a"], state="finished")
            assert runs["b"] not in watch.rows
            write_keys(path, a=False, b=True)
            while runs["a"] in watch.rows:
                await watch.next()
            await watch.until(await finish("b"), state="finished")


async def test_the_page_runs_calls_in_a_session_of_its_visitor() -> None:
    async with served(api_keys=("k1",)) as site:
        await enter(site, "k1")
        scope = await site.post("/ui/api/sessions", {})
        var_id = await site.call(scope, "out")
        assert (await site.get("/v1/semantic_var", **scope))["vars"][0]["var_id"] == var_id


async def test_cookies_and_files_are_restricted_to_this_page() -> None:
    async with served() as site:
        async with site.http.post("/ui/api/enter", json={"key": KEY}) as response:
            cookie = response.headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        assert "path=/ui" in cookie
        async with site.http.get("/", allow_redirects=False) as response:
            assert response.status == 307
            assert response.headers["location"] == "ui/"
        async with site.http.get("/ui/") as response:
            assert response.status == 200
            assert "default-src 'self'" in response.headers["content-security-policy"]
            assert response.headers["x-content-type-options"] == "nosniff"
        for path in ("/ui/../endpoints.py", "/ui/%2e%2e/endpoints.py", "/ui/nothing.js"):
            assert (await site.send("GET", path))[0] == 404, path


async def test_a_session_that_ends_ends_its_feed_with_the_reason() -> None:
    async with served() as site:
        await enter(site)
        scope = await site.session()
        async with watching(site, f"sessions/{scope['session_id']}") as watch:
            await watch.next()
            await site.send("DELETE", f"/v1/session/{scope['session_id']}", params=scope)
            await watch.next()
            assert watch.events == ["changes", "error"]


async def test_without_secrets_no_key_is_needed_and_the_page_can_be_disabled() -> None:
    async for site in open_site(CoreConfig(insecure=True)):
        assert (await site.get("/ui/api/me"))["tenant"] is None
    async for site in open_site(CoreConfig(page=False)):
        assert (await site.send("GET", "/ui/api/me"))[0] == 404
        assert (await site.send("GET", "/"))[0] == 404


def test_a_visit_ends() -> None:
    clock = ManualClock()
    visitors = Visitors(TOKEN, TenantTable(CoreConfig()), clock)
    cookie = visitors.enter(KEY)
    assert visitors.of(cookie).tenant is None
    clock._now = VISIT_S + 1
    with pytest.raises(Exception, match="sign in with the key"):
        visitors.of(cookie)


def refused(visitors: Visitors, cookie: str) -> bool:
    try:
        visitors.of(cookie)
    except AuthenticationFailed:
        return True
    return False


def test_frequent_sign_ins_do_not_sign_out_other_visitors() -> None:
    visitors = Visitors(TOKEN, TenantTable(CoreConfig(api_keys=("k1",))), ManualClock())
    cookie, stays = visitors.enter(KEY), visitors.enter("k1")
    left = [visitors.enter("k1") for _ in range(200)]
    for one in left:
        visitors.leave(one)
    assert visitors.of(cookie).tenant is None
    assert all(refused(visitors, one) for one in left)
    assert refused(visitors, stays)  # As old as dropped sign-outs, so it is rejected, too.


def test_a_sign_in_survives_a_restart_with_the_same_token_and_key() -> None:
    config = CoreConfig(api_keys=("k1", "k2"), cluster_token=TOKEN)
    before = Visitors(TOKEN, TenantTable(config), ManualClock())
    page, mine, left = before.enter(KEY), before.enter("k1"), before.enter("k1")
    before.leave(left)
    assert refused(before, left)
    assert not refused(before, mine)
    after = Visitors(TOKEN, TenantTable(config), ManualClock())
    assert after.of(page) == before.of(page)
    assert after.of(mine) == before.of(mine)
    fewer = TenantTable(config.model_copy(update={"api_keys": ("k2",)}))
    assert refused(Visitors(TOKEN, fewer, ManualClock()), mine)
    other = Visitors("another token", TenantTable(config), ManualClock())
    assert refused(other, page)
    assert refused(other, mine)


def test_a_modified_cookie_is_rejected() -> None:
    visitors = Visitors(TOKEN, TenantTable(CoreConfig(api_keys=("k1",))), ManualClock())
    page, mine = visitors.enter(KEY), visitors.enter("k1")
    end, nonce, key_id, signature = mine.split(".")
    forged = [
        f"{int(end) + 1}.{nonce}.{key_id}.{signature}",
        f"{end}.{nonce}..{signature}",
        f"{end}.{nonce}.{key_id}.{page.split('.')[-1]}",
        f"{end}.{nonce}.{key_id}.",
        f"{end}.{nonce}.{key_id}",
        mine[:-1],
        f"{mine}0",
        "",
        "...",
        f"{'9' * 5000}.{nonce}.{key_id}.{signature}",
        f"nan.{nonce}.{key_id}.{signature}",
        f"{end}.{nonce}.\u00e9.{signature}",
        f"{end}.{nonce}.{key_id}.\udcff",
    ]
    assert not refused(visitors, mine)
    assert [one for one in forged if not refused(visitors, one)] == []


async def test_only_the_operator_can_drain_engines() -> None:
    async with served(api_keys=("k1",)) as site:
        await site.join()
        path = "/ui/api/engines/0/drain"
        assert (await site.send("POST", path, json={"is_wanted": True}))[0] == 401
        await enter(site, "k1")
        status, error = await site.send("POST", path, json={"is_wanted": True})
        assert (status, error["error"]["message"]) == (403, "only operators can drain engines")
        await enter(site)
        assert (await site.send("POST", path, json={}))[0] == 422
        await site.post(path, {"is_wanted": True})


async def test_a_program_that_is_interrupted_leaves_a_cancelled_run() -> None:
    """As after Ctrl-C: the client closes its reads, and then deletes its session."""
    async with served() as site:
        await enter(site)
        await site.join()
        scope = await site.session()
        output = await site.call(scope, "out")
        read = asyncio.create_task(site.send("GET", f"/v1/semantic_var/{output}", params=scope))
        await site.started(1)
        read.cancel()
        await asyncio.wait([read])
        await site.started(0)
        url = f"/v1/session/{scope['session_id']}"
        assert (await site.send("DELETE", url, params=scope))[0] == 200
        async with watching(site, "overview") as watch:
            row = await watch.until(f"session:{scope['session_id']}", state="cancelled")
            assert (row["calls"], row["failed"], row["cancelled"]) == (1, 0, 1)
