"""The connections to a server, against servers that send scripted bytes."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.protocol.connections import OnEvent, Origin, ServerConnections, _Connection
from parrot.protocol.errors import (
    EngineFailed,
    InternalError,
    InvalidRequest,
    ParrotError,
    Unavailable,
)
from parrot.protocol.transport import ErrorReader, Unreachable

JSON_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\n" + b'{"a":1}'
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENTS = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
LAST = b"0\r\n\r\n"
REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: https://other/\r\nContent-Length: 0\r\n\r\n"


def piece(data: bytes) -> bytes:
    """A chunk of a body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


class Scripted:
    """Sends the parts of one script per request, and then waits. `b""` closes the connection."""

    def __init__(self, *scripts: Sequence[bytes]) -> None:
        self._scripts = list(scripts)
        self.num_connections = 0
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.left = asyncio.Event()  # A client has closed its connection.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                size = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
                self.bodies.append(await reader.readexactly(size))
                for part in self._scripts.pop(0):
                    if not part:
                        return
                    writer.write(part)
                    await writer.drain()
                    await asyncio.sleep(0.01)  # The client receives each part by itself.
        except (asyncio.IncompleteReadError, ConnectionError):
            self.left.set()
        finally:
            writer.close()


def error_of(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
    return EngineFailed(f"{status} {payload} {headers.get('retry-after')}")


@asynccontextmanager
async def connected(
    server: Scripted, timeout_s: float = 5.0, read_error: ErrorReader = error_of
) -> AsyncIterator[ServerConnections]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    connections = client(port, timeout_s, read_error=read_error)
    try:
        yield connections
    finally:
        await connections.close()
        listening.close()


def client(
    port: int,
    timeout_s: float = 5.0,
    token: str | None = "secret",
    read_error: ErrorReader = error_of,
) -> ServerConnections:
    return ServerConnections(
        f"http://127.0.0.1:{port}/v1",
        bearer_token=token,
        query="?v=1",
        read_error=read_error,
        timeout_s=timeout_s,
    )


def collecting(found: list[bytes]) -> OnEvent:
    def on_event(_: str, data: bytes) -> bool:
        found.append(data.strip())
        return found[-1] == b"[DONE]"

    return on_event


async def test_requests_share_a_connection() -> None:
    server = Scripted([JSON_ANSWER], [JSON_ANSWER[:30], JSON_ANSWER[30:]])
    async with connected(server) as connections:
        assert await connections.post("/x", {"b": "c"}) == {"a": 1}
        origin = Origin(request_id="r", bearer="other")
        assert await connections.post("/x", {}, origin) == {"a": 1}
    assert server.num_connections == 1
    first, second = (head.split(b"\r\n") for head in server.heads)
    assert first[0] == b"POST /v1/x?v=1 HTTP/1.1"
    assert b"Accept-Encoding: identity" in first
    assert b"Authorization: Bearer secret" in first
    assert {b"Authorization: Bearer other", b"X-Request-Id: r"} <= set(second)
    assert server.bodies == [b'{"b":"c"}', b"{}"]


async def test_each_request_has_its_own_timeout() -> None:
    slow = [JSON_ANSWER[i : i + 1] for i in range(len(JSON_ANSWER))]  # Takes at least 0.4 s.
    server = Scripted([JSON_ANSWER], slow, slow)
    async with connected(server) as connections:
        for timeout_s in (5.0, None):
            reply = await connections.send("GET", "/x", None, None, Origin(), timeout_s)
            await reply.end()
        reply = await connections.send("GET", "/x", None, None, Origin(), 0.2)
        with pytest.raises(Unavailable, match=r"no data for 0\.2 s"):
            await reply.end()
    assert server.num_connections == 1


async def test_events_arrive_in_any_parts_and_the_connection_is_used_again() -> None:
    stream = EVENTS + piece(b"data: 1\n\ndata: 2\n") + piece(b"\ndata: [DONE]\n\n")
    parts = [stream[:20], stream[20:95], stream[95:110], stream[110:], LAST]
    server, found = Scripted(parts, [JSON_ANSWER]), list[bytes]()
    async with connected(server) as connections:
        reply = await connections.stream("/x", {}, collecting(found))
        await reply.end()
        assert reply.is_complete
        assert found == [b"1", b"2", b"[DONE]"]
        await asyncio.sleep(0.1)  # The end of the body follows the last event.
        await connections.post("/x", {})
    assert server.num_connections == 1


async def test_a_stream_whose_end_does_not_arrive_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some servers wait until the client closes the connection."""
    monkeypatch.setattr("parrot.protocol.connections._END_S", 0.05)
    stream = EVENTS + piece(b"data: [DONE]\n\n")
    server = Scripted([stream + LAST], [stream], [JSON_ANSWER])
    async with connected(server) as connections:
        await (await connections.stream("/x", {}, collecting([]))).end()
        await asyncio.sleep(0.1)
        await (await connections.stream("/x", {}, collecting([]))).end()
        assert server.num_connections == 1
        async with asyncio.timeout(5):
            await server.left.wait()
        await connections.post("/x", {})
    assert server.num_connections == 2


@pytest.mark.parametrize(
    ("script", "error"),
    [
        ([b""], Unavailable),
        ([JSON_ANSWER[:-1], b""], Unavailable),
        ([b"no HTTP\r\n\r\n"], Unavailable),
        ([REDIRECT], Unavailable),
        ([b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno"], InternalError),
        ([b"HTTP/1.1 503 x\r\nRetry-After: 7\r\nContent-Length: 2\r\n\r\n{}"], EngineFailed),
    ],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_failed_answers(
    script: list[bytes], error: type[ParrotError], is_stream: bool
) -> None:
    found: list[bytes] = []
    async with connected(Scripted(script)) as connections:
        if is_stream and error is InternalError:
            reply = await connections.stream("/x", {}, collecting(found))
            await reply.end()
            assert not reply.is_complete
            return
        asked = connections.stream("/x", {}, collecting(found))
        if not is_stream:
            asked.close()
            asked = connections.post("/x", {})
        with pytest.raises(error) as raised:
            await asked
    assert error is not EngineFailed or "503 {} 7" in raised.value.message
    assert script != [REDIRECT] or "redirects to https://other/" in raised.value.message


async def test_a_head_has_a_limit() -> None:
    head = b"HTTP/1.1 200 OK\r\nX: " + b"a" * 2**16
    async with connected(Scripted([head])) as connections:
        with pytest.raises(Unavailable, match="more than 65536 bytes"):
            await connections.post("/x", {})
    body = b'"' + b"a" * 2**17 + b'"'
    whole = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
    async with connected(Scripted([whole])) as connections:
        assert await connections.post("/x", {}) == "a" * 2**17


async def test_a_stream_that_is_cut_off_fails_after_its_events() -> None:
    found: list[bytes] = []
    async with connected(Scripted([EVENTS + piece(b"data: 1\n\n"), b""])) as connections:
        reply = await connections.stream("/x", {}, collecting(found))
        with pytest.raises(Unavailable, match="closed"):
            await reply.end()
    assert found == [b"1"]


@pytest.mark.parametrize(
    "head",
    [
        b"HTTP/1.0 200 OK",
        b"HTTP/1.1 200 OK\r\nConnection: close",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: identity",
    ],
)
async def test_the_end_of_a_connection_ends_a_body_without_a_length(head: bytes) -> None:
    async with connected(Scripted([head + b'\r\n\r\n{"a":', b"1}", b""])) as connections:
        assert await connections.post("/x", {}) == {"a": 1}


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 100 Continue\r\n\r\n" + JSON_ANSWER,
        b"HTTP/1.1 103 Early Hints\r\nContent-Encoding: gzip\r\n\r\n" * 2 + JSON_ANSWER,
        b'HTTP/1.0 200 OK\r\nConnection: keep-alive\r\nContent-Length: 7\r\n\r\n{"a":1}',
        JSON_ANSWER.replace(b"\r\n", b"\n"),
        JSON_ANSWER.replace(b" OK", b"\r\nFolded: a\r\n b"),
        CHUNKED + b'7 ;name="value"\r\n{"a":1}\r\n' + LAST,
        CHUNKED + b'7  \r\n{"a":1}\r\n0\r\nContent-Encoding: gzip\r\n\r\n',
        b"\r\n" + JSON_ANSWER + b"\r\n",
    ],
)
async def test_unusual_answers_keep_the_connection(answer: bytes) -> None:
    server = Scripted([answer[:20], answer[20:]], [JSON_ANSWER])
    async with connected(server) as connections:
        for _ in range(2):
            assert await connections.post("/x", {}) == {"a": 1}
    assert server.num_connections == 1


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (CHUNKED + b"no size\r\n", Unavailable),
        (CHUNKED + b"-7\r\n", Unavailable),
        (CHUNKED + b"f" * 17 + b"\r\n", Unavailable),
        (CHUNKED + b'5\r\n{"a":1}\r\n' + LAST, Unavailable),
        (CHUNKED + piece(b'{"a":1}') + b"0\r\nTrailer: " + b"a" * 2**17, Unavailable),
        (CHUNKED + b"7;" + b"a" * 2**17, Unavailable),
        (JSON_ANSWER.replace(b"OK", b"OK\r\nContent-Length: 8"), Unavailable),
        (JSON_ANSWER.replace(b"OK", b"OK\r\nTransfer-Encoding: chunked"), Unavailable),
        (JSON_ANSWER.replace(b"OK", b"OK\r\nContent-Encoding: gzip"), InternalError),
        (b"HTTP/1.1 204 No Content\r\n\r\n", InternalError),
        (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 7\r\n\r\n", Unavailable),
        (
            b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            Unavailable,
        ),
        (b"HTTP/1.1 500 x\r\nContent-Length: 7\r\n\r\nbroken!", KeyError),
    ],
)
async def test_wrong_answers_fail_at_once(answer: bytes, error: type[Exception]) -> None:
    def read_error(payload: Any, status: int, headers: Any) -> ParrotError:
        raise KeyError(status)

    parts = [part for part in (answer[:80], answer[80:]) if part]
    async with connected(Scripted(parts, [JSON_ANSWER]), read_error=read_error) as connections:
        with pytest.raises(error, match=r"^(?!.*no data for)"):
            async with asyncio.timeout(4):
                await connections.post("/x", {})
        assert await connections.post("/x", {}) == {"a": 1}


class Idle(asyncio.Transport):
    """A transport that accepts all data, and is closed by `abort`."""

    is_closed = False

    def write(self, data: Any) -> None: ...

    def abort(self) -> None:
        self.is_closed = True

    def is_closing(self) -> bool:
        return self.is_closed

    def get_write_buffer_size(self) -> int:
        return 0


ANSWERS = [
    JSON_ANSWER,
    EVENTS + piece(b"data: 1\n\n") + piece(b"data: [DONE]\n\n") + LAST,
    b"HTTP/1.1 100 Continue\r\n\r\n" + CHUNKED + piece(b'{"a":1}') + b"0\r\nTrailer: x\r\n\r\n",
    b"HTTP/1.1 429 x\r\nRetry-After: 7\r\nConnection: close\r\nContent-Length: 2\r\n\r\n{}",
]
INSERTED = [
    b"",
    b"\r\n",
    b"\0",
    b"7",
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    LAST,
]


@given(
    st.lists(st.sampled_from(ANSWERS), min_size=1, max_size=2).map(b"".join),
    st.lists(
        st.tuples(st.integers(0, 300), st.integers(0, 9), st.sampled_from(INSERTED)), max_size=3
    ),
    st.integers(1, 300),
    st.booleans(),
)
def test_any_bytes_end_a_request_and_do_not_affect_the_next_one(
    data: bytes, changes: list[tuple[int, int, bytes]], size: int, is_stream: bool
) -> None:
    """A change replaces some bytes. The data arrives in parts of `size` bytes, and then the server
    closes the connection."""
    for place, length, inserted in changes:
        data = data[:place] + inserted + data[place + length :]

    async def run() -> None:
        pool, transport = client(1), Idle()
        connection = _Connection(pool)
        connection.connection_made(transport)
        reply = connection.send(b"", b"", collecting([]) if is_stream else None, 5.0)
        for begin in range(0, len(data), size):
            if not transport.is_closed:
                connection.data_received(data[begin : begin + size])
        if pool._take_idle() is connection:
            following = connection.send(b"", b"", None, 5.0)
            connection.data_received(JSON_ANSWER)
            assert (following.body, following.error) == (b'{"a":1}', None)
        connection.connection_lost(None)
        assert reply.over.done()
        assert reply.begun.done()
        assert reply.error is None or isinstance(reply.error, ParrotError)

    asyncio.run(run())


async def test_an_answer_without_a_request_is_not_given_to_the_next_one() -> None:
    extra = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n"
    async with connected(Scripted([JSON_ANSWER + extra], [JSON_ANSWER])) as connections:
        for _ in range(2):
            assert await connections.post("/x", {}) == {"a": 1}


async def test_a_rejected_request_is_not_sent_to_its_end() -> None:
    num_read: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 x\r\nContent-Length: 2\r\n\r\n{}")
        await asyncio.sleep(0.1)  # The body is larger than the buffers of the sockets.
        size = len(await reader.read())
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
        num_read.set_result(size)

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    connections = client(listening.sockets[0].getsockname()[1])
    with pytest.raises(EngineFailed, match="413"):
        await connections.post("/x", "a" * 2**24)
    async with asyncio.timeout(5):
        assert await num_read < 2**24
    listening.close()


@pytest.mark.parametrize("script", [[b"HTTP/1.1 "], [EVENTS + piece(b"data: 1\n\n")]])
async def test_cancelled_requests_close_their_connection(script: list[bytes]) -> None:
    server = Scripted(script)

    async def ask() -> None:
        reply = await connections.stream("/x", {}, collecting([]))
        await reply.end()

    async with connected(server) as connections:
        asking = asyncio.create_task(ask())
        await asyncio.sleep(0.1)
        asking.cancel()
        await asyncio.wait([asking])
        assert asking.cancelled()
        async with asyncio.timeout(5):
            await server.left.wait()


async def test_an_error_of_the_function_fails_the_answer() -> None:
    def refuse(name: str, data: bytes) -> bool:
        raise EngineFailed("broken event")

    server = Scripted([EVENTS + piece(b"data: 1\n\n")])
    async with connected(server) as connections:
        reply = await connections.stream("/x", {}, refuse)
        with pytest.raises(EngineFailed, match="broken event"):
            await reply.end()
        async with asyncio.timeout(5):
            await server.left.wait()


@pytest.mark.parametrize("script", [[], [EVENTS + piece(b"data: 1\n\n")]])
async def test_silent_servers(script: list[bytes]) -> None:
    async with connected(Scripted(script), timeout_s=0.1) as connections:
        with pytest.raises(Unavailable, match=r"no data for 0\.1 s"):
            await (await connections.stream("/x", {}, collecting([]))).end()


async def test_a_server_that_does_not_listen_is_unreachable() -> None:
    listening = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    listening.close()
    await listening.wait_closed()
    with pytest.raises(Unreachable, match="no answer from http://127"):
        await client(port).post("/x", {})


@pytest.mark.parametrize("token", ["a\r\nX: y", "clé"])
async def test_keys_that_headers_cannot_contain_are_rejected(token: str) -> None:
    with pytest.raises(InvalidRequest, match="API key"):
        await client(1, token=token).post("/x", {})


async def test_unused_connections_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("parrot.protocol.connections._MAX_IDLE_S", 0.05)
    server = Scripted([JSON_ANSWER], [JSON_ANSWER])
    async with connected(server) as connections:
        await connections.post("/x", {})
        async with asyncio.timeout(5):
            await server.left.wait()
        await connections.post("/x", {})
    assert server.num_connections == 2


def test_connections_use_the_event_loop_of_servers() -> None:
    """The transports of uvloop have other classes than those of asyncio."""
    uvloop: Any = pytest.importorskip("uvloop")
    tests: list[Callable[[], Any]] = [
        test_requests_share_a_connection,
        test_events_arrive_in_any_parts_and_the_connection_is_used_again,
        test_a_server_that_does_not_listen_is_unreachable,
    ]
    for test in tests:
        uvloop.run(test())
