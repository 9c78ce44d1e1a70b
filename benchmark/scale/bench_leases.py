"""Two ServeCores that share a `sim` engine: how soon room goes from one to the other.

  python -m benchmark.scale.bench_leases

freed  milliseconds from the end of a call of one shard, which had all places, to the first token
       of the call that waits at the other
burst  milliseconds from the submit of as many calls as the engine has places, when nothing runs,
       to the first token of the last of them: the other shard has a part of the places, idle
"""

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient

PLACES = 4
STEP_S = 0.002
ENGINE = {
    "engine_type": "sim",
    "tasks_capacity": PLACES,
    "instance": {"step_s": STEP_S, "prefill_token_s": 0, "sequence_s": 0, "context_token_s": 0},
}
_HOST = "127.0.0.1"


class Program:
    """A session of one of the shards."""

    def __init__(self, client: ServeClient) -> None:
        self._client = client

    async def begin(self) -> None:
        session = await self._client.create_session()
        self._scope = (session.session_id, session.session_auth)

    async def call(self, seconds: float) -> tuple[float, float]:
        """Run one that takes so long; returns when its first token came, and when its last."""
        length = max(2, int(seconds / STEP_S))
        sampling = SamplingConfig(max_gen_length=length, ignore_tokenizer_eos=True)
        out = CallParameter(name="out", is_output=True, sampling_config=sampling)
        session_id, auth = self._scope
        request = SemanticCallRequest(
            session_id=session_id,
            session_auth=auth,
            template="Tell: {{out}}",
            parameters=[out],
            reuse=False,
        )
        answer = await self._client.semantic_call(request)
        var, first = answer.param_info[0].var_id, 0.0
        async for _ in self._client.stream_var(session_id, auth, var):
            first = first or time.perf_counter()
        return first, time.perf_counter()


@contextmanager
def two_shards() -> Iterator[list[Cluster]]:
    """The first has started the engine."""
    ports = [free_port(_HOST, set())]
    ports.append(free_port(_HOST, {*ports}))
    cores = [f"http://{_HOST}:{port}" for port in ports]
    configs = [{"port": p, "shards": {"index": i, "cores": cores}} for i, p in enumerate(ports)]
    engine = ENGINE | {"shard_cores": [{"host": _HOST, "port": ports[1]}]}
    with Cluster(configs[1], []) as second, Cluster(configs[0], [engine]) as first:
        yield [first, second]


async def freed_ms(holder: Program, waiter: Program, settle_s: float, draw: random.Random) -> float:
    held_s = 2 * settle_s + draw.random()
    seconds = [held_s, *[held_s + 1.0] * (PLACES - 1)]
    held = [asyncio.create_task(holder.call(one)) for one in seconds]
    await asyncio.sleep(settle_s)
    began, _ = await waiter.call(0.01)
    (_, ended), *_ = await asyncio.gather(*held)
    return 1e3 * (began - ended)


async def burst_ms(program: Program, settle_s: float, draw: random.Random) -> float:
    await asyncio.sleep(settle_s + draw.random())
    asked = time.perf_counter()
    calls = await asyncio.gather(*(program.call(1.5) for _ in range(PLACES)))
    return 1e3 * (max(first for first, _ in calls) - asked)


async def rounds(urls: Sequence[str], number: int, settle_s: float) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"freed": [], "burst": []}
    draw = random.Random(0)
    clients = [ServeClient(HttpClient(url)) for url in urls]
    try:
        programs = [Program(client) for client in clients]
        for program in programs:
            await program.begin()
        for turn in range(number):
            first, second = programs if turn % 2 else programs[::-1]
            found["burst"].append(await burst_ms(first, settle_s, draw))
            found["freed"].append(await freed_ms(first, second, settle_s, draw))
    finally:
        for client in clients:
            await client.close()
    return found


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument(
        "--settle", type=float, default=2.0, help="seconds: heartbeats alone move leases in three"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    with two_shards() as shards:
        urls = [shard.core_url for shard in shards]
        found = asyncio.run(rounds(urls, args.rounds, args.settle))
    for name, times in found.items():
        report[name] = {"p50_ms": statistics.median(times), "max_ms": max(times)}
        print(name, report[name])


if __name__ == "__main__":
    run_benchmark(__name__)
