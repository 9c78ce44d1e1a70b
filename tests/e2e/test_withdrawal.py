"""When the last reader of a call disconnects, cancels or times out, the engine stops its work
within one step and frees its memory. Real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_api import RuntimeInfo
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import Cancelled, SessionGone, TimedOut
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program, program

# A step takes much longer than a request, even on a busy machine. An abort that arrives during a
# step, or just before it, takes effect after the step.
STEP_S = 0.15
SLOW_SIM = {"engine_type": "sim", "instance": {"step_s": STEP_S}}
MAX_STEPS = 2
ENDLESS = 2000


@pytest.fixture(scope="module")
def slow_cluster() -> Iterator[Cluster]:
    with Cluster(engines=[SLOW_SIM]) as cluster:
        yield cluster


@pytest.fixture
async def engine(slow_cluster: Cluster) -> AsyncIterator[EngineClient]:
    async with HttpClient(
        slow_cluster.url(slow_cluster.engine_names[0]), bearer_token=slow_cluster.cluster_token
    ) as http:
        yield EngineClient(http)


@pytest.fixture
async def session(slow_cluster: Cluster) -> AsyncIterator[Program]:
    async with HttpClient(slow_cluster.core_url) as http, program(ServeClient(http)) as session:
        yield session


async def until_running(engine: EngineClient, num_jobs: int) -> RuntimeInfo:
    """Wait until the engine has `num_jobs` jobs, and return its state."""
    async with asyncio.timeout(60):
        while (info := await engine.ping()).num_total_jobs != num_jobs:
            await asyncio.sleep(0.005)
    return info


async def endless(session: Program, text: str = "Go on") -> str:
    return await session.call(f"{text}: {{{{out}}}}", ENDLESS, cache_prefix=False)


async def assert_stops(engine: EngineClient, *, all_is_free: bool = True) -> None:
    """Check that the engine stops its work, and with `all_is_free` also frees all memory."""
    before = await engine.ping()
    after = await until_running(engine, 0)
    assert after.num_steps - before.num_steps <= MAX_STEPS
    if all_is_free:
        await until_all_is_free(engine)


async def until_all_is_free(engine: EngineClient) -> None:
    async with asyncio.timeout(60):
        while (info := await engine.ping()).num_free_blocks < info.num_max_blocks:
            await asyncio.sleep(0.005)


async def test_a_reader_that_disconnects(session: Program, engine: EngineClient) -> None:
    read = asyncio.create_task(session.get(await endless(session), timeout_s=None))
    await until_running(engine, 1)
    read.cancel()
    await asyncio.gather(read, return_exceptions=True)
    await assert_stops(engine)


async def test_a_stream_that_is_abandoned(session: Program, engine: EngineClient) -> None:
    async with program(session.client) as own:
        stream = own.stream(await endless(own))
        assert await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]
        await assert_stops(engine, all_is_free=False)  # kept in case the reader comes back
    await until_all_is_free(engine)


async def test_a_read_that_timed_out(session: Program, engine: EngineClient) -> None:
    with pytest.raises(TimedOut):
        await session.get(await endless(session), timeout_s=0.3)
    await until_running(engine, 0)  # after the grace period for a repeated read
    await until_all_is_free(engine)


async def test_a_cancelled_variable_stops_its_producers_and_consumers(
    session: Program, engine: EngineClient
) -> None:
    first = await endless(session)
    second = await session.call("Then {{x}} {{out}}", variables={"x": first})
    read = asyncio.create_task(session.get(second, timeout_s=None))
    await until_running(engine, 1)
    await session.cancel(second)  # the only consumer of the first
    with pytest.raises(Cancelled):
        await read
    await assert_stops(engine)
    read = asyncio.create_task(session.get(first, timeout_s=None))
    await until_running(engine, 1)
    await session.cancel(first)
    with pytest.raises(Cancelled):
        await read
    await assert_stops(engine)


async def test_the_end_of_a_session(slow_cluster: Cluster, engine: EngineClient) -> None:
    async with HttpClient(slow_cluster.core_url) as http:
        client = ServeClient(http)
        created = await client.create_session()
        doomed = Program(client, created.session_id, created.session_auth)
        reads = [
            asyncio.create_task(doomed.get(await endless(doomed, f"Call {n}"), timeout_s=None))
            for n in range(3)
        ]
        await until_running(engine, 3)
        await client.delete_session(doomed.session_id, doomed.session_auth)
        results = await asyncio.gather(*reads, return_exceptions=True)
        assert [type(result) for result in results] == [SessionGone] * 3
        await assert_stops(engine)


async def test_the_losers_of_a_race(session: Program, engine: EngineClient) -> None:
    client, scope = session.client, (session.session_id, session.session_auth)
    losers = [await endless(session, f"Loser {n}") for n in range(4)]
    winners = [await session.call(f"Winner {n}: {{{{out}}}}", n + 3) for n in range(2)]
    race = asyncio.create_task(client.first_vars(*scope, [*losers, *winners], k=2))
    await until_running(engine, 6)
    assert [value.var_id for value in await race] == winners
    before = await engine.ping()
    after = await until_running(engine, 0)
    assert after.num_steps - before.num_steps <= MAX_STEPS


async def test_a_shared_run_continues_while_it_has_a_reader(
    session: Program, engine: EngineClient
) -> None:
    var_ids = [await session.call("Same {{out}}", ENDLESS, reuse=True) for _ in range(3)]
    reads = [asyncio.create_task(session.get(v, timeout_s=None)) for v in var_ids]
    first = await until_running(engine, 1)
    for read in reads[:2]:
        read.cancel()
    await asyncio.gather(*reads[:2], return_exceptions=True)
    while (later := await engine.ping()).num_steps < first.num_steps + 3:
        await asyncio.sleep(STEP_S)
    assert later.num_total_jobs == 1
    reads[2].cancel()
    await asyncio.gather(reads[2], return_exceptions=True)
    before = await engine.ping()
    after = await until_running(engine, 0)
    assert after.num_steps - before.num_steps <= MAX_STEPS
