"""Compare one ServeCore with two that divide sessions as shards, on `sim` engines of no cost.

    python -m tests.scale.bench_shards

The setups take turns, so that all of them run under the same machine load:

  calls    calls per second, from submit to value, and CPU milliseconds of all ServeCores per call:
           `one`: a single ServeCore. `own`: two shards, each program asks the shard that holds its
           session. `any`: two shards, a load balancer picks the wrong one half of the time.
  forward  extra milliseconds of a read that is sent to the other shard, with a single program and
           a value that is already set

On a machine with at least four cores, each ServeCore is pinned to a core of its own. On a smaller
machine, ServeCores share all cores with the load generator and the engines. Only the CPU time per
call is meaningful there. `calls_per_cpu_s` is the rate that this CPU time allows if each ServeCore
has one core.
"""

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import aiohttp

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import ENGINE, Program, connect, cpu_seconds, pinned, run
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port

CORE = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}
TOKEN = "of-this-benchmark"
_MIN_CORES = 4


class BlindProgram(Program):
    """Sends each call to the next server, even if another server holds its session."""

    def __init__(self, http: aiohttp.ClientSession, urls: Sequence[str]) -> None:
        super().__init__(http, urls[0])
        self._urls = urls

    async def call(self, question: str) -> str:
        if self._num_left:
            self._url = self._urls[self._num_left % len(self._urls)]
        return await super().call(question)


@contextmanager
def two_shards() -> Iterator[list[Cluster]]:
    ports = [free_port("127.0.0.1", set())]
    ports.append(free_port("127.0.0.1", {*ports}))
    cores = [f"http://127.0.0.1:{port}" for port in ports]

    def shard(index: int) -> Cluster:
        own = {"port": ports[index], "cluster_token": TOKEN}
        return Cluster(CORE | own | {"shards": {"index": index, "cores": cores}}, [ENGINE])

    with shard(0) as first, shard(1) as second:
        yield [first, second]


async def rate(clusters: Sequence[Cluster], args: argparse.Namespace, *, blind: bool) -> Any:
    """Return calls per second, and CPU milliseconds of all ServeCores per call."""
    urls = [cluster.core_url for cluster in clusters]
    async with connect() as http:
        programs: list[Program] = [
            BlindProgram(http, urls[n % len(urls) :] + urls[: n % len(urls)])
            if blind
            else Program(http, urls[n % len(urls)])
            for n in range(args.concurrency)
        ]
        pids = [cluster.process("core").pid for cluster in clusters]
        spent, began = sum(map(cpu_seconds, pids)), time.perf_counter()
        await run(programs, args.calls)
        took = time.perf_counter() - began
        spent = sum(map(cpu_seconds, pids)) - spent
    return args.calls / took, 1e3 * spent / args.calls


async def forwarding(clusters: Sequence[Cluster], num_reads: int) -> dict[str, float]:
    """Measure alternating reads of a value from the shard that holds it and from the other."""
    first, second = (cluster.core_url for cluster in clusters)
    took: dict[str, list[float]] = {first: [], second: []}
    async with connect() as http:
        async with http.post(f"{first}/v1/session", json={}) as reply:
            scope = await reply.json()
        given = scope | {"var_name": "x", "content": "a value"}
        async with http.post(f"{first}/v1/semantic_var", json=given) as reply:
            var_id = (await reply.json())["var_id"]
        query = {name: str(value) for name, value in scope.items()}
        for _ in range(num_reads):
            for url, times in took.items():
                began = time.perf_counter()
                async with http.get(f"{url}/v1/semantic_var/{var_id}", params=query) as reply:
                    assert (await reply.json())["content"] == "a value"
                times.append(1e3 * (time.perf_counter() - began))
    own, other = statistics.median(took[first]), statistics.median(took[second])
    added = [b - a for a, b in zip(took[first], took[second], strict=True)]
    return {"own_p50_ms": own, "other_p50_ms": other, "added_p50_ms": statistics.median(added)}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--calls", type=int, default=3000, help="calls in each turn")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--reads", type=int, default=1000)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    is_pinned = len(os.sched_getaffinity(0)) >= _MIN_CORES
    with (
        Cluster(CORE, [ENGINE]) as one,
        two_shards() as shards,
        pinned(*shards, one, num_own=2) if is_pinned else nullcontext(),
    ):
        sides = {"one": ([one], False), "own": (shards, False), "any": (shards, True)}
        found: dict[str, list[Any]] = {name: [] for name in sides}
        for turn in range(-1, args.turns):  # turn -1 only warms up
            for name, (clusters, blind) in sides.items():
                one_turn = asyncio.run(rate(clusters, args, blind=blind))
                if turn >= 0:
                    found[name].append(one_turn)
        report |= {"cpus": os.cpu_count(), "pinned": is_pinned, "calls": {}}
        for name, turns in found.items():
            per_s, cpu_ms = (statistics.median(column) for column in zip(*turns, strict=True))
            row = {"calls_per_s": per_s, "core_cpu_ms_per_call": cpu_ms}
            row["calls_per_cpu_s"] = len(sides[name][0]) * 1e3 / cpu_ms
            report["calls"][name] = row
        for name in ("own", "any"):
            ratios = [a[0] / b[0] for a, b in zip(found[name], found["one"], strict=True)]
            report["calls"][name]["ratio_to_one"] = statistics.median(ratios)
        report["forward"] = asyncio.run(forwarding(shards, args.reads))


if __name__ == "__main__":
    run_benchmark(__name__)
