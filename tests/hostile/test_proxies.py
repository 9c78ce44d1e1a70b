"""Requests through a proxy, and headers that no HTTP/1.1 client sends."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import pytest

from parrot.gateway.page.visitors import page_key
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from parrot.utils.config import ConfigError, parse_config
from tests.support.app_server import serve_app

TOKEN = "a-token"
FORWARDED = {"X-Forwarded-For": "6.6.6.6, 203.0.113.7, 127.0.0.1", "X-Forwarded-Proto": "https"}


@pytest.mark.parametrize("is_trusted", [True, False])
async def test_only_a_trusted_proxy_sets_the_address_and_tls(
    is_trusted: bool, tmp_path: Path
) -> None:
    path = tmp_path / "audit"
    proxies = ("127.0.0.0/8",) if is_trusted else ("10.0.0.0/8",)
    config = CoreConfig(cluster_token=TOKEN, audit_path=str(path), trusted_proxies=proxies)
    async with (
        serve_app(create_app(ServeCore(config))) as url,
        aiohttp.ClientSession(url) as http,
        http.post("/ui/api/enter", json={"key": page_key(TOKEN)}, headers=FORWARDED) as answer,
    ):
        assert answer.status == 200
        cookie = answer.headers["Set-Cookie"].lower()
    assert ("secure" in cookie) is is_trusted
    assert "httponly" in cookie
    (line,) = [json.loads(one) for one in path.read_text().splitlines()]
    # The client can forge all addresses before the last untrusted one.
    assert line["from"] == ("203.0.113.7" if is_trusted else "127.0.0.1")


@pytest.mark.parametrize("proxy", ["*", "proxy.internal", "10.0.0.0/99"])
def test_a_proxy_is_an_address_or_a_network(proxy: str) -> None:
    with pytest.raises(ConfigError, match="is not an address or a network"):
        parse_config(CoreConfig, {"trusted_proxies": [proxy]}, "core.json")


async def test_answers_of_the_page_are_not_stored_and_have_their_type() -> None:
    config = CoreConfig(cluster_token=TOKEN)
    async with serve_app(create_app(ServeCore(config))) as url, aiohttp.ClientSession(url) as http:
        async with http.post("/ui/api/enter", json={"key": page_key(TOKEN)}) as entered:
            cookie = {"Cookie": entered.headers["Set-Cookie"].partition(";")[0]}
            found = [entered]
        for path in ("me", "overview", "usage"):
            async with http.get(f"/ui/api/{path}", headers=cookie) as answer:
                assert answer.status == 200
                found.append(answer)
        async with http.get("/ui/api/me") as refused:
            assert refused.status == 401
            found.append(refused)
        for answer in found:
            assert answer.headers["Cache-Control"] == "no-store", answer.url
            assert answer.headers["X-Content-Type-Options"] == "nosniff", answer.url


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n", 200),
        (b"GET /health HTTP/1.0\r\n\r\n", 200),  # Some proxies send this as a health check.
        (b"GET /health HTTP/1.1\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n\r\n", 400),
        (b"GET /health HTTP/0.9\r\n\r\n", 400),
        (b"GET /health\r\n\r\n", 400),
        (b"GET /health HTTP/1.1\r\nHost: evillocalhost\r\n\r\n", 421),
    ],
)
async def test_a_request_of_http_1_1_has_one_host(head: bytes, status: int) -> None:
    async with serve_app(create_app(ServeCore(CoreConfig()))) as url:
        parts = urlsplit(url)
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        writer.write(head)
        async with asyncio.timeout(20):
            line = await reader.readline()
        writer.close()
    assert line.split()[1] == str(status).encode()
