"""Several ServeCores that share sessions out, with `sim` engines that cost nothing.

    python -m tests.scale.bench_shards

One service alone and two shards take turns, so that all meet the same machine:

  calls    calls per second, submit to value, and the CPU milliseconds of all ServeCores per call:
           `one` ServeCore; two shards whose programs each ask the one that has their session
           (`own`); and two of which a blind balancer asks the wrong one half of the time (`any`)
  forward  milliseconds that a read takes longer if the other shard is asked, of one program alone
           whose value is there

Each ServeCore has a core of this machine to itself where there are four; else they share all with
the load generator and the engines, and only the CPU time per call tells anything: `calls_per_cpu_s`
is how many calls a second so many cores of ServeCores would make.
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
    """Asks one of several servers in turn, whichever has its session."""

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
    """Calls per second, and CPU milliseconds of ServeCores per call."""
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
    """Milliseconds of a read, asked of the shard that has it and of the other, in turns."""
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
    parser.add_argument("--calls", type=int, default=3000, help="in each turn")
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
        for turn in range(-1, args.turns):  # the first only warms up
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
