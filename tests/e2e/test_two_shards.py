"""Two ServeCores as shards, which divide the sessions and have separate engines."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from parrot import P
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.errors import Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.serve_client import ServeClient
from tests.e2e.test_journal import begin, map_reduce, persistently
from tests.e2e.test_rolling_restart import join, restart, tell

HOST = "127.0.0.1"
HANGS_S = 60
LEASE_S = 2


@asynccontextmanager
async def two_shards(folder: Path | None = None) -> AsyncIterator[tuple[Cluster, Cluster]]:
    """Run two shards with two engines each. `folder` is the folder of their journals."""
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
    engine = {"engine_type": "sim", "heartbeat_interval": 0.2, "drain_timeout": HANGS_S}
    engine |= {"instance": {"step_s": 0.01}}
    with Cluster(configs[0], [engine] * 2) as first, Cluster(configs[1], [engine] * 2) as second:
        yield first, second


async def test_the_end_of_a_shard_does_not_affect_programs_of_the_other() -> None:
    async with (
        two_shards() as (first, second),
        HttpClient(first.core_url) as there,
        HttpClient(second.core_url) as here,
        asyncio.timeout(HANGS_S),
    ):
        undisturbed = await begin(ServeClient(here))
        expected = [await undisturbed.get(v) for v in await map_reduce(undisturbed)]
        doomed, living = await begin(ServeClient(there)), await begin(ServeClient(here))
        lost = [asyncio.create_task(doomed.get(v)) for v in await map_reduce(doomed)]
        reads = [asyncio.create_task(living.get(v)) for v in await map_reduce(living)]
        await reads[0]
        first.kill("core")
        assert await asyncio.gather(*reads) == expected
        for read in lost:
            with suppress(Unavailable):  # reads that had ended succeed
                await read
        first.restart("core")
        again = await persistently(begin, ServeClient(there))
        assert [await persistently(again.get, v) for v in await map_reduce(again)] == expected
        info = await living.client.session_info(living.session_id, living.session_auth)
        assert {call.state for call in info.calls} == {"done"}


async def test_no_read_fails_while_all_servers_are_restarted_in_turn(
    tmp_path: Path,
) -> None:
    over, answers = threading.Event(), ([], [])

    def program(url: str, found: list[str]) -> None:
        vm = P.VirtualMachine(url, restart_timeout_s=HANGS_S)

        def main() -> None:
            while not over.is_set():
                found.append(join([tell(f"parrot {number}") for number in range(4)]).get())

        vm.run(main)

    async with two_shards(tmp_path) as shards, asyncio.timeout(3 * HANGS_S):
        first, second = shards
        running = [
            asyncio.create_task(asyncio.to_thread(program, shard.core_url, found))
            for shard, found in zip(shards, answers, strict=True)
        ]
        try:
            turns = [(first, "engine-0"), (second, "core"), (first, "core"), (first, "engine-1")]
            for shard, name in turns:
                counts = [len(found) for found in answers]
                while any(len(t) < n + 2 for t, n in zip(answers, counts, strict=True)):
                    assert not any(task.done() for task in running)
                    await asyncio.sleep(0.01)
                await asyncio.to_thread(restart, shard, name)
        finally:
            over.set()
        await asyncio.gather(*running)
    assert len({answer for found in answers for answer in found}) == 1
