"""The cost of the page for programs: open views, and the history of finished runs.

    python -m benchmark.serve.bench_page --output benchmark/results/page.json
    python -m benchmark.serve.bench_page --history --output benchmark/results/page_history.json

One ServeCore with simulated engines serves programs at a constant pace, which the engines' steps
set. Turns without viewers alternate with turns in which viewers watch the overview, the placement,
the series and one session. All of these change continuously. `share` is the viewers' share of
ServeCore's thread: the median difference of CPU seconds per second between consecutive turns.
Sessions of 50 calls stay live, so the views grow with every turn.

With `--history`, two tenants take turns, one with history and one without. Each session has one
call and is deleted, which is the worst case. `ratio` is the ratio of CPU time per session. Both
tenants are in one process, because two processes with equal settings differ by 3%.
"""

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import (
    ZERO_COST,
    Program,
    connect,
    cpu_seconds,
    pinned,
    quartiles_and_error,
    run,
)
from benchmark.serve.bench_calls import summary as ratio
from parrot.cluster import Cluster
from parrot.gateway.page.visitors import page_key

_WARM_UP_TURNS = 2


class Viewer:
    """A client of the page's feed. `began` is set when it has its first rows."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self.began = asyncio.Event()

    async def follow(self, http: aiohttp.ClientSession, url: str) -> None:
        async with http.get(url) as feed:
            assert feed.status == 200, await feed.text()
            async for chunk in feed.content.iter_any():
                self.num_bytes += len(chunk)
                self.began.set()


@asynccontextmanager
async def looking(cluster: Cluster, session_id: int, count: int) -> AsyncIterator[list[Viewer]]:
    """Opens `count` viewers of each view. The block starts when all have their first rows."""
    api = f"{cluster.core_url}/ui/api"
    views = ("overview", "placement", "series", f"sessions/{session_id}") * count
    viewers = [Viewer() for _ in views]
    jar = aiohttp.CookieJar(unsafe=True)  # Needed for hosts that are IP addresses.
    connector = aiohttp.TCPConnector(limit=0)
    async with AsyncExitStack() as stack:
        http = await stack.enter_async_context(
            aiohttp.ClientSession(connector=connector, cookie_jar=jar)
        )
        assert cluster.cluster_token is not None
        async with http.post(
            f"{api}/enter", json={"key": page_key(cluster.cluster_token)}
        ) as reply:
            assert reply.status == 200, await reply.text()
        group = await stack.enter_async_context(asyncio.TaskGroup())
        feeds = [
            group.create_task(viewer.follow(http, f"{api}/{view}"))
            for viewer, view in zip(viewers, views, strict=True)
        ]
        for viewer in viewers:
            await viewer.began.wait()
        yield viewers
        for feed in feeds:
            feed.cancel()


async def load(cluster: Cluster, programs: Sequence[Program], num_calls: int) -> float:
    """CPU seconds per second of ServeCore, while `num_calls` calls are made."""
    pid = cluster.process("core").pid
    began, before = time.monotonic(), cpu_seconds(pid)
    await run(programs, num_calls)
    return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def summary(on: list[float], off: list[float]) -> dict[str, object]:
    low, middle, high, error = quartiles_and_error([a - b for a, b in zip(on, off, strict=True)])
    return {
        "load": statistics.median(on),
        "load_alone": statistics.median(off),
        "share": middle,
        "share_error": error,
        "share_quartiles": [low, high],
    }


async def compare(cluster: Cluster, args: argparse.Namespace, report: Report) -> None:
    async with connect() as http:
        for count in args.viewers:
            programs = [Program(http, cluster.core_url) for _ in range(args.concurrency)]
            await run(programs, args.concurrency)
            looked, alone, num_bytes = [], [], 0
            began = time.monotonic()
            for turn in range(-_WARM_UP_TURNS, args.turns):
                async with looking(cluster, programs[0].session_id, count) as viewers:
                    with_viewers = await load(cluster, programs, args.calls)
                    num_bytes += sum(viewer.num_bytes for viewer in viewers)
                without = await load(cluster, programs, args.calls)
                if turn >= 0:
                    looked.append(with_viewers)
                    alone.append(without)
            num_calls = 2 * args.calls * (args.turns + _WARM_UP_TURNS)
            known = {"viewers": count, "calls_per_s": num_calls / (time.monotonic() - began)}
            report.add("rows", known | {"num_bytes": num_bytes} | summary(looked, alone))


async def end_sessions(programs: Sequence[Program], num_sessions: int) -> None:
    """Run this number of sessions with one call each."""
    remaining = iter(range(num_sessions))

    async def work(program: Program) -> None:
        for number in remaining:
            await program.call(f"what is {number}?")
            await program.end()

    await asyncio.gather(*map(work, programs))


async def compare_history(cluster: Cluster, args: argparse.Namespace) -> dict[str, object]:
    pid = cluster.process("core").pid
    spent: dict[str, list[float]] = {"on": [], "off": []}
    async with AsyncExitStack() as stack:
        programs: dict[str, list[Program]] = {}
        for side in spent:
            http = await stack.enter_async_context(connect())
            http.headers["Authorization"] = f"Bearer key {side}"
            programs[side] = [Program(http, cluster.core_url) for _ in range(args.concurrency)]
        for turn in range(-_WARM_UP_TURNS, args.turns):
            for side in spent if turn % 2 else reversed(spent):
                before = cpu_seconds(pid)
                await end_sessions(programs[side], args.calls)
                if turn >= 0:
                    spent[side].append(1e3 * (cpu_seconds(pid) - before) / args.calls)
        return ratio(**spent)


def measure_history(args: argparse.Namespace, report: Report) -> None:
    engine = {"engine_type": "sim", "instance": ZERO_COST}
    report.uses("engine", engine)
    keys = [
        {"id": side, "sha256": sha256(f"key {side}".encode()).hexdigest(), "history": is_on}
        for side, is_on in (("on", True), ("off", False))
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "keys.json"
        path.write_text(json.dumps({"keys": keys}))
        with Cluster(core={"keys_file": str(path)}, engines=[engine]) as cluster, pinned(cluster):
            row = asyncio.run(compare_history(cluster, args))
    report.add("rows", {"sessions_per_turn": args.calls, "turns": args.turns} | row)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--history", action="store_true", help="compare a tenant with and without history"
    )
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--calls", type=int, default=128, help="of each turn")
    parser.add_argument("--turns", type=int, default=30, help="of each kind")
    parser.add_argument("--step-s", type=float, default=0.08, help="of the engine")


def measure(args: argparse.Namespace, report: Report) -> None:
    if args.history:
        measure_history(args, report)
        return
    engine = {"engine_type": "sim", "instance": ZERO_COST | {"step_s": args.step_s}}
    report.uses("engine", engine)
    core = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}
    with Cluster(core=core, engines=[engine]) as cluster, pinned(cluster):
        asyncio.run(compare(cluster, args, report))


if __name__ == "__main__":
    run_benchmark(__name__)
