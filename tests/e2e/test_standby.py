"""Two ServeCores with one journal in PostgreSQL: one serves, and the other when that is gone."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from parrot.protocol.errors import NoEngine, Standby, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program
from tests.support.postgres import Server

TAKEOVER_S = 5.0


@contextmanager
def two_cores(address: str) -> Iterator[tuple[Cluster, Cluster]]:
    """The one that serves, and its standby."""
    core = {"journal": address}
    with Cluster(core=core, engines=[]) as first, Cluster(core=core, engines=[]) as second:
        yield first, second


async def ask(url: str, method: str = "GET") -> tuple[int, Any, str | None]:
    async with aiohttp.ClientSession() as session, session.request(method, url, json={}) as answer:
        return answer.status, await answer.json(), answer.headers.get("retry-after")


async def role(core: Cluster) -> str:
    """Whether it `serves` or is a `standby`, when it answers."""
    async with HttpClient(core.core_url) as http, asyncio.timeout(60):
        while True:
            try:
                await http.request("GET", "/ready")
                return "serves"
            except NoEngine:
                return "serves"
            except Standby:
                return "standby"
            except Unavailable:
                await asyncio.sleep(0.02)


async def serving(core: Cluster) -> None:
    """Return when it is its turn."""
    async with asyncio.timeout(60):
        while await role(core) != "serves":
            await asyncio.sleep(0.02)


async def test_a_standby_tells_its_health_and_refuses_all_else(postgres: Server) -> None:
    with two_cores(postgres.database()) as (first, second):
        await serving(first)
        assert (await ask(f"{second.core_url}/health"))[0] == 200
        for method, path in {
            "GET": "/ready",
            "POST": "/v1/session",
            "DELETE": "/v1/session/1",
            "PATCH": "/no/such/path",
        }.items():
            status, body, retry_after = await ask(f"{second.core_url}{path}", method)
            assert (status, body["error"]["type"], retry_after) == (503, "standby", "1")
        _, ready, _ = await ask(f"{first.core_url}/ready")
        assert ready["error"]["type"] == "no_engine"
        # As the clients of others expect errors to look.
        _, body, _ = await ask(f"{second.core_url}/v1/messages", "POST")
        assert body["type"] == "error"


@pytest.mark.parametrize("how", ["killed", "stopped"])
async def test_a_standby_takes_over(how: str, postgres: Server) -> None:
    loop = asyncio.get_running_loop()
    with two_cores(postgres.database()) as (first, second):
        await serving(first)
        async with HttpClient(first.core_url) as http:
            client = ServeClient(http)
            created = await client.create_session()
            program = Program(client, created.session_id, created.session_auth)
            var_id = await client.create_var(program.session_id, program.session_auth, "v", "text")
        async with HttpClient(second.core_url) as http:
            client = ServeClient(http)
            with pytest.raises(Standby):
                await client.create_session()
            start = loop.time()
            if how == "killed":
                first.kill("core")
            else:
                await asyncio.to_thread(first.process("core").stop)
            await serving(second)
            limit_s = TAKEOVER_S if how == "killed" else 2.0
            assert loop.time() - start < limit_s
            program = Program(client, created.session_id, created.session_auth)
            assert await program.get(var_id) == "text"
            first.restart("core")
            assert await role(first) == "standby"
