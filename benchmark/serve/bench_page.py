"""What it costs programs that somebody looks at the page.

    python -m benchmark.serve.bench_page --output benchmark/results/page.json

One ServeCore with simulated engines that cost nothing serves programs, in turns with nobody looking
and with viewers who follow the overview, the placement and one session each. `ratio` is that of
ServeCore's CPU time for a call, of turns that follow each other; sessions of 50 calls stay live, so
the views grow with every turn.
"""

import argparse
import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import aiohttp

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import ENGINE, Program, connect, pinned, run, spend, summary
from parrot.cluster import Cluster
from parrot.serve.page.visitors import page_key

_WARM_UP_TURNS = 2


class Viewer:
    """A browser that draws nothing."""

    def __init__(self) -> None:
        self.num_bytes = 0

    async def follow(self, http: aiohttp.ClientSession, url: str) -> None:
        async with http.get(url) as feed:
            assert feed.status == 200, await feed.text()
            async for chunk in feed.content.iter_any():
                self.num_bytes += len(chunk)


@asynccontextmanager
async def looking(cluster: Cluster, session_id: int, count: int) -> AsyncIterator[list[Viewer]]:
    """So many viewers, each with a feed of every view."""
    api = f"{cluster.core_url}/ui/api"
    viewers = [Viewer() for _ in range(count)]
    jar = aiohttp.CookieJar(unsafe=True)  # of a host that is an address
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
            for viewer in viewers
            for view in ("overview", "placement", f"sessions/{session_id}")
        ]
        yield viewers
        for feed in feeds:
            feed.cancel()


async def compare(cluster: Cluster, args: argparse.Namespace) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    async with connect() as http:
        for count in args.viewers:
            programs = [Program(http, cluster.core_url) for _ in range(args.concurrency)]
            await run(programs, args.concurrency)
            session_id = programs[0].session_id
            looked, alone, num_bytes = [], [], 0
            for turn in range(-_WARM_UP_TURNS, args.turns):
                async with looking(cluster, session_id, count) as viewers:
                    with_viewers = await spend(cluster, programs, args.calls)
                    num_bytes += sum(viewer.num_bytes for viewer in viewers)
                without = await spend(cluster, programs, args.calls)
                if turn >= 0:
                    looked.append(with_viewers)
                    alone.append(without)
            rows.append({"viewers": count, "num_bytes": num_bytes} | summary(on=looked, off=alone))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--viewers", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--calls", type=int, default=1000, help="of each turn")
    parser.add_argument("--turns", type=int, default=16, help="of each kind")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    core = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}
    with Cluster(core=core, engines=[ENGINE]) as cluster, pinned(cluster):
        report["rows"] = asyncio.run(compare(cluster, args))


if __name__ == "__main__":
    run_benchmark(__name__)
