"""ServeCore alone: semantic calls per second, added latency, and idle CPU, with `sim` engines.

    python3 benchmark/serve/bench_calls.py --out benchmark/results/serve_calls.json

ServeCore has the first core to itself; the load generator and the engines share the others. The
engines' cost model is zero, so all time is the service's. Three measurements:

  throughput  closed loop of `--concurrency` programs, each: submit a call, read its output
  latency     one program alone, submit to value; the same call sent straight to the engine is
              subtracted: what is left is what ServeCore adds
  idle        CPU seconds per second of ServeCore and of an engine without any request
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson

from parrot.cluster import Cluster

TEMPLATE = "You are a helpful assistant. Answer the question: {{question}}\nAnswer: {{answer}}"
SAMPLING = {"temperature": 0.0, "max_gen_length": 8}
ZERO_COST = {"step_s": 0.0, "prefill_token_s": 0.0, "sequence_s": 0.0, "context_token_s": 0.0}


class Program:
    """One session over plain REST."""

    def __init__(self, http: aiohttp.ClientSession, url: str) -> None:
        self._http = http
        self._url = url
        self._scope: dict[str, Any] = {}

    async def start(self) -> None:
        self._scope = await self._post("/v1/session", {})

    async def call(self, question: str) -> str:
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

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(self._url + path, data=orjson.dumps(body)) as reply:
            answer = orjson.loads(await reply.read())
            assert reply.status == 200, answer
            return answer


async def throughput(url: str, concurrency: int, num_calls: int, calls_per_session: int) -> float:
    """Calls per second, submit to value."""
    remaining = iter(range(num_calls))

    async def run_programs() -> None:
        program = Program(http, url)
        done = calls_per_session
        for number in remaining:
            if done == calls_per_session:
                await program.start()
                done = 0
            assert await program.call(f"what is {number}?")
            done += 1

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        start = time.perf_counter()
        await asyncio.gather(*(run_programs() for _ in range(concurrency)))
        return num_calls / (time.perf_counter() - start)


async def latency(core_url: str, engine_url: str, num_calls: int) -> dict[str, float]:
    """Milliseconds: medians of a call through ServeCore and of one straight to the engine."""
    async with aiohttp.ClientSession() as http:
        program = Program(http, core_url)
        await program.start()
        through, direct = [], []
        for number in range(num_calls):
            start = time.perf_counter()
            await program.call(f"what is {number}?")
            through.append(time.perf_counter() - start)
            start = time.perf_counter()
            await generate_directly(http, engine_url, context_id=2**40 + number)
            direct.append(time.perf_counter() - start)
    through.sort()
    return {
        "through_p50_ms": 1e3 * statistics.median(through),
        "through_p99_ms": 1e3 * through[int(0.99 * len(through))],
        "direct_p50_ms": 1e3 * statistics.median(direct),
        "added_p50_ms": 1e3 * (statistics.median(through) - statistics.median(direct)),
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
    """User and system time of a process, from the kernel's accounting (Linux)."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def idle_cpu(cluster: Cluster, seconds: float) -> dict[str, float]:
    """Fraction of one core that each idle process uses."""
    names = ["core", cluster.engine_names[0]]
    before = {name: cpu_seconds(cluster.process(name).pid) for name in names}
    time.sleep(seconds)
    after = {name: cpu_seconds(cluster.process(name).pid) for name in names}
    return {name: (after[name] - before[name]) / seconds for name in names}


def pin(cluster: Cluster) -> None:
    """ServeCore alone on the first core, everything else on the others."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(cluster.process("core").pid, cores[:1])
    for pid in [0, *(cluster.process(name).pid for name in cluster.engine_names)]:
        os.sched_setaffinity(pid, cores[1:])


def measure(args: argparse.Namespace) -> dict[str, Any]:
    engine = {"engine_type": "sim", "instance": ZERO_COST}
    core = {"global_scheduler": {"max_queue_size": 100_000}}
    with Cluster(core=core, engines=[engine] * args.engines) as cluster:
        pin(cluster)
        idle = idle_cpu(cluster, args.idle_seconds)
        asyncio.run(throughput(cluster.core_url, args.concurrency, args.calls // 4, 50))  # warm up
        before = cpu_seconds(cluster.process("core").pid)
        rates = [
            asyncio.run(throughput(cluster.core_url, args.concurrency, args.calls, 50))
            for _ in range(args.runs)
        ]
        core_cpu = cpu_seconds(cluster.process("core").pid) - before
        engine_url = cluster.url(cluster.engine_names[0])
        return {
            "command": "python3 " + " ".join(sys.argv),
            "python": platform.python_version(),
            "cpus": len(os.sched_getaffinity(0)) + 1,
            "engines": args.engines,
            "concurrency": args.concurrency,
            "calls_per_s": rates,
            "core_cpu_ms_per_call": 1e3 * core_cpu / (args.calls * args.runs),
            "latency": asyncio.run(latency(cluster.core_url, engine_url, 500)),
            "idle_cpu_fraction": idle,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engines", type=int, default=1)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--calls", type=int, default=4000)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = measure(args)
    print(json.dumps(result, indent=2))
    if args.out:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
