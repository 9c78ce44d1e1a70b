"""Two ServeCores that share sessions out, and engines that work for both."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import aiohttp

from parrot import P
from parrot.cli.watch.page_feed import PageFeed
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.errors import Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.public import EngineStatus, ReadyResponse
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program
from tests.e2e.test_journal import begin, map_reduce, persistently
from tests.e2e.test_rolling_restart import join, restart, tell

HOST = "127.0.0.1"
HANGS_S = 60
LEASE_S = 2
TOKENS, CALLS = 4096, 16


async def engines_of(core: Cluster) -> list[EngineStatus]:
    """The engines as this ServeCore sees them, when there are any."""
    async with HttpClient(core.core_url, bearer_token=core.cluster_token) as http:
        answer = await persistently(http.request, "GET", "/ready")
    engines = ReadyResponse.model_validate(answer).engines
    assert engines is not None
    return engines


async def engine_of(core: Cluster) -> EngineStatus:
    return (await engines_of(core))[0]


async def metrics_of(url: str, token: str | None) -> str:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/metrics") as answer:
        return await answer.text()


@asynccontextmanager
async def two_shards(
    folder: Path | None = None, num_engines: int = 1
) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """The first has started the engines. `folder`: of their journals."""
    ports = [free_port(HOST, set())]
    ports.append(free_port(HOST, set(ports)))
    cores = [f"http://{HOST}:{port}" for port in ports]
    configs = [
        {
            "engine_heartbeat_timeout": LEASE_S,
            "port": port,
            "shards": {"index": index, "cores": cores},
            "journal": None if folder is None else str(folder / f"journal-{index}"),
        }
        for index, port in enumerate(ports)
    ]
    engine = {"engine_type": "sim", "heartbeat_interval": 0.2, "tasks_capacity": CALLS}
    engine |= {"drain_timeout": HANGS_S}
    engine |= {"instance": {"step_s": 0.01}, "tokens_capacity": TOKENS}
    engine |= {"shard_cores": [{"host": HOST, "port": ports[1]}]}
    with Cluster(configs[1], []) as second, Cluster(configs[0], [engine] * num_engines) as first:
        yield first, second


async def test_programs_of_both_run_and_the_end_of_one_is_not_the_others() -> None:
    async with (
        two_shards() as (first, second),
        HttpClient(first.core_url) as there,
        HttpClient(second.core_url) as here,
        asyncio.timeout(HANGS_S),
    ):
        registered = (await engine_of(second)).engine_id
        undisturbed = await begin(ServeClient(here))
        expected = [await undisturbed.get(v) for v in await map_reduce(undisturbed)]
        doomed, living = await begin(ServeClient(there)), await begin(ServeClient(here))
        lost = [asyncio.create_task(doomed.get(v)) for v in await map_reduce(doomed)]
        reads = [asyncio.create_task(living.get(v)) for v in await map_reduce(living)]
        await reads[0]
        parts = [await engine_of(core) for core in (first, second)]
        assert 0 < sum(part.tokens_capacity for part in parts) <= TOKENS
        assert 0 < sum(part.tasks_capacity for part in parts) <= CALLS
        first.kill("core")
        assert await asyncio.gather(*reads) == expected
        while (await engine_of(second)).tokens_capacity < TOKENS:
            await asyncio.sleep(0.05)
        assert (await engine_of(second)).tasks_capacity == CALLS
        for read in lost:
            with suppress(Unavailable):  # some had ended
                await read
        first.restart("core")
        await engine_of(first)
        again = await begin(ServeClient(there))
        assert [await again.get(v) for v in await map_reduce(again)] == expected
        while (engine := await engine_of(second)).tokens_capacity > TOKENS * 3 // 4:
            await asyncio.sleep(0.05)  # the first has a part again
        assert engine.engine_id == registered
        page = await metrics_of(first.url("engine-0"), first.cluster_token)
        assert (
            'parrot_engine_requests_beyond_lease_total{engine="engine-0",model_name="sim"} 0'
            in page
        )
        info = await living.client.session_info(living.session_id, living.session_auth)
        assert {call.state for call in info.calls} == {"done"}


async def test_no_read_of_either_fails_while_every_server_is_restarted_in_turn(
    tmp_path: Path,
) -> None:
    over, answers = threading.Event(), ([], [])

    def program(url: str, told: list[str]) -> None:
        vm = P.VirtualMachine(url, restart_timeout_s=HANGS_S)

        def main() -> None:
            while not over.is_set():
                told.append(join([tell(f"parrot {number}") for number in range(4)]).get())

        vm.run(main)

    async with two_shards(tmp_path, num_engines=2) as shards, asyncio.timeout(3 * HANGS_S):
        first, second = shards
        running = [
            asyncio.create_task(asyncio.to_thread(program, shard.core_url, told))
            for shard, told in zip(shards, answers, strict=True)
        ]
        try:
            turns = [(first, "engine-0"), (second, "core"), (first, "core"), (first, "engine-1")]
            for shard, name in turns:
                counts = [len(told) for told in answers]
                while any(len(t) < n + 2 for t, n in zip(answers, counts, strict=True)):
                    assert not any(task.done() for task in running)
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(restart, shard, name)
        finally:
            over.set()
        await asyncio.gather(*running)
    assert len({answer for told in answers for answer in told}) == 1


async def test_an_engine_that_leaves_ends_the_calls_of_both_and_gets_none(tmp_path: Path) -> None:
    async with (
        two_shards(num_engines=2) as (first, second),
        HttpClient(first.core_url) as there,
        HttpClient(second.core_url) as here,
        asyncio.timeout(HANGS_S),
    ):
        for shard in (first, second):
            while len(await engines_of(shard)) < 2:
                await asyncio.sleep(0.01)
        sessions = [await begin(ServeClient(http)) for http in (there, here)]
        before: list[asyncio.Task[str]] = []
        for session in sessions:
            while "engine-0" not in (engines := await engines_of_calls(session)):
                if None not in engines:
                    var = await session.call(f"Tell {len(before)}: {{{{out}}}}", 300)
                    before.append(asyncio.create_task(session.get(var)))
                await asyncio.sleep(0.01)
        process = first.process("engine-0")
        process.terminate()
        while not all([await drains(shard, "engine-0") for shard in (first, second)]):
            await asyncio.sleep(0.01)
        assert not any(read.done() for read in before)
        after = [await session.call("And then: {{out}}", 20) for session in sessions]
        for session, var in zip(sessions, after, strict=True):
            assert await session.get(var)
        assert len({len(await read) for read in before}) == 1
        assert await asyncio.to_thread(process.wait, HANGS_S)
        assert process.exit_code == 0
        for session in sessions:
            info = await session.client.session_info(session.session_id, session.session_auth)
            assert {call.attempts for call in info.calls} == {1}
            assert "engine-0" in {call.engine for call in info.calls}
            assert info.calls[-1].engine == "engine-1"


async def drains(shard: Cluster, name: str) -> bool:
    feed = PageFeed(shard.core_url, None, None)
    rows = (await asyncio.to_thread(feed.now, "overview")).values()
    return any(row["is_draining"] for row in rows if row.get("engine_name") == name)


async def engines_of_calls(session: Program) -> set[str | None]:
    """None for those that have none yet."""
    info = await session.client.session_info(session.session_id, session.session_auth)
    return {call.engine for call in info.calls}
