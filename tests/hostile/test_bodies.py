"""A large body is not read if the request has no credential in its header."""

import asyncio
import io
import time
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.server.app import create_app
from tests.support.app_server import serve_app

JSON = {"Content-Type": "application/json"}
MANY_FIELDS = b'{"a0": 0' + b"".join(b', "a%d": 0' % n for n in range(1, 50_000)) + b"}"
NESTED = b'{"parameters": [' + b"[" * 400 + b"]" * 400 + b", 0" * 1_000_000 + b"]}"
LARGE_ROUTES = [
    ("POST", "/v1/semantic_call"),
    ("POST", "/v1/py_native_call"),
    ("POST", "/v1/semantic_graph"),
    ("POST", "/v1/semantic_var"),
    ("POST", "/v1/semantic_var/v"),
    ("POST", "/v1/semantic_vars/first"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/embeddings"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
]
SMALL_ROUTES = [
    ("POST", "/v1/session"),
    ("DELETE", "/v1/session/1"),
    ("GET", "/v1/session/1"),
    ("GET", "/v1/sessions"),
    ("GET", "/v1/semantic_var/v"),
    ("GET", "/v1/semantic_var/v/stream"),
    ("POST", "/v1/semantic_var/v/cancel"),
    ("POST", "/v1/request/1/cancel"),
]


@pytest.fixture
async def url() -> AsyncIterator[str]:
    core = ServeCore(CoreConfig(api_keys=("key",), cluster_token="token"))
    async with serve_app(create_app(core)) as url:
        yield url
    core.check_integrity()


async def send(
    url: str, method: str, path: str, body: Any, token: str | None = None
) -> tuple[int, str]:
    headers = JSON | ({} if token is None else {"Authorization": f"Bearer {token}"})
    async with (
        aiohttp.ClientSession(url, headers=headers) as http,
        http.request(
            method, path, data=io.BytesIO(body) if isinstance(body, bytes) else body
        ) as response,
    ):
        return response.status, await response.text()


async def pieces(raw: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(raw), 2**16):
        yield raw[start : start + 2**16]


@pytest.mark.parametrize("is_declared", [True, False])
@pytest.mark.parametrize(("method", "path"), LARGE_ROUTES)
async def test_a_large_body_without_a_credential_is_not_read(
    url: str, method: str, path: str, is_declared: bool
) -> None:
    for token in (None, "wrong", "token"):
        body = NESTED if is_declared else pieces(NESTED)
        status, text = await send(url, method, path, body, token)
        assert status == 401, text


@pytest.mark.parametrize(("method", "path"), SMALL_ROUTES)
async def test_routes_for_small_requests_limit_bodies(url: str, method: str, path: str) -> None:
    for token in (None, "key"):
        status, text = await send(url, method, path, b" " * 70_000, token)
        assert status == 413, text


@pytest.mark.parametrize(("method", "path"), LARGE_ROUTES)
async def test_fields_are_counted_before_they_are_parsed(url: str, method: str, path: str) -> None:
    status, text = await send(url, method, path, MANY_FIELDS, "key")
    assert status == 400
    assert "more than 64 fields" in text


async def test_large_requests_of_our_clients_are_accepted(url: str) -> None:
    content = "x" * 3_000_000
    async with HttpClient(url) as http:
        client = ServeClient(http)
        made = await client.create_session("key")
        var_id = await client.create_var(made.session_id, made.session_auth, "x", content)
        assert await client.get_var(made.session_id, made.session_auth, var_id) == content
        empty = await client.create_var(made.session_id, made.session_auth, "y")
        await client.set_var(made.session_id, made.session_auth, empty, content)
    raw = b'{"session_id": %d, "var_name": "z", "content": "%s"}' % (
        made.session_id,
        content.encode(),
    )
    path = f"/v1/semantic_var?session_auth={made.session_auth}"
    assert (await send(url, "POST", path, raw))[0] == 200


async def test_other_requests_are_answered_during_an_attack(url: str) -> None:
    """None of many such requests may block the event loop for long."""
    attack = [
        asyncio.create_task(send(url, "POST", path, NESTED)) for _, path in LARGE_ROUTES[:4] * 4
    ]
    slowest = 0.0
    while not all(task.done() for task in attack):
        start = time.monotonic()
        assert (await send(url, "GET", "/health", None))[0] == 200
        slowest = max(slowest, time.monotonic() - start)
    assert slowest < 5  # seconds: generous, because the machine may be busy
    assert {(await task)[0] for task in attack} == {401}
