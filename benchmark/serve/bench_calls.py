"""ServeCore alone: calls per second, added latency and idle CPU use, with `sim` engines.

    python -m benchmark.serve.bench_calls
    python -m benchmark.serve.bench_calls --features

ServeCore has the first core exclusively. The load generator and the engines share the others. The
engines' costs are zero, so all time is ServeCore's. Three measurements:

  throughput  closed loop of `--concurrency` programs: each submits a call and reads its output
  latency     one program alone, from submit to value, minus the time of the same call sent to the
              engine directly
  idle        CPU seconds per second of ServeCore and of an engine without requests

`--features` measures instead what the application-level features cost if they gain nothing. Two
services take turns, one with all features on and one with all off. The figure is the CPU time of a
single call, for several numbers of engines and programs. Turns are short, so that both services see
the same machine load. The ratio is the median over consecutive turns.
"""

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from benchmark.apps.settings import features
from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot.cluster import Cluster

TEMPLATE = "You are a helpful assistant. Answer the question: {{question}}\nAnswer: {{answer}}"
SAMPLING = {"temperature": 0.0, "max_gen_length": 8}
ZERO_COST = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}
ENGINE = {"engine_type": "sim", "instance": ZERO_COST}
CALLS_PER_SESSION = 50
JSON = {"Content-Type": "application/json"}
WARM_UP_TURNS = 8


class Program:
    """A program that makes consecutive REST calls, 50 in each session."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._scope: dict[str, Any] = {}
        self._num_left = 0

    @property
    def session_id(self) -> int:
        """The session of the last call."""
        return int(self._scope["session_id"])

    async def call(self, question: str) -> str:
        if not self._num_left:
            self._scope = await self._post("/v1/session", {})
            self._num_left = CALLS_PER_SESSION
        self._num_left -= 1
        answer = await self._post(
            "/v1/semantic_call",
            self._scope
            | {
                "template": TEMPLATE,
                "func_name": "bench",
                "reuse": False,
                "parameters": [
                    {"name": "question", "value": question},
                    {"name": "answer", "is_output": True, "sampling_config": SAMPLING},
                ],
            },
        )
        var_id = answer["param_info"][1]["var_id"]
        query = {k: str(v) for k, v in self._scope.items()} | {"criteria": "latency"}
        async with self._http.get(f"{self._url}/v1/semantic_var/{var_id}", params=query) as reply:
            value = orjson.loads(await reply.read())
            assert reply.status == 200, value
            content: str = value["content"]
            return content

    async def end(self) -> None:
        """End the session of the last call."""
        session_id, self._num_left = self.session_id, 0
        headers = {"Authorization": f"Bearer {self._scope['session_auth']}"}
        url = f"{self._url}/v1/session/{session_id}"
        async with self._http.delete(url, headers=headers) as reply:
            assert reply.status < 300, await reply.text()

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(self._url + path, data=orjson.dumps(body)) as reply:
            answer = orjson.loads(await reply.read())
            assert reply.status == 200, answer
            return answer


async def run(programs: Sequence[Program], num_calls: int) -> None:
    """Make `num_calls` calls by programs that all run at once."""
    remaining = iter(range(num_calls))

    async def work(program: Program) -> None:
        for number in remaining:
            assert await program.call(f"what is {number}?")

    await asyncio.gather(*map(work, programs))


async def throughput(url: str, concurrency: int, num_calls: int) -> float:
    """Calls per second, submit to value."""
    async with connect() as http:
        start = time.perf_counter()
        await run([Program(http, url) for _ in range(concurrency)], num_calls)
        return num_calls / (time.perf_counter() - start)


def connect() -> aiohttp.ClientSession:
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), headers=JSON)


async def latency(
    core_url: str, engine_url: str, cluster_token: str | None, num_calls: int
) -> dict[str, Any]:
    """Milliseconds of a call through ServeCore and of a call to the engine directly, in turns.
    `added`: the difference of each pair."""
    authorization = {"Authorization": f"Bearer {cluster_token}"}
    async with (
        connect() as http,
        aiohttp.ClientSession(headers=JSON | authorization) as engine_http,
    ):
        program = Program(http, core_url)
        through, direct = [], []
        for number in range(num_calls):
            start = time.perf_counter()
            await program.call(f"what is {number}?")
            through.append(time.perf_counter() - start)
            start = time.perf_counter()
            await generate_directly(engine_http, engine_url, context_id=2**40 + number)
            direct.append(time.perf_counter() - start)
    added = [1e3 * (a - b) for a, b in zip(through, direct, strict=True)]
    return {
        "through_p50_ms": 1e3 * statistics.median(through),
        "through_p99_ms": 1e3 * sorted(through)[int(0.99 * len(through))],
        "direct_p50_ms": 1e3 * statistics.median(direct),
        "added_p50_ms": statistics.median(added),
        "added_quartiles_ms": statistics.quantiles(added, n=4)[::2],
    }


async def generate_directly(http: aiohttp.ClientSession, url: str, context_id: int) -> None:
    body = {
        "context_id": context_id,
        "fills": [{"context_id": context_id, "token_ids": list(range(80))}],
        "sampling_config": SAMPLING,
    }
    async with http.post(url + "/generate", data=orjson.dumps(body)) as reply:
        assert reply.status == 200, await reply.text()
        await reply.read()
    async with http.post(url + "/free_context", data=orjson.dumps({"context_id": context_id})) as r:
        assert r.status == 200, await r.text()


def cpu_seconds(pid: int) -> float:
    """CPU time of the current threads of a process (Linux)."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return 1e-9 * sum(int(thread.read_text().split()[0]) for thread in threads)


def children(pid: int) -> list[int]:
    """The child processes of a process (Linux)."""
    lists = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for one in lists for child in one.read_text().split()]


def idle_cpu(cluster: Cluster, seconds: float) -> dict[str, float]:
    """The fraction of one core that each idle process uses."""
    names = ["core", cluster.engine_names[0]]
    before = {name: cpu_seconds(cluster.process(name).pid) for name in names}
    time.sleep(seconds)
    after = {name: cpu_seconds(cluster.process(name).pid) for name in names}
    return {name: (after[name] - before[name]) / seconds for name in names}


@contextmanager
def pinned(*clusters: Cluster, num_own: int = 1) -> Iterator[None]:
    """Pins each ServeCore to one of the first `num_own` cores, in turn, and all other processes and
    their children to the remaining cores."""
    cores = sorted(os.sched_getaffinity(0))
    for number, cluster in enumerate(clusters):
        core = cluster.process("core").pid
        os.sched_setaffinity(core, {cores[number % num_own]})
        engines = [cluster.process(name).pid for name in cluster.engine_names]
        for pid in (*engines, *children(core)):
            os.sched_setaffinity(pid, cores[num_own:])
    os.sched_setaffinity(0, cores[num_own:])
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def alone(args: argparse.Namespace, report: Report) -> None:
    core = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}
    with Cluster(core=core, engines=[ENGINE] * args.engines) as cluster, pinned(cluster):
        report |= {"cpus": os.cpu_count(), "engines": args.engines, "concurrency": args.concurrency}
        report["idle_cpu_fraction"] = idle_cpu(cluster, args.idle_seconds)
        asyncio.run(throughput(cluster.core_url, args.concurrency, args.calls // 4))  # warm up
        before = cpu_seconds(cluster.process("core").pid)
        report["calls_per_s"] = [
            asyncio.run(throughput(cluster.core_url, args.concurrency, args.calls))
            for _ in range(args.runs)
        ]
        core_cpu = cpu_seconds(cluster.process("core").pid) - before
        report["core_cpu_ms_per_call"] = 1e3 * core_cpu / (args.calls * args.runs)
        engine_url = cluster.url(cluster.engine_names[0])
        report["latency"] = asyncio.run(
            latency(cluster.core_url, engine_url, cluster.cluster_token, args.pairs)
        )


def compare_features(args: argparse.Namespace, report: Report) -> None:
    report |= {"turns": args.turns, "rows": []}
    for num_engines in (1, 4):
        engines = [ENGINE] * num_engines
        room = {"max_queue_size": 100_000}
        core = {"max_sessions_num": 1_000_000}
        with (
            Cluster(core=core | {"global_scheduler": room}, engines=engines) as on,
            Cluster(core=core | {"global_scheduler": features() | room}, engines=engines) as off,
            pinned(on, off),
        ):
            for row in asyncio.run(compare({"on": on, "off": off}, args.turns)):
                report["rows"].append({"engines": num_engines} | row)
                print(json.dumps(report["rows"][-1]), flush=True)


async def compare(sides: dict[str, Cluster], num_turns: int) -> list[dict[str, Any]]:
    """CPU milliseconds of a call with all features on and with all off, by number of programs. The
    first turns only fill the engines' memory, as in a service that has run for some time."""
    async with connect() as http:
        rows = []
        for concurrency, num_calls in ((256, 512), (32, 400), (1, 100)):
            programs = {
                side: [Program(http, cluster.core_url) for _ in range(concurrency)]
                for side, cluster in sides.items()
            }
            spent: dict[str, list[float]] = {side: [] for side in sides}
            for turn in range(-WARM_UP_TURNS, num_turns):
                for side in sides if turn % 2 else reversed(sides):
                    ms = await spend(sides[side], programs[side], num_calls)
                    if turn >= 0:
                        spent[side].append(ms)
            rows.append({"concurrency": concurrency, "calls": num_calls} | summary(**spent))
        return rows


async def spend(cluster: Cluster, programs: Sequence[Program], num_calls: int) -> float:
    """CPU milliseconds of ServeCore per call."""
    pid = cluster.process("core").pid
    before = cpu_seconds(pid)
    await run(programs, num_calls)
    return 1e3 * (cpu_seconds(pid) - before) / num_calls


def quartiles_and_error(values: list[float]) -> tuple[float, float, float, float]:
    """The quartiles, and the standard error of the median, estimated from the quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return low, middle, high, 1.25 * (high - low) / 1.35 / len(values) ** 0.5


def summary(on: list[float], off: list[float]) -> dict[str, Any]:
    low, middle, high, error = quartiles_and_error([a / b for a, b in zip(on, off, strict=True)])
    return {
        "on_ms": statistics.median(on),
        "off_ms": statistics.median(off),
        "ratio": middle,
        "ratio_error": error,
        "ratio_quartiles": [low, high],
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--pairs", type=int, default=500, help="calls for the latency")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--features", action="store_true", help="compare all features on and off")
    parser.add_argument("--turns", type=int, default=24, help="turns of each side, with --features")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    (compare_features if args.features else alone)(args, report)


if __name__ == "__main__":
    run_benchmark(__name__)
