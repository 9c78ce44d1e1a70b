"""Clients that send too little, too slowly or without end, and the limits on connections."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass

import orjson
import pytest
from pydantic import BaseModel

from parrot.protocol.answers import create_base_app, own_layers
from parrot.protocol.app_server import AppServer
from parrot.protocol.endpoint import Access, Endpoint
from parrot.protocol.errors import Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.server_config import ConnectionLimits

LIMITS = ConnectionLimits(
    head_timeout=0.3,
    body_idle_timeout=0.3,
    body_timeout=1.0,
    answer_idle_timeout=2.0,
    max_header_bytes=4096,
    max_connections=8,
    max_body_memory=2**20,
)
HEAD = b"POST /size HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
WHOLE = HEAD + b'content-length: 11\r\n\r\n{"text":""}'


class Text(BaseModel):
    text: str


@dataclass
class Site:
    server: AppServer
    port: int
    release: asyncio.Event
    sent: list[int]  # sizes of the chunks of endless answers
    ended: asyncio.Event  # set when an endless answer ends

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port)

    async def answer_to(self, *pieces: bytes, pause_s: float = 0.0) -> bytes:
        """Send `pieces`, and return all bytes until the server closes the connection."""
        reader, writer = await self.connect()
        reading = asyncio.create_task(reader.read())
        for piece in pieces:
            if not reading.done():
                writer.write(piece)
                await asyncio.sleep(pause_s)
        async with asyncio.timeout(5):
            raw = await reading
        writer.close()
        return raw

    async def gone(self, num_left: int = 0) -> None:
        async with asyncio.timeout(5):
            while len(self.server.server_state.connections) > num_left:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@asynccontextmanager
async def serving(limits: ConnectionLimits) -> AsyncIterator[Site]:
    app = create_base_app(
        "test", own_layers(max_body_size=2**24), max_body_memory=limits.max_body_memory
    )
    release = asyncio.Event()

    def size(request: Text) -> Text:
        return Text(text=str(len(request.text)))

    async def wait(request: Text) -> Text:
        await release.wait()
        return request

    async def endless(request: Text) -> AsyncGenerator[tuple[str, BaseModel]]:
        piece = Text(text="x" * 10_000)
        try:
            while True:
                yield "chunk", piece
                sent.append(len(piece.text))
        finally:
            ended.set()

    sent: list[int] = []
    ended = asyncio.Event()
    app.router.routes[:0] = [
        Endpoint("POST", "/endless", endless, access=Access.ANYBODY).route(),
        Endpoint("POST", "/size", size, access=Access.ANYBODY).route(),
        Endpoint("POST", "/wait", wait, access=Access.ANYBODY).route(),
    ]

    async def end() -> None:
        release.set()

    server = AppServer(app, "127.0.0.1", 0, end, limits)
    running = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Site(server, port, release, sent, ended)
    finally:
        server.should_exit = True
        await running


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving(LIMITS) as site:
        yield site


def status_of(raw: bytes) -> int:
    head, _, body = raw.partition(b"\r\n\r\n")
    if body and b"chunked" not in head:
        assert orjson.loads(body)["error"]["message"]
    return int(head.split(b" ")[1])


async def test_silent_connections_are_closed(site: Site) -> None:
    streams = [await site.connect() for _ in range(LIMITS.max_connections)]
    await site.gone()
    assert [await reader.read() for reader, _ in streams] == [b""] * len(streams)
    for _, writer in streams:
        writer.close()


@pytest.mark.parametrize(
    ("pieces", "pause_s"),
    [
        ([b"POST /si"], 0.0),
        ([HEAD, *[b"a: b\r\n"] * 30], 0.05),
        ([HEAD + b"content-length: 100\r\n\r\n{"], 0.0),
        ([HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n"], 0.0),
        ([HEAD + b"content-length: 1000\r\n\r\n", *[b" "] * 900], 0.05),  # 45 s in all.
    ],
    ids=["half a head", "an endless head", "half a body", "half a chunk", "a trickle"],
)
async def test_slow_requests_time_out(site: Site, pieces: list[bytes], pause_s: float) -> None:
    began = time.monotonic()
    assert status_of(await site.answer_to(*pieces, pause_s=pause_s)) == 408
    assert time.monotonic() - began < 20  # the machine may be busy
    await site.gone()


async def test_line_breaks_do_not_keep_a_connection(site: Site) -> None:
    assert status_of(await site.answer_to(*[b"\r\n"] * 30, pause_s=0.02)) == 408


@pytest.mark.parametrize(
    "piece",
    [
        HEAD + b"a: " + b"x" * 100_000,
        HEAD + b"".join(b"a%d: b\r\n" % n for n in range(10_000)),
        b"POST /" + b"x" * 100_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n0\r\na: " + b"x" * 1_000_000,
        HEAD + b"transfer-encoding: chunked\r\n\r\n1;" + b"x" * 1_000_000,
    ],
    ids=["a value", "many", "the path", "a trailer", "an extension"],
)
async def test_heads_are_bounded(site: Site, piece: bytes) -> None:
    with suppress(ConnectionResetError):  # the server closed before it read all bytes
        assert status_of(await site.answer_to(piece)) == 431
    await site.gone()


async def test_connections_are_limited_and_the_next_one_gets_503(site: Site) -> None:
    streams = [await site.connect() for _ in range(LIMITS.max_connections)]
    raw = await site.answer_to()
    assert status_of(raw) == 503
    assert b"retry-after: 1" in raw
    for _, writer in streams:
        writer.close()
    await site.gone()
    async with HttpClient(site.url) as http:
        assert await http.request("POST", "/size", body={"text": "abc"}) == {"text": "3"}


async def test_the_total_size_of_bodies_in_flight_is_limited(site: Site) -> None:
    half = HEAD + b"content-length: 1000000\r\n\r\n" + b" " * 700_000
    _, first = await site.connect()
    first.write(half)
    await first.drain()
    async with HttpClient(site.url) as http:
        with pytest.raises(Unavailable, match="too many large requests"):
            await until_refused(lambda: http.request("POST", "/size", body={"text": "x" * 800_000}))
        small = await http.request("POST", "/size", body={"text": "x" * 1000})
        assert small == {"text": "1000"}
        first.close()
        await site.gone(1)
        for _ in range(5):  # each request releases its share of the limit
            large = await http.request("POST", "/size", body={"text": "x" * 800_000})
            assert large == {"text": "800000"}


async def test_chunked_bodies_count_towards_the_limit(site: Site) -> None:
    chunk = b"%x\r\n%b\r\n" % (100_000, b" " * 100_000)
    _, first = await site.connect()
    first.write(HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk * 8)
    await first.drain()
    async with HttpClient(site.url) as http:
        with pytest.raises(Unavailable, match="too many large requests"):
            await until_refused(lambda: http.request("POST", "/size", body={"text": "x" * 800_000}))
        first.close()
        await site.gone(1)
        large = await http.request("POST", "/size", body={"text": "x" * 800_000})
        assert large == {"text": "800000"}


async def until_refused(ask: Callable[[], Awaitable[object]]) -> None:
    async with asyncio.timeout(20):
        while True:
            await ask()


async def test_a_slow_answer_does_not_time_out(site: Site) -> None:
    async with HttpClient(site.url) as http:
        asked = asyncio.create_task(http.request("POST", "/wait", body={"text": "a"}))
        await asyncio.sleep(3 * LIMITS.head_timeout)
        assert not asked.done()
        site.release.set()
        assert await asked == {"text": "a"}
        for _ in range(3):  # an idle connection stays open
            await asyncio.sleep(1.5 * LIMITS.head_timeout)
            assert len(site.server.server_state.connections) == 1
            assert await http.request("POST", "/size", body={"text": "a"}) == {"text": "1"}


async def test_an_answer_that_the_client_does_not_read_is_cut_off(site: Site) -> None:
    reader, writer = await site.connect()
    reader._transport.pause_reading()
    writer.write(WHOLE.replace(b"/size", b"/endless"))
    async with asyncio.timeout(10):
        await site.ended.wait()
    await site.gone()
    assert sum(site.sent) < 50 * 2**20  # the system's socket buffers
    writer.close()


async def test_an_answer_that_the_client_reads_slowly_is_not_cut_off(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(WHOLE.replace(b"/size", b"/endless"))
    for _ in range(60):
        await reader.readexactly(500_000)
        await asyncio.sleep(0.05)
    assert not site.ended.is_set()
    writer.close()
    async with asyncio.timeout(10):
        await site.ended.wait()


async def test_requests_in_one_packet_and_in_single_bytes(site: Site) -> None:
    reader, writer = await site.connect()
    writer.write(WHOLE * 3)
    for byte in WHOLE:
        writer.write(bytes([byte]))
        await writer.drain()
    for _ in range(4):
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        assert await reader.readexactly(len(b'{"text":"0"}')) == b'{"text":"0"}'
    writer.close()
