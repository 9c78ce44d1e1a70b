"""Two ServeCores with one journal in PostgreSQL: the standby takes over when the active one
ends."""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import aiohttp
import pytest

from parrot import P
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.errors import NoEngine, Standby, Unavailable
from parrot.protocol.failover_client import client_of
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program
from tests.e2e.test_journal import HANGS_S, SIM, begin_reads, map_reduce
from tests.nemesis.link import Link
from tests.support.postgres import Server

TAKEOVER_S = 30.0  # For a busy machine. benchmark/serve/bench_takeover.py measures the real time.


@contextmanager
def two_cores(
    address: str, num_engines: int = 0, address_of_first: str | None = None
) -> Iterator[tuple[Cluster, Cluster]]:
    """Yield an active ServeCore and its standby."""
    core = {"journal": address, "engine_heartbeat_timeout": 10}
    port = free_port("127.0.0.1", set())
    engine = SIM | {"standby_cores": [{"host": "127.0.0.1", "port": port}]}
    with (
        Cluster(
            core=core | {"journal": address_of_first or address}, engines=[engine] * num_engines
        ) as first,
        Cluster(core=core | {"port": port}, engines=[]) as second,
    ):
        yield first, second


@asynccontextmanager
async def either(*cores: Cluster) -> AsyncIterator[ServeClient]:
    client = ServeClient(client_of([core.core_url for core in cores]))
    yield client
    await client.close()


async def ask(url: str, method: str = "GET") -> tuple[int, Any, str | None]:
    async with aiohttp.ClientSession() as session, session.request(method, url, json={}) as answer:
        return answer.status, await answer.json(), answer.headers.get("retry-after")


async def role(core: Cluster) -> str:
    """Return `serves` or `standby` as soon as the ServeCore answers."""
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
    """Wait until the ServeCore is active."""
    async with asyncio.timeout(60):
        while await role(core) != "serves":
            await asyncio.sleep(0.02)


async def assert_rejects_all_requests_except_health(standby: Cluster) -> None:
    assert (await ask(f"{standby.core_url}/health"))[0] == 200
    for method, path in {
        "GET": "/ready",
        "POST": "/v1/session",
        "DELETE": "/v1/session/1",
        "PATCH": "/no/such/path",
    }.items():
        status, body, retry_after = await ask(f"{standby.core_url}{path}", method)
        assert (status, body["error"]["type"], retry_after) == (503, "standby", "1")
    # The error has the format of the vendor.
    _, body, _ = await ask(f"{standby.core_url}/v1/messages", "POST")
    assert body["type"] == "error"


async def assert_does_not_report_sessions_as_ended(stale: Cluster, serving: Cluster) -> None:
    """A former active ServeCore must not report sessions of its successor as ended."""
    async with HttpClient(serving.core_url) as http:
        client = ServeClient(http)
        created = await client.create_session()
        scope = created.session_id, created.session_auth
        var_id = await client.create_var(*scope, "v", "text")
    async with HttpClient(stale.core_url) as http:
        with pytest.raises(Standby):
            await ServeClient(http).read_var(*scope, var_id)


async def test_a_standby_waits_and_takes_over_from_one_that_is_stopped(postgres: Server) -> None:
    with two_cores(postgres.database()) as (first, second):
        await serving(first)
        await assert_rejects_all_requests_except_health(second)
        _, ready, _ = await ask(f"{first.core_url}/ready")
        assert ready["error"]["type"] == "no_engine"
        async with HttpClient(first.core_url) as http:
            client = ServeClient(http)
            created = await client.create_session()
            program = Program(client, created.session_id, created.session_auth)
            var_id = await client.create_var(program.session_id, program.session_auth, "v", "text")
        async with HttpClient(second.core_url) as http:
            client = ServeClient(http)
            with pytest.raises(Standby):
                await client.create_session()
            await asyncio.to_thread(first.process("core").stop)
            async with asyncio.timeout(TAKEOVER_S):
                await serving(second)
            program = Program(client, created.session_id, created.session_auth)
            assert await program.get(var_id) == "text"
            first.restart("core")
            assert await role(first) == "standby"


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_takeover_does_not_change_the_result_of_a_program(
    signum: signal.Signals, postgres: Server
) -> None:
    with two_cores(postgres.database(), 2) as (first, second):
        async with either(first, second) as client, either(first) as stale:
            expected, session, reads = await begin_reads(client)
            var_ids = list(reads)
            seen = {var_ids[0]: await reads[var_ids[0]]}
            os.killpg(first.process("core").pid, signum)
            late = asyncio.create_task(
                Program(stale, session.session_id, session.session_auth).call("Too late: {{out}}")
            )
            async with asyncio.timeout(TAKEOVER_S):
                await serving(second)
            async with asyncio.timeout(HANGS_S):
                assert await asyncio.gather(*reads.values()) == expected
                if signum == signal.SIGSTOP:
                    os.killpg(first.process("core").pid, signal.SIGCONT)
                with pytest.raises(Unavailable):  # it must not be acknowledged
                    await late
                for var_id, text in seen.items():
                    assert await session.get(var_id) == text
                assert await map_reduce(session) == var_ids  # no call was submitted twice
                info = await client.session_info(session.session_id, session.session_auth)
                assert [call.state for call in info.calls] == ["done"] * len(var_ids)
            if signum == signal.SIGSTOP:
                assert await role(first) == "standby"


async def test_a_servecore_that_loses_the_database_becomes_a_standby(postgres: Server) -> None:
    address = postgres.database()
    async with Link(postgres.port) as link:
        through = address.replace(f":{postgres.port}/", f":{link.port}/")
        with contextlib.ExitStack() as stack:
            first, second = await asyncio.to_thread(
                stack.enter_context, two_cores(address, 1, through)
            )
            async with either(first, second) as client:
                expected, session, reads = await begin_reads(client)
                var_ids = list(reads)
                link.stall()
                async with asyncio.timeout(HANGS_S):
                    await serving(second)
                    await assert_does_not_report_sessions_as_ended(first, second)
                    assert await asyncio.gather(*reads.values()) == expected
                    while await role(first) != "standby":
                        await asyncio.sleep(0.05)
                link.heal()
                assert await map_reduce(session) == var_ids
                assert [await session.get(v) for v in var_ids] == expected
                assert await role(first) == "standby"


@P.semantic_function()
def say(word: P.Input, out: P.Output(P.SamplingConfig(max_gen_length=40))):
    """Say {{word}}: {{out}}"""


def test_a_program_of_the_front_end_survives_a_takeover(postgres: Server) -> None:
    with two_cores(postgres.database(), 1) as (first, second):
        vm = P.VirtualMachine(f"{first.core_url},{second.core_url}/v1")
        with vm.running_scope():
            before = say("x").get()
            waiting = say("y")
            first.kill("core")
            assert say("x").get() == before
            assert waiting.get()
