"""Two ServeCores that share sessions out, and one engine that works for both."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import aiohttp

from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.errors import Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.public import EngineStatus, ReadyResponse
from parrot.protocol.serve_client import ServeClient
from tests.e2e.test_journal import begin, map_reduce, persistently

HOST = "127.0.0.1"
HANGS_S = 60
LEASE_S = 2
TOKENS, CALLS = 4096, 16


async def engine_of(core: Cluster) -> EngineStatus:
    """The engine as this ServeCore sees it, when it is there."""
    async with HttpClient(core.core_url, bearer_token=core.cluster_token) as http:
        answer = await persistently(http.request, "GET", "/ready")
    engines = ReadyResponse.model_validate(answer).engines
    assert engines is not None
    return engines[0]


async def metrics_of(url: str, token: str | None) -> str:
    headers = {"Authorization": f"Bearer {token}"}
    async with aiohttp.ClientSession(headers=headers) as http, http.get(f"{url}/metrics") as answer:
        return await answer.text()


@asynccontextmanager
async def two_shards() -> AsyncIterator[tuple[Cluster, Cluster]]:
    """The first has started the engine."""
    ports = [free_port(HOST, set())]
    ports.append(free_port(HOST, set(ports)))
    cores = [f"http://{HOST}:{port}" for port in ports]
    configs = [
        {
            "engine_heartbeat_timeout": LEASE_S,
            "port": port,
            "shards": {"index": index, "cores": cores},
        }
        for index, port in enumerate(ports)
    ]
    engine = {"engine_type": "sim", "heartbeat_interval": 0.2, "tasks_capacity": CALLS}
    engine |= {"instance": {"step_s": 0.01}, "tokens_capacity": TOKENS}
    engine |= {"shard_cores": [{"host": HOST, "port": ports[1]}]}
    with Cluster(configs[1], []) as second, Cluster(configs[0], [engine]) as first:
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
