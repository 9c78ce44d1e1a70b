"""All transports against the base app of servers: over real sockets, and inside the process."""

import asyncio
import io
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from itertools import count
from typing import Any

import aiohttp
import orjson
import pytest
from fastapi import FastAPI, Request, Response
from pydantic import BaseModel
from starlette.routing import Route
from starlette.types import Message

from parrot.protocol import answers
from parrot.protocol.answers import (
    EventStream,
    create_base_app,
    json_response,
    own_layers,
    run_until_disconnect,
)
from parrot.protocol.endpoint import (
    Access,
    Endpoint,
    parse_payload,
    read_json,
    require_cluster_token,
)
from parrot.protocol.errors import (
    AuthenticationFailed,
    InternalError,
    MethodNotAllowed,
    NotFound,
    TimedOut,
    Unavailable,
    ValidationFailed,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.program_client import ProgramClient
from parrot.protocol.public import EmptyResponse
from parrot.protocol.transport import AppTransport, Transport, Unreachable
from tests.support.app_server import serve_app

JSON = {"Content-Type": "application/json"}


class Item(BaseModel):
    name: str
    count: int = 0


class Probe:
    """The requests that the test app received."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    async def work(self) -> Response:
        self.started.set()
        try:
            await asyncio.sleep(60)
        finally:
            self.cancelled.set()
        return Response()

    async def numbers(self) -> AsyncIterator[tuple[str, BaseModel]]:
        try:
            for number in count():
                yield "delta", Item(name="n", count=number)
                await asyncio.sleep(0.01)
        finally:
            self.cancelled.set()


def make_app(probe: Probe) -> FastAPI:
    app = create_base_app("test", own_layers(max_body_size=10_000))

    async def item(request: Request) -> Response:
        parsed = parse_payload(Item, await read_json(request))
        return json_response(parsed)

    async def guarded(request: Request) -> Response:
        require_cluster_token(request, "sesame")
        return json_response(EmptyResponse())

    async def defect(request: Request) -> Response:
        raise RuntimeError("secret detail")

    async def not_json(request: Request) -> Response:
        return Response("hello", media_type="text/plain")

    async def slow(request: Request) -> Response:
        return await run_until_disconnect(request, probe.work())

    async def events(request: Request) -> Response:
        return EventStream(generate(request.path_params["end"]))

    async def endless(request: Request) -> Response:
        return EventStream(probe.numbers())

    app.router.routes += [
        Endpoint("GET", "/typed/{session_id}", typed, access=Access.ANYBODY).route(),
        Route("/item", item, methods=["POST"]),
        Route("/guarded", guarded),
        Route("/defect", defect),
        Route("/not_json", not_json),
        Route("/slow", slow),
        Route("/events/{end}", events),
        Route("/endless", endless),
    ]
    return app


def typed(session_id: int) -> None: ...


async def generate(end: str) -> AsyncIterator[tuple[str, BaseModel]]:
    yield "delta", Item(name="two\nlines\r\n\n é \u2028 end", count=1)
    yield "delta", Item(name="b")
    if end == "typed":
        raise TimedOut("too late", param="timeout")
    if end == "defect":
        raise RuntimeError("secret detail")
    yield "done", Item(name="c")


@pytest.fixture
async def probe() -> Probe:
    return Probe()


@pytest.fixture
async def client(probe: Probe) -> AsyncIterator[HttpClient]:
    async with serve_app(make_app(probe)) as url, HttpClient(url + "/") as http:
        yield http


@pytest.fixture(params=["http", "program", "in process"])
async def transport(request: pytest.FixtureRequest, probe: Probe) -> AsyncIterator[Transport]:
    if request.param != "in process":
        async with serve_app(make_app(probe)) as url:
            http = HttpClient(url) if request.param == "http" else ProgramClient(url)
            yield http
            await http.close()
    else:
        local = AppTransport(make_app(probe))
        yield local
        await local.close()


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_after_it() -> None:
    loop = asyncio.get_running_loop()
    done, gone = loop.create_future(), loop.create_future()
    listening = asyncio.Event()

    async def receive() -> Message:
        listening.set()
        await gone
        return {"type": "http.disconnect"}

    async def leave() -> None:
        await listening.wait()
        loop.call_soon(done.set_result, "worked")
        gone.set_result(None)

    async def answer() -> str:
        request = Request({"type": "http"}, receive)
        result = await run_until_disconnect(request, done)
        await asyncio.sleep(0.01)  # Simulates a write to disk.
        return str(result)

    leaving = asyncio.create_task(leave())
    assert await asyncio.create_task(answer()) == "worked"
    await leaving


async def test_json_round_trip(transport: Transport) -> None:
    sent = {"name": "é\n\u2028", "count": 3}
    assert await transport.request("POST", "/item", body=sent) == sent


@pytest.mark.parametrize(
    ("body", "param"),
    [({"count": 1}, "name"), ({"name": "a", "count": "x"}, "count"), ([1], None), ("text", None)],
)
async def test_ill_typed_bodies_are_422_and_name_the_field(
    transport: Transport, body: object, param: str | None
) -> None:
    with pytest.raises(ValidationFailed) as caught:
        await transport.request("POST", "/item", body=body)
    assert caught.value.param == param


async def raw_post(client: HttpClient, raw: bytes) -> int:
    async with (
        aiohttp.ClientSession(headers=JSON) as session,
        session.post(client.base_url + "/item", data=io.BytesIO(raw)) as response,
    ):
        assert (await response.json())["error"]["type"]
        return response.status


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (b"{", 400),
        (b'{"name": NaN}', 400),
        (b'{"name": "\\ud800"}', 400),
        (b"\xff\xfe", 400),
        (b"[" * 5000, 400),
        (b"", 422),
        (b"x" * 20_000, 413),
        (b"x" * 50_000_000, 413),
    ],
)
async def test_hostile_bodies_get_a_typed_error(
    client: HttpClient, raw: bytes, status: int
) -> None:
    assert await raw_post(client, raw) == status


@pytest.mark.parametrize(
    ("method", "path", "expected"),
    [
        ("GET", "/nowhere", NotFound),
        ("DELETE", "/item", MethodNotAllowed),
        ("GET", "/typed/abc", ValidationFailed),
        ("GET", "/guarded", AuthenticationFailed),
        ("GET", "/defect", InternalError),
        ("GET", "/not_json", InternalError),
    ],
)
async def test_every_error_is_typed(
    transport: Transport, method: str, path: str, expected: type[Exception]
) -> None:
    with pytest.raises(expected) as caught:
        await transport.request(method, path)
    assert "secret detail" not in str(caught.value)


async def test_the_cluster_token_opens_the_guarded_route(client: HttpClient) -> None:
    async with HttpClient(client.base_url, bearer_token="sesame") as trusted:
        assert await trusted.request("GET", "/guarded") == {}
    async with HttpClient(client.base_url, bearer_token="sésame") as wrong:
        with pytest.raises(AuthenticationFailed):
            await wrong.request("GET", "/guarded")


async def test_a_body_of_undeclared_length_is_limited_too(client: HttpClient) -> None:
    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b"x" * 1000

    async with (
        aiohttp.ClientSession(headers=JSON) as session,
        session.post(client.base_url + "/item", data=chunks()) as response,
    ):
        assert response.status == 413
        assert (await response.json())["error"]["type"] == "payload_too_large"


@pytest.mark.parametrize("make", [HttpClient, ProgramClient])
async def test_a_dead_server_is_unreachable(make: Callable[[str], Transport]) -> None:
    client = make("http://127.0.0.1:9")
    with pytest.raises(Unreachable, match=r"127\.0\.0\.1:9") as caught:
        await client.request("GET", "/")
    assert isinstance(caught.value.__cause__, OSError)
    await client.close()


async def test_a_client_timeout_is_unavailable_and_cancels_the_work(
    transport: Transport, probe: Probe
) -> None:
    with pytest.raises(Unavailable):
        await transport.request("GET", "/slow", timeout_s=0.2)
    await asyncio.wait_for(probe.cancelled.wait(), 30)


async def test_a_cancelled_read_cancels_the_work_at_the_server(
    transport: Transport, probe: Probe
) -> None:
    read = asyncio.create_task(transport.request("GET", "/slow", timeout_s=None))
    await asyncio.wait_for(probe.started.wait(), 30)
    read.cancel()
    await asyncio.wait_for(probe.cancelled.wait(), 30)


async def test_events_keep_their_text_and_order(transport: Transport) -> None:
    events = [
        (name, orjson.loads(data)["name"])
        async for name, data in transport.stream("GET", "/events/normal")
    ]
    assert events == [("delta", "two\nlines\r\n\n é \u2028 end"), ("delta", "b"), ("done", "c")]


@pytest.mark.parametrize(("end", "kind"), [("typed", "timed_out"), ("defect", "internal_error")])
async def test_a_failing_stream_ends_with_an_error_event(
    transport: Transport, end: str, kind: str
) -> None:
    events = [event async for event in transport.stream("GET", f"/events/{end}")]
    assert [name for name, _ in events] == ["delta", "delta", "error"]
    assert orjson.loads(events[-1][1])["error"]["type"] == kind
    assert "secret" not in str(events)


async def test_a_stream_that_is_closed_ends_at_the_server(
    transport: Transport, probe: Probe
) -> None:
    async with aclosing(transport.stream("GET", "/endless")) as events:
        async for _ in events:
            break
    await asyncio.wait_for(probe.cancelled.wait(), 30)


async def test_idle_streams_are_kept_alive(
    client: HttpClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(answers, "KEEP_ALIVE_S", 0.05)

    async def slow_events() -> AsyncIterator[tuple[str, BaseModel]]:
        await asyncio.sleep(0.2)
        yield "done", Item(name="a")

    sent: list[Any] = []

    async def receive() -> Any:
        await asyncio.Event().wait()

    async def send(message: Any) -> None:
        sent.append(message)

    await EventStream(slow_events())({"type": "http"}, receive, send)
    start, *body = sent
    frames = [message["body"] for message in body]
    assert start["type"] == "http.response.start"
    assert [message["more_body"] for message in body] == [True] * (len(body) - 1) + [False]
    assert 2 <= frames.count(b": keep-alive\n\n") <= 4
    assert frames[0] == b": keep-alive\n\n"
    assert frames[-2:] == [b'event: done\ndata: {"name":"a","count":0}\n\n', b""]
