"""Variations of the attacks in other files: repeated headers, bodies in pieces, pipelined requests
and similar host names."""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import suppress

import pytest

from parrot.protocol.app_server import guarded_protocol
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.support.app_server import serve_app

ANSWERS_WITHIN_S = 10


@pytest.fixture
async def port() -> AsyncIterator[int]:
    core = ServeCore(CoreConfig(api_keys=("key",), cluster_token="token"))
    protocol = guarded_protocol(core.config.connections)
    async with serve_app(create_app(core), http=protocol) as url:
        yield int(url.rpartition(":")[2])
    core.check_integrity()


async def sent(port: int, *raw: bytes, count: int | None = None) -> list[int]:
    """Send bytes piece by piece and return the statuses of the answers: all until the connection
    closes, or the first `count`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        for piece in raw:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        async with asyncio.timeout(ANSWERS_WITHIN_S):
            text = b""
            while len(statuses(text)) != count and (more := await reader.read(2**16)):
                text += more
    finally:
        writer.close()
    return statuses(text)


def statuses(text: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) [^\r]*\r\n", text)]


def request(path: str, *headers: str, method: str = "GET", body: bytes = b"") -> bytes:
    lines = [f"{method} {path} HTTP/1.1", *headers]
    if not any(line.lower().startswith("host:") for line in headers):
        lines.append("Host: localhost")
    if body and not any("transfer-encoding" in line.lower() for line in headers):
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


CLOSE = "Connection: close"
JSON = "Content-Type: application/json"


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:80"),
        *("localhost@evil.example", "evil.example#localhost", "[::1]evil.example", "[::1"),
        *(
            "[::1]:80evil",
            "0x7f000001",
            "2130706433",
            "localhost:80:evil",
            "localhost,evil.example",
        ),
    ],
)
async def test_names_that_look_like_ours(port: int, host: str) -> None:
    assert await sent(port, request("/health", f"Host: {host}", CLOSE)) == [421]


@pytest.mark.parametrize("host", ["LOCALHOST", "localhost.", "[::1]:9000", "127.0.0.1:1"])
async def test_our_names(port: int, host: str) -> None:
    assert await sent(port, request("/health", f"Host: {host}", CLOSE)) == [200]


@pytest.mark.parametrize(("first", "second"), [("localhost", "evil.x"), ("evil.x", "localhost")])
async def test_two_names(port: int, first: str, second: str) -> None:
    raw = request("/health", f"Host: {first}", f"Host: {second}", CLOSE)
    assert await sent(port, raw) in ([421], [400])


async def test_two_credentials(port: int) -> None:
    """The server uses the first of two `Authorization` headers."""
    good, bad = "Authorization: Bearer key", "Authorization: Bearer wrong"
    assert await sent(port, request("/v1/models", bad, good, CLOSE)) == [401]
    assert await sent(port, request("/v1/models", good, bad, CLOSE)) == [200]
    assert await sent(port, request("/v1/models", "Authorization: bearer  key", CLOSE)) == [401]
    assert await sent(port, request("/v1/models", "x-api-key: key", CLOSE)) == [200]
    assert await sent(port, request("/v1/models?api_key=key", CLOSE)) == [401]


@pytest.mark.parametrize(
    "kind",
    [
        *("text/plain", "text/plain; application/json", "application/jsonp", "", "multipart/json"),
        *("application/json, text/plain", "application/x-www-form-urlencoded"),
    ],
)
async def test_bodies_that_a_page_could_send(port: int, kind: str) -> None:
    body = b'{"api_key": "key"}'
    for path in ("/v1/session", "/register_engine", "/v1/semantic_graph", "/ui/api/enter"):
        raw = request(
            path, f"Content-Type: {kind}", "Authorization: Bearer token", CLOSE, method="POST",
            body=body,
        )  # fmt: skip
        assert await sent(port, raw) == [415], path


async def test_pipelined_requests_are_checked_one_by_one(port: int) -> None:
    raw = [
        request("/v1/models", "Authorization: Bearer key"),
        request("/v1/models"),
        request("/metrics", "Authorization: Bearer key"),
        request("/metrics", "Authorization: Bearer token"),
        request("/v1/session", JSON, method="POST", body=b'{"api_key": "key"}'),
        request("/v1/session", JSON, method="POST", body=b"{}"),
    ]
    whole, expected = b"".join(raw), [200, 401, 403, 200, 200, 401]
    assert await sent(port, whole, count=6) == expected
    pieces = [whole[i : i + 7] for i in range(0, len(whole), 7)]
    assert await sent(port, *pieces, count=6) == expected


@pytest.mark.parametrize("path", ["/v1/semantic_graph", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("is_chunked", [True, False])
async def test_a_request_inside_an_unread_body_is_not_executed(
    port: int, path: str, is_chunked: bool
) -> None:
    inner = request("/v1/models", "Authorization: Bearer key")
    body = inner * (2_000_000 // len(inner))
    headers = [JSON, "Authorization: Bearer wrong"]
    if is_chunked:
        headers.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    raw = request(path, *headers, method="POST", body=body) + request("/health", CLOSE)
    try:
        found = await sent(port, raw)
    except ConnectionError:
        return  # the server closed the connection, which is also correct
    assert found[:1] == [401]
    assert set(found[1:]) <= {200}  # the answer of /health
    assert len(found) <= 2


@pytest.mark.parametrize(
    "headers",
    [
        ("Content-Length: 5", "Transfer-Encoding: chunked"),
        ("Content-Length: 5", "Content-Length: 6"),
        ("Content-Length: -1",),
        ("Content-Length: 5x",),
        ("Transfer-Encoding: chunked, identity",),
        ("Transfer-Encoding: xchunked",),
    ],
    ids=str,
)
async def test_contradictory_lengths_are_rejected(port: int, headers: tuple[str, ...]) -> None:
    head = "\r\n".join(["POST /v1/session HTTP/1.1", "Host: localhost", JSON, *headers, "", ""])
    inner = request("/v1/models", "Authorization: Bearer key", CLOSE)
    found = await sent(port, head.encode() + b"0\r\n\r\n" + inner)
    assert found[:1] in ([400], [401], [])
    assert 200 not in found


async def test_pieces_of_a_body_are_counted_together(port: int) -> None:
    piece = b'"a",' * 20_000
    chunk = b"%x\r\n%b\r\n" % (len(piece), piece)
    raw = request(
        "/v1/chat/completions", JSON, "Authorization: Bearer key", "Transfer-Encoding: chunked",
        CLOSE, method="POST",
    )  # fmt: skip
    body = b'2\r\n["\r\n3\r\na",\r\n'
    with suppress(ConnectionError):  # the server may close before it has read all bytes
        assert await sent(port, raw, body, *[chunk] * 40, b"0\r\n\r\n") == [413]
