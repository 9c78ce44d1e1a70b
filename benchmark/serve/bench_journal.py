"""The cost of ServeCore's journal, and the time to restart, with `sim` engines without costs.

    python -m benchmark.serve.bench_journal

Two services take turns, one with a journal and one without, so that both see the same load of the
machine and disk:

  calls    calls per second, submit to value, of `--concurrency` programs at once
  submit   milliseconds from a submit to its answer, of one program alone
  restart  seconds from the start of a process to the answer of its `/health`, after `kill -9`, with
           `--sessions` sessions of three calls each in the journal; `all_s`: until all sessions
           have been restored in the background
"""

import argparse
import asyncio
import statistics
import tempfile
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import ENGINE, Program, connect, pinned, run
from parrot.cluster import Cluster

CORE = {
    "max_sessions_num": 1_000_000,
    "session_life_span": 1e6,
    "global_scheduler": {"max_queue_size": 100_000},
}
CALLS_OF_A_SESSION = 3


class ShortProgram(Program):
    """A program with few calls in each session."""

    async def call(self, question: str) -> str:
        if not self._num_left:
            await super().call(question)
            self._num_left = CALLS_OF_A_SESSION - 1
            return question
        return await super().call(question)


async def rate(cluster: Cluster, concurrency: int, num_calls: int) -> float:
    async with connect() as http:
        programs = [Program(http, cluster.core_url) for _ in range(concurrency)]
        start = time.perf_counter()
        await run(programs, num_calls)
        return num_calls / (time.perf_counter() - start)


async def submits(cluster: Cluster, count: int) -> list[float]:
    """The milliseconds of each submit."""
    async with connect() as http:
        program = Program(http, cluster.core_url)
        await program.call("Who is there?")
        body = program._scope | {"template": "f {{x}} {{y}}", "on_demand": True}
        times = []
        for i in range(count):
            given = {"name": "x", "value": str(i)}
            made = {"name": "y", "is_output": True}
            start = time.perf_counter()
            await program._post("/v1/semantic_call", body | {"parameters": [given, made]})
            times.append(1e3 * (time.perf_counter() - start))
        return times


async def compare(on: Cluster, off: Cluster, args: argparse.Namespace) -> dict[str, Any]:
    sides = {"on": on, "off": off}
    rates: dict[str, list[float]] = {side: [] for side in sides}
    times: dict[str, list[float]] = {side: [] for side in sides}
    for turn in range(-2, args.turns):
        for side in sides if turn % 2 else reversed(sides):
            found = await rate(sides[side], args.concurrency, args.calls)
            waited = await submits(sides[side], args.submits)
            if turn >= 0:
                rates[side].append(found)
                times[side] += waited
    ratios = [a / b for a, b in zip(rates["on"], rates["off"], strict=True)]
    return {
        "calls_per_s": {side: statistics.median(found) for side, found in rates.items()},
        "ratio": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "submit_p50_ms": {side: statistics.median(found) for side, found in times.items()},
        "submit_p99_ms": {s: sorted(found)[int(0.99 * len(found))] for s, found in times.items()},
    }


def variables(cluster: Cluster) -> float:
    """The number of restored variables."""
    headers = {"Authorization": f"Bearer {cluster.cluster_token}"}
    request = urllib.request.Request(f"{cluster.core_url}/metrics", headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if "parrot_variables{" in line)


def restart(path: Path, num_sessions: int) -> dict[str, Any]:
    with Cluster(core=CORE | {"journal": str(path)}, engines=[ENGINE]) as cluster:

        async def fill() -> None:
            async with connect() as http:
                programs = [ShortProgram(http, cluster.core_url) for _ in range(32)]
                await run(programs, CALLS_OF_A_SESSION * num_sessions)

        asyncio.run(fill())
        num_variables = variables(cluster)
        cluster.kill("core")
        start = time.perf_counter()
        cluster.restart("core")
        health = f"{cluster.core_url}/health"
        while True:
            with suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(health, timeout=60).close()
                break
            time.sleep(0.01)
        ready_s = time.perf_counter() - start
        while variables(cluster) < num_variables:
            time.sleep(0.1)
        all_s = time.perf_counter() - start
    return {
        "sessions": num_sessions,
        "calls": CALLS_OF_A_SESSION * num_sessions,
        "journal_bytes": path.stat().st_size,
        "ready_s": ready_s,
        "all_s": all_s,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--calls", type=int, default=1000, help="calls in a turn")
    parser.add_argument("--submits", type=int, default=100, help="submits in a turn")
    parser.add_argument("--turns", type=int, default=12, help="turns of each side")
    parser.add_argument("--sessions", type=int, default=10_000)
    parser.add_argument(
        "--folder", default=None, help="the journals' folder, which selects the disk"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        if args.turns:
            journal = {"journal": str(Path(folder) / "journal.db")}
            with (
                Cluster(core=CORE | journal, engines=[ENGINE]) as on,
                Cluster(core=CORE, engines=[ENGINE]) as off,
                pinned(on, off),
            ):
                report |= asyncio.run(compare(on, off, args))
        if args.sessions:
            report["restart"] = restart(Path(folder) / "many.db", args.sessions)


if __name__ == "__main__":
    run_benchmark(__name__)
