"""The HTTP client of programs, in addition to the tests of all transports."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import pytest
from fastapi import FastAPI, Request
from starlette.responses import StreamingResponse

from parrot.protocol.errors import Unavailable
from parrot.protocol.program_client import ProgramClient
from tests.support.app_server import serve_app


@pytest.fixture
async def client() -> AsyncIterator[ProgramClient]:
    app = FastAPI()

    @app.get("/events")
    async def events(pause_s: float = 0.0) -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            yield "event: delta\ndata: 1\n\n"
            await asyncio.sleep(pause_s)
            yield "event: done\ndata: 2\n\n"
            await asyncio.sleep(0.05)

        return StreamingResponse(body(), media_type="text/event-stream")

    @app.api_route("/echo/{rest}", methods=["GET", "DELETE"])
    async def echo(request: Request, rest: str) -> dict[str, Any]:
        query = dict(request.query_params)
        return {"method": request.method, "path": rest, "query": query, "client": request.client}

    async with serve_app(app) as url:
        client = ProgramClient(f"{url}/")
        yield client
        await client.close()


async def test_a_stream_leaves_its_connection_to_the_next_request(client: ProgramClient) -> None:
    before = await client.request("GET", "/echo/a")
    async with aclosing(client.stream("GET", "/events")) as events:
        async for name, _ in events:
            if name == "done":
                break
    await asyncio.sleep(0.1)  # The end of the body follows the last event.
    assert await client.request("GET", "/echo/a") == before


async def test_paths_and_queries_are_quoted(client: ProgramClient) -> None:
    path, query = "a b\r\nX-Own: é%2F?#", {"a": "1&b=2\r\n", "é": "#"}
    answer = await client.request("DELETE", f"/echo/{path}", params=query)
    assert (answer["method"], answer["path"], answer["query"]) == ("DELETE", path, query)


async def test_a_stream_fails_without_data(client: ProgramClient) -> None:
    stream = client.stream("GET", "/events", params={"pause_s": "30"}, idle_timeout_s=0.2)
    assert await anext(stream) == ("delta", b" 1")
    with pytest.raises(Unavailable, match=r"no data for 0\.2 s"):
        await anext(stream)
