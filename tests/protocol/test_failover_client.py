"""A client with several addresses finds the serving server and never repeats a write."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import orjson
import pytest
from starlette.types import Receive, Scope, Send

from parrot.protocol import failover_client
from parrot.protocol.errors import InvalidRequest, NoEngine, ParrotError, Standby, Unavailable
from parrot.protocol.failover_client import FailoverClient, client_of
from parrot.protocol.http import HttpClient
from parrot.protocol.program_client import ProgramClient
from tests.support.app_server import serve_app


class Server:
    """A server whose answers and failures the test controls."""

    def __init__(self, answers: object = "standby") -> None:
        self.does = answers
        self.num_posts = 0
        self.num_looks = 0  # Health probes received.
        self.asked = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        await receive()
        self.num_posts += scope["method"] == "POST"
        self.num_looks += scope["path"] == "/health"
        self.asked.set()
        if self.does == "hangs":
            await asyncio.sleep(60)
        if self.does == "breaks":
            headers = [(b"content-length", b"100")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            raise ConnectionResetError
        status, body = self._answer()
        event = b"event: done\ndata: %b\n\n" % body
        is_stream = scope["path"] == "/stream" and status == 200
        kind = b"text/event-stream" if is_stream else b"application/json"
        headers = [(b"content-type", kind)]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": event if is_stream else body})

    def _answer(self) -> tuple[int, bytes]:
        if self.does == "standby":
            return 503, orjson.dumps(Standby("it stands by").to_payload())
        if isinstance(self.does, ParrotError):
            return self.does.status, orjson.dumps(self.does.to_payload())
        return 200, orjson.dumps(self.does)

    async def _live(self, receive: Receive, send: Send) -> None:
        for kind in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{kind}.complete"})


@asynccontextmanager
async def client(*servers: Server | None) -> AsyncIterator[FailoverClient]:
    """A client of several servers. None: an address without a server."""
    async with AsyncExitStack() as stack:
        urls = ["http://127.0.0.1:1" for _ in servers]
        for i, server in enumerate(servers):
            if server is not None:
                urls[i] = await stack.enter_async_context(serve_app(server, log_config=None))
        http = FailoverClient([ProgramClient(url) for url in urls])
        stack.push_async_callback(http.close)
        yield http


def post(http: FailoverClient) -> Any:
    return http.request("POST", "/x", body={})


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in {"_PATIENCE_S": 2.0, "_PROBE_S": 0.2, "_PROBE_TIMEOUT_S": 0.3}.items():
        monkeypatch.setattr(failover_client, name, seconds)


async def test_the_active_server_is_found_and_kept() -> None:
    active = Server("active")
    async with client(None, Server(), active) as http:
        assert [await post(http) for _ in range(3)] == ["active"] * 3
        assert active.num_posts == 3
        assert http._current == 2
        async for name, data in http.stream("GET", "/stream"):
            assert (name, data.strip()) == ("done", b'"active"')


async def test_a_takeover_is_waited_for() -> None:
    first, second = Server("first"), Server()
    async with client(first, second) as http:
        assert await post(http) == "first"
        first.does = "standby"
        asking = asyncio.create_task(post(http))
        second.asked.clear()
        await second.asked.wait()
        second.does = "second"
        assert await asking == "second"
        second.does = "standby"
        first.does = "first"
        assert [name async for name, _ in http.stream("GET", "/stream")] == ["done"]


async def test_no_server_is_active() -> None:
    async with client(None, Server()) as http:
        start = time.monotonic()
        with pytest.raises(Unavailable):
            await post(http)
        assert 1.9 < time.monotonic() - start < 10
        with suppress(Unavailable):
            async for _ in http.stream("GET", "/stream"):
                raise AssertionError


@pytest.mark.parametrize("error", [InvalidRequest("no"), NoEngine("none")])
async def test_an_answer_of_the_active_server_is_final(error: ParrotError) -> None:
    other = Server("other")
    async with client(Server(error), other) as http:
        for _ in range(2):
            with pytest.raises(type(error)):
                await post(http)
        assert not other.asked.is_set()


@pytest.mark.parametrize("how", ["breaks", "hangs", Unavailable("it is going down")])
async def test_writes_are_not_repeated_but_reads_are(how: object) -> None:
    broken, other = Server(how), Server("other")
    async with client(broken, other) as http:
        with pytest.raises(Unavailable):
            await asyncio.wait_for(post(http), 5)
        assert (broken.num_posts, other.num_posts) == (1, 0)
        assert await post(http) == "other"  # The next request goes to the other server.
    async with client(broken, other) as http:
        assert await asyncio.wait_for(http.request("GET", "/x"), 5) == "other"


async def test_a_hung_server_is_not_tried_again_during_a_takeover() -> None:
    hung, other = Server("hangs"), Server()
    async with client(hung, other) as http:
        with pytest.raises(Unavailable):
            await post(http)
        num_looks = hung.num_looks
        asking = asyncio.create_task(post(http))
        await other.asked.wait()
        other.does = "other"
        assert await asyncio.wait_for(asking, 20) == "other"
        assert (hung.num_posts, hung.num_looks) == (1, num_looks)


async def test_one_address_uses_a_plain_client() -> None:
    http = client_of(["http://127.0.0.1:1"])
    assert isinstance(http, HttpClient)
    await http.close()


async def test_a_broken_stream_does_not_restart_at_another_server() -> None:
    """The client would receive the first text twice."""

    async def half(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await Server()._live(receive, send)
            return
        headers = [(b"content-type", b"text/event-stream"), (b"content-length", b"1000")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"event: delta\ndata: 1\n\n"
        await send({"type": "http.response.body", "body": body, "more_body": True})
        raise ConnectionResetError

    other = Server("other")
    async with serve_app(half, log_config=None) as broken, serve_app(other) as url:
        http = FailoverClient([HttpClient(broken), HttpClient(url)])
        stream = http.stream("GET", "/stream")
        assert (await anext(stream))[0] == "delta"
        with pytest.raises(Unavailable):
            await anext(stream)
        assert [name async for name, _ in http.stream("GET", "/stream")] == ["done"]
        await http.close()
