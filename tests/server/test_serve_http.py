"""ServeCore's REST API over real sockets, with an engine that answers when the test tells it to."""

import asyncio
import io
import itertools
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.fields import MAX_TEXT
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig, SessionQuota
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from tests.support.app_server import serve_app
from tests.support.held_world import HeldEngine, held_engine
from tests.support.requests import given, made, taken

JSON = {"Content-Type": "application/json"}
ENGINE = {
    "engine_type": "sim",
    "engine_name": "e0",
    "model": "m",
    "host": "localhost",
    "port": 1,
    "max_seq_len": 10,
    "tokens_capacity": 10,
}


@dataclass
class Site:
    """A served core and a client of it."""

    core: ServeCore
    engine: HeldEngine
    http: aiohttp.ClientSession

    async def send(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        if "data" in options:
            options["headers"] = JSON | options.get("headers", {})
        async with self.http.request(method, path, **options) as response:
            return response.status, await response.json()

    async def post(self, path: str, body: Any = None, **options: Any) -> Any:
        status, answer = await self.send("POST", path, json=body, **options)
        assert status == 200, answer
        return answer

    async def get(self, path: str, **params: Any) -> Any:
        status, answer = await self.send("GET", path, params=params)
        assert status == 200, answer
        return answer

    async def session(self) -> dict[str, Any]:
        scope: dict[str, Any] = await self.post("/v1/session", {})
        return scope

    async def call(self, scope: dict[str, Any], output: str, *inputs: str) -> str:
        parameters = [taken(f"i{n}", var_id) for n, var_id in enumerate(inputs)]
        template = "f" + "".join(f"{{{{{p['name']}}}}}" for p in parameters) + f"{{{{{output}}}}}"
        body = scope | {"template": template, "parameters": [*parameters, made(output)]}
        answer = await self.post("/v1/semantic_call", body)
        var_id: str = answer["param_info"][-1]["var_id"]
        return var_id

    async def join(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self.engine.info))

    async def started(self, number: int = 1) -> None:
        """Wait until the engine has this number of calls."""
        async with asyncio.timeout(30):
            while len(self.engine.held) != number:  # noqa: ASYNC110 - the engine's state
                await asyncio.sleep(0.005)


async def open_site(config: CoreConfig) -> AsyncIterator[Site]:
    clock, engine = MonotonicClock(), held_engine()
    dispatcher = Dispatcher(config, clock, lambda info: engine)
    core = ServeCore(config, clock=clock, dispatcher=dispatcher)
    async with serve_app(create_app(core)) as url, aiohttp.ClientSession(url) as http:
        yield Site(core, engine, http)


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async for site in open_site(CoreConfig()):
        yield site
        site.core.check_integrity()


@pytest.fixture
async def guarded() -> AsyncIterator[Site]:
    async for site in open_site(CoreConfig(api_keys=("k1", "k2"), cluster_token="inside")):
        yield site


def value(text: str) -> dict[str, Any]:
    """Return the answer to a read of a text that no engine generated."""
    nothing = dict.fromkeys(("finish_reason", "stop_string", "usage", "logprobs"))
    return {"content": text, **nothing}


async def test_the_journey_of_a_program(site: Site) -> None:
    scope = await site.session()
    x = (await site.post("/v1/semantic_var", scope | {"var_name": "x"}))["var_id"]
    body = scope | {
        "template": "{{a}} and {{x}} make {{y}}",
        "parameters": [given("a", "{{y}}"), taken("x", x), made("y", max_gen_length=5)],
        "func_name": "joiner",
    }
    answer = await site.post("/v1/semantic_call", body)
    assert [p["var_name"] for p in answer["param_info"]] == ["a", "x", "y"]
    y = answer["param_info"][2]["var_id"]
    reading = asyncio.ensure_future(site.get(f"/v1/semantic_var/{y}", **scope, criteria="latency"))
    assert await site.post(f"/v1/semantic_var/{x}", scope | {"content": "text"}) == {}
    await site.join()
    await site.started()
    site.engine.answer(site.engine.held[0], "value \u00e9\U0001f99c")
    assert (await reading)["content"] == "value \u00e9\U0001f99c"
    variables = (await site.get("/v1/semantic_var", **scope))["vars"]
    assert {v["var_name"]: v["state"] for v in variables} == dict.fromkeys("axy", "ready")
    info = await site.get(f"/v1/session/{scope['session_id']}", session_auth=scope["session_auth"])
    assert info["calls"][0]["func_name"] == "joiner"
    assert info["calls"][0]["kind"] == "semantic"
    path = f"/v1/session/{scope['session_id']}"
    status, answer = await site.send("DELETE", path, json={"session_auth": scope["session_auth"]})
    assert (status, answer) == (200, {})
    status, answer = await site.send("GET", f"/v1/semantic_var/{y}", params=scope)
    assert (status, answer["error"]["type"]) == (410, "session_gone")


async def test_get_accepts_a_body_a_query_and_a_bearer_token(site: Site) -> None:
    scope = await site.session()
    x = await site.post("/v1/semantic_var", scope | {"var_name": "x", "content": "1"})
    path = f"/v1/semantic_var/{x['var_id']}"
    bearer = {"Authorization": f"Bearer {scope['session_auth']}"}
    query = {"session_id": scope["session_id"]}
    expected = (200, value("1"))
    assert await site.send("GET", path, params=scope) == expected
    assert await site.send("GET", path, json=scope) == expected
    assert await site.send("GET", path, params=query, headers=bearer) == expected
    assert await site.send("GET", path, json=query, headers=bearer) == expected
    status, _ = await site.send(
        "POST", "/v1/semantic_var", json=query | {"var_name": "y"}, headers=bearer
    )
    assert status == 200


async def test_a_native_call_over_http(site: Site) -> None:
    scope = await site.session()
    body = scope | {
        "func_name": "shout",
        "func_source": "def shout(a, out):\n    out.set(a.upper())",
        "parameters": [given("a", "hey"), made("out")],
    }
    answer = await site.post("/v1/py_native_call", body)
    out = answer["param_info"][1]["var_id"]
    assert await site.get(f"/v1/semantic_var/{out}", **scope) == value("HEY")


ERRORS: list[tuple[str, str, dict[str, Any], int, str]] = [
    ("GET", "/v1/semantic_var/nowhere", {}, 404, "not_found"),
    ("GET", "/v1/semantic_var/nowhere/stream", {}, 404, "not_found"),
    ("POST", "/v1/semantic_var/nowhere", {"content": "x"}, 404, "not_found"),
    ("POST", "/v1/semantic_var/nowhere/cancel", {}, 404, "not_found"),
    ("POST", "/v1/request/77/cancel", {}, 404, "not_found"),
    ("POST", "/v1/request/abc/cancel", {}, 422, "validation_failed"),
    ("POST", f"/v1/request/{'9' * 5000}/cancel", {}, 422, "validation_failed"),
    ("GET", "/v1/session/abc", {}, 422, "validation_failed"),
    ("GET", f"/v1/session/{'9' * 18}", {}, 404, "not_found"),
    ("GET", f"/v1/session/{'9' * 30}", {}, 422, "validation_failed"),
    ("GET", f"/v1/session/{'9' * 5000}", {}, 422, "validation_failed"),
    ("GET", "/v1/semantic_var/x", {"timeout": 0}, 422, "validation_failed"),
    ("GET", "/v1/semantic_var/x", {"criteria": "soon"}, 422, "validation_failed"),
    (
        "POST",
        "/v1/semantic_call",
        {"template": "a {{y}}", "parameters": []},
        400,
        "invalid_request",
    ),
    ("POST", "/v1/semantic_call", {"template": 5, "parameters": []}, 422, "validation_failed"),
    ("POST", "/v1/semantic_call", {"parameters": []}, 422, "validation_failed"),
    ("POST", "/v1/semantic_call", {"color": 1}, 422, "validation_failed"),
    ("POST", "/v1/semantic_var", {"var_name": ""}, 422, "validation_failed"),
    ("POST", "/v1/semantic_var", {"var_name": "x", "content": 1}, 422, "validation_failed"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": ["x"]}, 404, "not_found"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": []}, 422, "validation_failed"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": ["x", "x"]}, 422, "validation_failed"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": ["x"], "k": 2}, 422, "validation_failed"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": ["x"], "k": 0}, 422, "validation_failed"),
    ("POST", "/v1/semantic_vars/first", {"var_ids": ["x"] * 1025}, 422, "validation_failed"),
    ("GET", "/nowhere", {}, 404, "not_found"),
    ("PUT", "/v1/semantic_var", {}, 405, "method_not_allowed"),
]


async def test_each_mistake_gets_its_documented_error(site: Site) -> None:
    scope = await site.session()
    for method, path, fields, status, kind in ERRORS:
        found, answer = await site.send(method, path, json=scope | fields)
        assert (found, answer["error"]["type"]) == (status, kind), (path[:80], fields, answer)
        assert answer["error"]["message"]


async def test_errors_carry_the_headers_that_http_asks_for(site: Site) -> None:
    for method, path, status, header, text in (
        ("PUT", "/v1/semantic_var/x", 405, "Allow", "GET, POST"),
        ("HEAD", "/v1/semantic_var/x", 405, "Allow", "GET, POST"),
        ("DELETE", "/v1/session", 405, "Allow", "POST"),
        ("HEAD", "/health", 200, "Content-Type", "application/json"),
        ("HEAD", "/metrics", 200, "Allow", None),
        ("HEAD", "/ready", 503, "Retry-After", "1"),
    ):
        async with site.http.request(method, path) as answer:
            found = (answer.status, answer.headers.get(header))
            assert found == (status, text), (method, path)
            assert method != "HEAD" or not await answer.read()
    scope = await site.session()
    async with site.http.get(f"/v1/session/{scope['session_id']}") as answer:
        assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        (CoreConfig(global_scheduler=GlobalSchedulerConfig(max_queue_size=1)), "cluster_full"),
        (CoreConfig(session_quota=SessionQuota(calls=1)), "quota_exceeded"),
    ],
)
async def test_rejections_have_retry_after_and_the_name_of_the_limit(
    config: CoreConfig, kind: str
) -> None:
    async for site in open_site(config):
        scope = await site.session()
        call = scope | {"template": "a{{y}}", "parameters": [made("y")]}
        await site.post("/v1/semantic_call", call | {"output_criteria": "latency"})
        async with site.http.post("/v1/semantic_call", json=call) as answer:
            error = (await answer.json())["error"]
            is_full = kind == "cluster_full"
            assert (answer.status, error["type"]) == (503 if is_full else 429, kind)
            assert answer.headers["Retry-After"] == ("30" if is_full else "1")
            limit = "max_queue_size" if is_full else "session_quota.calls"
            assert f"`{limit}`" in error["message"]


async def test_set_twice_and_cycles_are_conflicts(site: Site) -> None:
    scope = await site.session()
    x = await site.post("/v1/semantic_var", scope | {"var_name": "x", "content": "1"})
    path = f"/v1/semantic_var/{x['var_id']}"
    status, answer = await site.send("POST", path, json=scope | {"content": "2"})
    assert (status, answer["error"]["type"]) == (409, "already_set")
    loop = (await site.post("/v1/semantic_var", scope | {"var_name": "loop"}))["var_id"]
    body = scope | {
        "template": "{{i}} {{o}}",
        "parameters": [taken("i", loop), made("o", loop)],
    }
    status, answer = await site.send("POST", "/v1/semantic_call", json=body)
    assert (status, answer["error"]["type"]) == (409, "cyclic_graph")
    assert "`loop`" in answer["error"]["message"]


READS_NO_BODY = ("/health", "/v1/models", "/v1/admin/tenants", "/v1/admin/engines")
HOSTILE = [
    b"{",
    b"[]",
    b'"text"',
    b"\xff\xfe",
    b'{"session_id": NaN}',
    b'{"session_id": 1e999}',
    b'{"session_auth": "\\ud800"}',
    b"[" * 100_000 + b"]" * 100_000,
    b'{"session_id": ' + b"9" * 5000 + b"}",
]


async def test_hostile_json_is_rejected_on_every_route(site: Site) -> None:
    routes = [route for route in create_app(site.core).openapi()["paths"] if route != "/metrics"]
    for raw, route in itertools.product(HOSTILE, routes):
        ids = {"var_id": "v", "model_id": "m", "response_id": "r"}
        path = route.format(session_id=1, request_id=1, engine_id=1, **ids)
        for method in ("POST", "GET", "DELETE"):
            status, answer = await site.send(method, path, data=raw)
            is_open = method == "GET" and path in READS_NO_BODY
            assert is_open or 400 <= status < 504, (method, path, raw[:20], answer)
            assert is_open or set(answer["error"]) >= {"type", "message"}


async def test_large_bodies(site: Site) -> None:
    scope = await site.session()
    headers = {"Authorization": f"Bearer {scope['session_auth']}"}
    for size, expected in ((MAX_TEXT, 200), (MAX_TEXT + 1, 422), (50_000_000, 413)):
        body = json.dumps(scope | {"var_name": "big", "content": "x" * size}).encode()
        status, answer = await site.send(
            "POST", "/v1/semantic_var", data=io.BytesIO(body), headers=headers
        )
        assert status == expected, answer
    assert answer["error"]["type"] == "payload_too_large"
    assert await site.get("/health") == {}


async def scoped_requests(site: Site) -> list[tuple[str, str, dict[str, Any]]]:
    """Return a valid request without its scope for every route with `session_auth`."""
    call = {"template": "a {{y}}", "parameters": [made("y")]}
    native = {"func_name": "f", "func_source": "", "parameters": [made("y")]}
    bodies = {
        "/v1/semantic_call": call,
        "/v1/py_native_call": native,
        "/v1/semantic_var": {"var_name": "x"},
        "/v1/semantic_var/{var_id}": {"content": "x"},
        "/v1/semantic_vars/first": {"var_ids": ["x"]},
    }
    found = []
    for route, operations in create_app(site.core).openapi()["paths"].items():
        for method, operation in operations.items():
            if not route.startswith("/v1") or 410 not in map(int, operation["responses"]):
                continue
            fields = bodies.get(route, {}) if method == "post" else {}
            found.append((method.upper(), route, fields))
    return found


async def test_a_foreign_session_is_unknown_on_every_route(site: Site) -> None:
    scope = await site.session()
    x = await site.post("/v1/semantic_var", scope | {"var_name": "x"})
    requests = await scoped_requests(site)
    assert len(requests) == 13
    for (method, route, fields), wrong in itertools.product(
        requests, ["", "wrong", None, "\u00e9", scope["session_auth"] + "x"]
    ):
        path = route.format(session_id=scope["session_id"], var_id=x["var_id"], request_id=1)
        body = fields | {"session_id": scope["session_id"], "session_auth": wrong}
        if "{session_id}" in route:
            del body["session_id"]
        status, answer = await site.send(method, path, json=body)
        expected = (404, "not_found") if wrong else (401, "authentication_failed")
        assert (status, answer["error"]["type"]) == expected, (method, route)
    variables = (await site.get("/v1/semantic_var", **scope))["vars"]
    assert [(v["var_name"], v["state"]) for v in variables] == [("x", "empty")]


async def test_api_keys_and_the_cluster_token(guarded: Site) -> None:
    for options in (
        {"json": {}},
        {"json": {"api_key": "k3"}},
        {"headers": {"Authorization": "k1"}},
    ):
        status, answer = await guarded.send("POST", "/v1/session", **options)
        assert (status, answer["error"]["type"]) == (401, "authentication_failed")
    await guarded.post("/v1/session", {"api_key": "k1", "apps": ["demo"]})
    await guarded.post("/v1/session", {}, headers={"Authorization": "Bearer k2"})
    beat = {"engine_id": 0, "engine_name": "e0", "runtime_info": {}}
    for path, body in (
        ("/register_engine", {"engine_config": ENGINE}),
        ("/engine_heartbeat", beat),
    ):
        for headers in ({}, {"Authorization": "Bearer outside"}):
            status, _ = await guarded.send("POST", path, json=body, headers=headers)
            assert status == 401
        await guarded.post(path, body, headers={"Authorization": "Bearer inside"})


@pytest.mark.parametrize("host", ["", " "])
async def test_an_engine_that_cannot_be_called_is_rejected_before_it_is(
    site: Site, host: str
) -> None:
    engine = ENGINE | {"host": host}
    status, answer = await site.send("POST", "/register_engine", json={"engine_config": engine})
    assert (status, answer["error"]["type"]) == (422, "validation_failed")
    assert "host" in answer["error"]["message"]
    assert site.core.fleet.views() == []


async def test_readiness_follows_the_engines(site: Site) -> None:
    status, answer = await site.send("GET", "/ready")
    assert (status, answer["error"]["type"]) == (503, "no_engine")
    terms = await site.post("/register_engine", {"engine_config": ENGINE})
    core = site.core.fleet.identity
    assert terms == {"engine_id": 0, "core": core.id, "epoch": core.epoch, "lease_s": 30.0}
    assert [engine["engine_name"] for engine in (await site.get("/ready"))["engines"]] == ["e0"]
    body = {"engine_id": 5, "engine_name": "e0", "runtime_info": {}}
    assert await site.post("/engine_heartbeat", body) == {"state": "unknown"}
    async with site.http.get("/metrics") as response:
        text = await response.text()
        assert response.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert 'parrot_engine_up{engine="e0",model_name="m"} 1.0' in text
    assert (await site.get("/v1/models"))["object"] == "list"


async def test_a_read_times_out_with_504(site: Site) -> None:
    scope = await site.session()
    x = await site.post("/v1/semantic_var", scope | {"var_name": "x"})
    path = f"/v1/semantic_var/{x['var_id']}"
    status, answer = await site.send("GET", path, params=scope | {"timeout": "0.05"})
    assert (status, answer["error"]["type"]) == (504, "timed_out")


@pytest.mark.parametrize("suffix", ["", "/stream"])
async def test_a_client_that_disconnects_cancels_its_work(site: Site, suffix: str) -> None:
    scope = await site.session()
    await site.join()
    x = await site.call(scope, "x")
    y = await site.call(scope, "y", x)
    reading = asyncio.ensure_future(site.send("GET", f"/v1/semantic_var/{y}{suffix}", params=scope))
    await site.started(1)
    reading.cancel()
    await site.started(0)
    assert site.engine.aborted_names == ["f"]
    reading = asyncio.ensure_future(site.send("GET", f"/v1/semantic_var/{y}", params=scope))
    await site.started(1)
    site.engine.answer(site.engine.held[0], "input")
    await asyncio.wait_for(site.get(f"/v1/semantic_var/{x}", **scope), 30)
    await site.started(1)
    site.engine.answer(site.engine.held[0], "again")
    status, answer = await reading
    assert (status, answer["content"]) == (200, "again")


async def read_events(response: aiohttp.ClientResponse) -> list[tuple[str, Any]]:
    events = []
    for block in (await response.text()).strip().split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if line[0] != ":")
        if fields:
            events.append((fields["event"], json.loads(fields["data"])))
    return events


async def test_a_stream_ends_with_done_for_early_and_late_readers(site: Site) -> None:
    scope = await site.session()
    y = await site.call(scope, "y")
    path = f"/v1/semantic_var/{y}/stream"
    async with site.http.get(path, params=scope) as early:
        assert early.headers["Content-Type"].startswith("text/event-stream")
        await site.join()
        await site.started()
        site.engine.stream(site.engine.held[0], "one ")
        assert b"one " in await early.content.readuntil(b"\n\n")
        site.engine.answer(site.engine.held[0], "one {{two}}\n")
        events = await read_events(early)
    assert events[0] == ("delta", {"text": "{{two}}\n"})
    assert [name for name, _ in events] == ["delta", "done"]
    assert events[1][1]["content"] == "one {{two}}\n"
    async with site.http.get(path, params=scope) as late:
        events = await read_events(late)
    assert [name for name, _ in events] == ["delta", "done"]
    assert events[1][1]["content"] == "one {{two}}\n"


async def test_a_stream_ends_with_an_error(site: Site) -> None:
    scope = await site.session()
    await site.join()
    y = await site.call(scope, "y")
    async with site.http.get(f"/v1/semantic_var/{y}/stream", params=scope) as response:
        await site.started()
        await site.post(f"/v1/semantic_var/{y}/cancel", scope)
        ((name, data),) = await read_events(response)
    assert (name, data["error"]["type"]) == ("error", "cancelled")


async def test_shutting_down_answers_open_reads(site: Site) -> None:
    scope = await site.session()
    await site.join()
    y = await site.call(scope, "y")
    reading = asyncio.ensure_future(site.send("GET", f"/v1/semantic_var/{y}", params=scope))
    await site.started()
    site.core.shut_down()
    status, answer = await reading
    assert (status, answer["error"]["type"]) == (503, "unavailable")
    assert (await site.send("GET", "/ready"))[0] == 503


def is_page(path: str) -> bool:
    """Whether the path is a page for people, with the files that it loads."""
    return path == "/" or path.startswith(("/openapi", "/ui"))


async def test_the_openapi_page_documents_every_route(site: Site) -> None:
    description = await site.get("/openapi.json")
    paths = description["paths"]
    app = create_app(site.core)
    documented = {(path, method.upper()) for path in paths for method in paths[path]}
    for route in app.routes:
        for method in getattr(route, "methods", None) or ():
            if method != "HEAD" and not is_page(route.path):
                assert (route.path.replace(":path}", "}"), method) in documented
    assert len(documented) >= 20
    for path, method in documented:
        operation = paths[path][method.lower()]
        assert operation["summary"]
        if path == "/metrics":
            continue
        assert operation["responses"]["200"]["content"]
        assert "ErrorResponse" in json.dumps(operation["responses"]["400"])
        if method == "POST":
            assert "$ref" in operation["requestBody"]["content"]["application/json"]["schema"]
    text = json.dumps(description)
    assert "x-parrot-request" not in text
    names = set(description["components"]["schemas"])
    for reference in text.split('"#/components/schemas/')[1:]:
        assert reference.split('"')[0] in names
    query = {p["name"]: p for p in paths["/v1/semantic_var/{var_id}"]["get"]["parameters"]}
    limits = {"criteria", "timeout", "deadline", "blocked"}
    assert set(query) == {"var_id", "session_id", "session_auth"} | limits
    assert query["session_id"]["required"]
    for page in ("/docs", "/redoc"):  # these pages would load scripts from other servers
        assert (await site.send("GET", page))[0] == 404
