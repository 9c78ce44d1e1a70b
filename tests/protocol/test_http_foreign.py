"""Features of the HTTP client for servers other than Parrot's."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from fastapi import FastAPI, Request, Response

from parrot.protocol.errors import ParrotError, QuotaExceeded, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.transport import Unreachable
from tests.support.app_server import serve_app

EVENTS = b': hi\r\n\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata: two\n\ndata: [DONE]\n\n'


def make_app() -> FastAPI:
    app = FastAPI()

    @app.get("/events")
    async def events() -> Response:
        return Response(EVENTS, media_type="text/event-stream")

    @app.get("/headers")
    async def headers(request: Request) -> dict[str, str]:
        return dict(request.headers)

    @app.get("/busy")
    async def busy() -> Response:
        return Response("slow down", status_code=429, headers={"Retry-After": "7"})

    return app


async def test_events_that_are_not_json_and_crlf_line_ends() -> None:
    async with serve_app(make_app()) as url, HttpClient(url) as http:
        events = [event async for event in http.stream("GET", "/events")]
    assert events == [("message", b' {"a": 1}'), ("x", b" two"), ("message", b" [DONE]")]


async def test_configured_headers_are_sent_with_every_request() -> None:
    async with (
        serve_app(make_app()) as url,
        HttpClient(url, bearer_token="sesame", headers={"X-Own": "1"}) as http,
    ):
        seen = await http.request("GET", "/headers")
    assert seen["x-own"] == "1"
    assert seen["authorization"] == "Bearer sesame"


async def test_errors_are_read_with_status_body_and_headers() -> None:
    def read_error(payload: Any, status: int, headers: Mapping[str, str]) -> ParrotError:
        return QuotaExceeded(f"{payload} {status} {headers['retry-after']}")

    async with serve_app(make_app()) as url, HttpClient(url, read_error=read_error) as http:
        with pytest.raises(QuotaExceeded, match="None 429 7"):
            await http.request("GET", "/busy")
        with pytest.raises(QuotaExceeded, match="None 429 7"):
            await anext(http.stream("GET", "/busy"))


async def test_a_missing_server_differs_from_a_broken_connection() -> None:
    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.close()

    server = await asyncio.start_server(hang_up, "127.0.0.1")
    port = server.sockets[0].getsockname()[1]
    async with HttpClient(f"http://127.0.0.1:{port}") as http:
        with pytest.raises(Unavailable) as broken:
            await http.request("POST", "/")
        server.close()
        await server.wait_closed()
        with pytest.raises(Unreachable):
            await http.request("POST", "/")
    assert type(broken.value) is Unavailable
