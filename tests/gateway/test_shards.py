"""Two ServeCores as shards: each forwards a request to the shard that holds its session."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from fastapi import FastAPI
from hypothesis import given
from hypothesis import strategies as st
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send

from parrot.cluster.ports import free_port
from parrot.gateway.shards import Forwarding, ShardLoad
from parrot.protocol.answers import create_base_app, own_layers
from parrot.protocol.bodies import BodyBudget
from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import (
    MisdirectedRequest,
    NotFound,
    PromptTooLong,
    SessionGone,
    Unavailable,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.sessions import SessionNumbers
from parrot.server.app import create_app
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError, parse_config
from parrot.utils.shard import ALONE, MAX_SHARDS, ElsewhereError, Shard
from tests.e2e.programs import Program, program
from tests.support.app_server import serve_app
from tests.support.fake_engine import FakeEngine, Script, fake_engine

MODEL = "m"
SECOND = 1


@dataclass
class Served:
    core: ServeCore
    engine: FakeEngine
    url: str
    client: ServeClient

    async def post(self, path: str, body: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as http,
            http.post(self.url + path, json=body) as response,
        ):
            return response.status, await response.json()


@asynccontextmanager
async def shard(index: int, ports: list[int]) -> AsyncIterator[Served]:
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    config = CoreConfig.model_validate({"shards": {"index": index, "cores": urls}})
    clock, engine = MonotonicClock(), fake_engine(f"e{index}", model=MODEL)
    core = ServeCore(config, clock=clock, dispatcher=Dispatcher(config, clock, lambda _: engine))
    async with serve_app(create_app(core), ports[index]) as url, HttpClient(url) as http:
        await core.register_engine(RegisterRequest(engine_config=engine.info))
        yield Served(core, engine, url, ServeClient(http))
        core.check_integrity()


def free_ports(count: int = 2) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(free_port("127.0.0.1", set(found)))
    return found


@pytest.fixture
async def shards() -> AsyncIterator[list[Served]]:
    ports = free_ports()
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(shard(index, ports)) for index in range(2)]


def elsewhere(session: Program, asked: Served) -> Program:
    """Return the same session with another server."""
    return Program(asked.client, session.session_id, session.session_auth)


async def test_a_program_may_use_any_shard(shards: list[Served]) -> None:
    first, second = shards
    async with program(second.client) as here:
        assert here.session_id % MAX_SHARDS == SECOND
        there = elsewhere(here, first)
        var = await there.call("Say: {{out}}")
        assert await there.get(var) == await here.get(var)
        joined = await there.call("Again: {{x}} {{out}}", variables={"x": var})
        assert "".join([piece async for piece in there.stream(joined)]) == await here.get(joined)
        info = await first.client.session_info(here.session_id, here.session_auth)
        assert [call.engine for call in info.calls] == ["e1", "e1"]
        assert (len(first.engine.requests), len(second.engine.requests)) == (0, 2)
        assert list(first.core.sessions) == []
    gone = elsewhere(here, first)
    with pytest.raises(SessionGone):
        await gone.get(var)
    with pytest.raises(NotFound):
        await Program(first.client, here.session_id, "a guess").get(var)
    async with program(first.client) as own:
        assert own.session_id % MAX_SHARDS == 0
        assert await own.get(await own.call("Say: {{out}}"))


async def test_a_large_body_is_forwarded_by_the_token_in_its_header(
    shards: list[Served],
) -> None:
    first, second = shards
    async with program(second.client) as here:
        text = "word " * 400_000  # read only if the request has a valid token
        there = elsewhere(here, first)
        var = await there.call("{{x}} {{out}}", inputs={"x": text}, max_gen_length=4)
        with pytest.raises(PromptTooLong):
            await there.get(var)


async def test_responses_are_continued_read_and_deleted_at_their_shard(
    shards: list[Served],
) -> None:
    first, second = shards
    body = {"model": MODEL, "input": "Hello", "store": True}
    status, made = await second.post("/v1/responses", body)
    assert status == 200
    more = body | {"previous_response_id": made["id"], "input": "And then?"}
    status, continued = await first.post("/v1/responses", more)
    assert status == 200
    assert "Hello" in second.engine.prompts[-1]
    assert first.engine.requests == []
    async with aiohttp.ClientSession(first.url) as http:
        for name in (made["id"], continued["id"]):
            async with http.get(f"/v1/responses/{name}") as response:
                assert (await response.json())["id"] == name
            async with http.delete(f"/v1/responses/{name}") as response:
                assert response.status == 200
            async with http.get(f"/v1/responses/{name}") as response:
                assert response.status == 404


async def test_a_reader_that_disconnects_is_removed_at_its_shard(shards: list[Served]) -> None:
    first, second = shards
    second.engine.script = Script(hang_after=0)
    async with program(second.client) as here:
        var = await elsewhere(here, first).call("Wait: {{out}}")
        read = asyncio.create_task(elsewhere(here, first).get(var, None))
        async with asyncio.timeout(20):
            while not second.engine.requests:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            read.cancel()
            while second.core.fleet.views()[0].num_running:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


async def test_missing_shards_and_different_configurations() -> None:
    ports = free_ports()
    async with shard(0, ports) as alone:
        lost = Program(alone.client, 64 * 1000 + SECOND, "its auth")
        with pytest.raises(Unavailable, match="shard 1 does not answer"):
            await lost.get("x")
        with pytest.raises(NotFound):
            await Program(alone.client, 64 * 1000 + 2, "no shard's").get("x")
    wrong = [ports[0], ports[0]]
    urls = [f"http://127.0.0.1:{port}" for port in wrong]
    with pytest.raises(ConfigError, match="two shards have the same address"):
        parse_config(CoreConfig, {"shards": {"index": 0, "cores": urls}}, "x")
    async with shard(0, ports) as first, shard(0, ports[::-1]) as other:
        lost = Program(first.client, 64 * 1000 + SECOND, "its auth")
        with pytest.raises(MisdirectedRequest, match="all shards need equal"):
            await lost.get("x")
        assert other.core.config.shards is not None


def test_a_shard_accepts_its_own_host_name() -> None:
    cores = ["http://core-0.test:9000", "http://core-1.test:9000"]
    config = parse_config(CoreConfig, {"shards": {"index": 1, "cores": cores}}, "x")
    asked = TestClient(create_app(ServeCore(config)))
    assert asked.get("http://core-1.test:9000/health").status_code == 200
    assert asked.get("http://core-0.test:9000/health").status_code == 421


def one_message(message: Message) -> Receive:
    """Return a client that sends one message and stays connected."""
    messages = [message]

    async def receive() -> Message:
        return messages.pop() if messages else await asyncio.Future[Message]()

    return receive


async def test_a_body_is_not_kept_while_its_answer_is_computed() -> None:
    body = bytes(1000)
    counts = [sys.getrefcount(body)]
    receive = one_message({"type": "http.request", "body": body})

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        counts.append(sys.getrefcount(body))
        watcher = asyncio.ensure_future(receive())
        await asyncio.sleep(0)
        counts.append(sys.getrefcount(body))
        watcher.cancel()

    async def send(message: Message) -> None:
        pass

    await Forwarding(app, [])({"type": "http", "headers": []}, receive, send)
    before, read, waiting = counts
    assert (read, waiting) == (before + 1, before)


def app_with_budget(num_bytes: int) -> FastAPI:
    """Return an app with `num_bytes` of memory for request bodies."""
    return create_base_app("test", own_layers(max_body_size=2**24), max_body_memory=num_bytes)


async def test_a_forwarded_body_counts_until_the_answer_starts() -> None:
    size, got = 2**18, list[int]()
    budget = app_with_budget(2**18)
    left: BodyBudget = budget.state.body_budget

    async def receive_all(request: web.Request) -> web.Response:
        got.append(len(await request.read()))
        got.append(left._num_free)
        return web.Response(text="done")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ElsewhereError(0)

    async def send(message: Message) -> None:
        got.append(left._num_free)

    other = web.Application(client_max_size=2**24)
    other.router.add_post("/", receive_all)
    async with TestServer(other) as server:
        forwarding = Forwarding(app, [str(server.make_url(""))])
        scope = {"type": "http", "method": "POST", "raw_path": b"/", "query_string": b""}
        scope |= {"headers": [], "request_id": "r", "app": budget}
        whole = {"type": "http.request", "body": bytes(size)}
        await forwarding(scope, one_message(whole), send)
        num_told = len(got)
        assert got[:3] == [size, 2**16, 2**18]
        with left.lease() as others:
            others.hold(2**17 + 2**16)
            with pytest.raises(Unavailable, match="large"):
                await forwarding(scope, one_message(whole), send)
        assert (len(got), left._num_free) == (num_told, 2**18)
        await forwarding.close()


async def test_a_utf8_header_is_forwarded_unchanged() -> None:
    name = "größe".encode()
    seen: list[bytes] = []

    async def other(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        writer.close()
        await writer.wait_closed()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        raise ElsewhereError(0)

    async def send(message: Message) -> None:
        pass

    server = await asyncio.start_server(other, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    forwarding = Forwarding(app, [f"http://127.0.0.1:{port}"])
    scope = {"type": "http", "method": "GET", "raw_path": b"/", "query_string": b""}
    scope |= {
        "headers": [(b"x-parrot-program", name)],
        "request_id": "r",
        "app": app_with_budget(0),
    }
    await forwarding(scope, one_message({"type": "http.request"}), send)
    await forwarding.close()
    server.close()
    assert b"x-parrot-program: " + name + b"\r\n" in seen[0]


@pytest.mark.parametrize(
    "bad",
    [
        {"index": 2, "cores": ["http://a:1", "http://b:1"]},
        {"index": 0, "cores": ["http://a:1"]},
        {"index": 0, "cores": ["http://a:1", "b:1"]},
        {"index": 0, "cores": ["http://a:1", "http://b:1/v1"]},
    ],
)
def test_invalid_shards_are_rejected(bad: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="shards"):
        parse_config(CoreConfig, {"shards": bad}, "x")


@given(
    st.integers(0, 2**42),
    st.integers(0, MAX_SHARDS - 1),
    st.lists(st.integers(1, 9), max_size=9),
)
def test_ids_of_a_shard_increase_and_contain_its_index(
    first: int, index: int, restored: list[int]
) -> None:
    own, other = Shard(index, MAX_SHARDS), Shard((index + 1) % MAX_SHARDS, MAX_SHARDS)
    numbers = SessionNumbers(first, own)
    before = first - 1
    for skipped in [0, *restored]:
        numbers.restore("block", {"end": numbers.next + skipped})
        assert before < numbers.next
        own.require_session(numbers.next)
        with pytest.raises(ElsewhereError) as error:
            other.require_session(numbers.next)
        assert error.value.shards == (index,)
        own.require_token(numbers.auth(numbers.next))
        with pytest.raises(ElsewhereError):
            other.require_token(numbers.auth(numbers.next))
        before = numbers.next
        numbers.mark_used(before)


def test_a_single_servecore_uses_plain_ids() -> None:
    numbers = SessionNumbers(7)
    assert numbers.next == 7
    assert "." not in numbers.auth(7)
    numbers.mark_used(7)
    assert numbers.next == 8
    for number in range(200):
        ALONE.require_session(number)
    ALONE.require_token("token.3")


async def test_a_load_that_a_client_claims_is_not_forwarded() -> None:
    """A forged load would make the other shard accept or reject the client's sessions."""
    loads: list[list[str]] = []

    async def receive_all(request: web.Request) -> web.Response:
        loads.append(request.headers.getall("x-parrot-load"))
        return web.Response(text="done")

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        raise ElsewhereError(0, may_stay=True)

    async def send(message: Message) -> None: ...

    other = web.Application()
    other.router.add_post("/", receive_all)
    async with TestServer(other) as server:
        own = ShardLoad(3, 5, 7)
        forwarding = Forwarding(app, [str(server.make_url(""))], lambda: own)
        scope = {"type": "http", "method": "POST", "raw_path": b"/", "query_string": b""}
        scope |= {"headers": [(b"x-parrot-load", b"0 0 0")], "request_id": "r"}
        scope |= {"app": app_with_budget(2**18)}
        await forwarding(scope, one_message({"type": "http.request", "body": b"{}"}), send)
        await forwarding.close()
    assert loads == [["3 5 7"]]
