"""Servers die, hang and restart. Every read still ends with a value or an error."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import NoEngine, NotFound, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program, program

SLOW_SIM = {"engine_type": "sim", "heartbeat_interval": 0.3, "instance": {"step_s": 0.02}}
CORE = {"engine_heartbeat_timeout": 3}
NUM_READS = 6
NUM_TOKENS = 100  # 2 s of generation
HANGS_S = 60  # An operation that takes longer counts as hung.
PROMPT_S = 3 + 2 * 2 + 15  # The heartbeat timeout, two generations, and 15 s for a slow machine.


@pytest.fixture
def two_engines() -> Iterator[Cluster]:
    with Cluster(core=CORE, engines=[SLOW_SIM] * 2) as cluster:
        yield cluster


@pytest.fixture
def one_engine() -> Iterator[Cluster]:
    with Cluster(core=CORE, engines=[SLOW_SIM]) as cluster:
        yield cluster


@asynccontextmanager
async def connect(cluster: Cluster) -> AsyncIterator[Program]:
    async with HttpClient(cluster.core_url) as http, program(ServeClient(http)) as session:
        yield session


async def start_reads(session: Program) -> list[asyncio.Task[str]]:
    reads = []
    for number in range(NUM_READS):
        var_id = await session.call(f"Count from {number}: {{{{out}}}}", NUM_TOKENS)
        reads.append(asyncio.create_task(session.get(var_id, timeout_s=None)))
    return reads


async def engine_of_a_running_call(session: Program) -> str:
    """Return an engine that runs a call of the session, as soon as there is one."""
    while True:
        info = await session.client.session_info(session.session_id, session.session_auth)
        for call in info.calls:
            if call.state == "running" and call.engine is not None:
                return call.engine
        await asyncio.sleep(0.05)


async def assert_engine_is_empty(cluster: Cluster, name: str) -> None:
    """Check that nothing runs on the engine, and that only cached blocks are used."""
    async with (
        HttpClient(cluster.url(name), bearer_token=cluster.cluster_token) as http,
        asyncio.timeout(HANGS_S),
    ):
        client = EngineClient(http)
        while (info := await client.ping()).num_total_jobs > 0:
            await asyncio.sleep(0.05)
    assert info.num_running_jobs == 0


async def test_a_stopping_cluster_finishes_calls_within_its_time_limit() -> None:
    with Cluster(core=CORE, engines=[SLOW_SIM | {"drain_timeout": 60}]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client = ServeClient(http)
            began = await client.create_session()
            session = Program(client, began.session_id, began.session_auth)
            reads = await start_reads(session)
            await engine_of_a_running_call(session)
            await asyncio.to_thread(cluster.stop)
            assert len({len(await read) for read in reads}) == 1


async def test_a_terminated_engine_finishes_its_calls_unless_signalled_twice() -> None:
    engine = SLOW_SIM | {"drain_timeout": 60}
    with Cluster(core=CORE, engines=[engine] * 2) as cluster:
        async with connect(cluster) as session:
            reads = await start_reads(session)
            leaver = await engine_of_a_running_call(session)
            process = cluster.process(leaver)
            process.terminate()
            assert len({len(await read) for read in reads}) == 1
            assert await asyncio.to_thread(process.wait, HANGS_S)
            assert process.exit_code == 0
            info = await session.client.session_info(session.session_id, session.session_auth)
            assert {call.attempts for call in info.calls} == {1}
            assert leaver in {call.engine for call in info.calls}
            (other,) = {*cluster.engine_names} - {leaver}
            endless = await session.call("Count: {{out}}", 10_000)
            read = asyncio.create_task(session.get(endless, timeout_s=None))
            await engine_of_a_running_call(session)
            process = cluster.process(other)
            process.terminate()
            assert not await asyncio.to_thread(process.wait, 0.5)
            process.terminate()
            assert await asyncio.to_thread(process.wait, HANGS_S)
            assert process.exit_code == 0
            read.cancel()


async def test_reads_get_their_values_after_an_engine_is_killed(two_engines: Cluster) -> None:
    async with connect(two_engines) as session:
        expected = [await read for read in await start_reads(session)]
    async with connect(two_engines) as session:
        reads = await start_reads(session)
        victim = await engine_of_a_running_call(session)
        await asyncio.sleep(0.5)
        two_engines.kill(victim)
        values = await asyncio.wait_for(asyncio.gather(*reads), HANGS_S)
        info = await session.client.session_info(session.session_id, session.session_auth)
    assert values == expected
    # Restarted calls continued after the output that heartbeats had reported.
    sizes = {1: set[int](), 2: set[int]()}  # prompt lengths in tokens, by number of attempts
    for call in info.calls:
        sizes[call.attempts].add(call.cached_tokens + call.computed_tokens)
    assert max(sizes[2]) > max(sizes[1])
    survivor = next(name for name in two_engines.engine_names if name != victim)
    await assert_engine_is_empty(two_engines, survivor)


async def test_streamed_text_goes_on_after_a_kill_without_repetition(two_engines: Cluster) -> None:
    async with connect(two_engines) as session:
        var_id = await session.call("Tell a story: {{out}}", NUM_TOKENS)
        expected = await session.get(var_id)
    async with connect(two_engines) as session:
        var_id = await session.call("Tell a story: {{out}}", NUM_TOKENS)
        deltas: list[str] = []
        async for delta in session.stream(var_id):
            deltas.append(delta)
            if len(deltas) == 10:
                two_engines.kill(await engine_of_a_running_call(session))
        assert len(deltas) > 10
        assert "".join(deltas) == expected
        assert await session.get(var_id) == expected


async def test_without_a_second_engine_every_read_ends_with_503(one_engine: Cluster) -> None:
    async with connect(one_engine) as session:
        reads = await start_reads(session)
        victim = await engine_of_a_running_call(session)
        one_engine.kill(victim)
        results = await asyncio.wait_for(asyncio.gather(*reads, return_exceptions=True), HANGS_S)
        assert all(isinstance(result, NoEngine) for result in results), results
        late = await session.call("Too late? {{out}}")
        with pytest.raises(NoEngine):
            await asyncio.wait_for(session.get(late, timeout_s=None), HANGS_S)
        one_engine.restart(victim)
        await asyncio.to_thread(one_engine.wait_ready)
        again = await session.call("And now? {{out}}")
        assert await session.get(again)


async def test_a_hung_engine_is_replaced_and_may_rejoin(two_engines: Cluster) -> None:
    async with connect(two_engines) as session:
        reads = await start_reads(session)
        victim = await engine_of_a_running_call(session)
        pid = two_engines.process(victim).pid
        os.kill(pid, signal.SIGSTOP)
        try:
            values = await asyncio.wait_for(asyncio.gather(*reads), PROMPT_S)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert all(values)
        await asyncio.to_thread(two_engines.wait_ready)
        assert await session.get(await session.call("Still there? {{out}}"))
        for name in two_engines.engine_names:
            await assert_engine_is_empty(two_engines, name)


async def test_engines_register_with_a_restarted_servecore(one_engine: Cluster) -> None:
    async with HttpClient(one_engine.core_url) as http:
        client = ServeClient(http)
        created = await client.create_session()
        session = Program(client, created.session_id, created.session_auth)
        var_id = await session.call("Who reads this? {{out}}", NUM_TOKENS)
        read = asyncio.create_task(session.get(var_id, timeout_s=None))
        await engine_of_a_running_call(session)
        one_engine.kill("core")
        with pytest.raises(Unavailable):
            await asyncio.wait_for(read, HANGS_S)
        one_engine.restart("core")
        await asyncio.to_thread(one_engine.wait_ready)
        async with program(client) as fresh:
            assert fresh.session_id != session.session_id
            with pytest.raises(NotFound):
                await session.get(var_id)
            assert await fresh.get(await fresh.call("Hello again: {{out}}"))
        # The engine ends the calls of the dead ServeCore.
        await assert_engine_is_empty(one_engine, one_engine.engine_names[0])
