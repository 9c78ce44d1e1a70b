"""The cost of metrics and traces for programs.

    python -m benchmark.serve.bench_telemetry --output benchmark/results/telemetry.json

The figures are CPU times of ServeCore's process with all its threads, in turns. Programs have
sessions of 10 calls, which they end.

  counted  the time of counting a call, whether metrics are scraped or not: the mean of `--counted`
           calls in virtual time
  scraped  one ServeCore at a constant pace, which the engine's steps set, with and without a scrape
           of `/metrics` once a second. `share`: the scrapes' share of ServeCore's thread
  traced   two ServeCores at full load. One exports the spans of all sessions and calls to a
           collector by OTLP over HTTP. `ratio`: CPU time of a call with and without export. A turn
           ends when the collector has all spans
"""

import argparse
import asyncio
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from unittest.mock import patch

import aiohttp
from aiohttp import web
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve import bench_calls
from benchmark.serve.bench_calls import (
    ENGINE,
    ZERO_COST,
    Program,
    connect,
    cpu_seconds,
    pinned,
)
from benchmark.serve.bench_page import summary
from parrot.cli.bench.sessions import BenchSession as ProgramSession
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.serve.events import Sink, TaskEnded
from parrot.serve.metrics import CoreMetrics
from parrot.simulation import PATIENT, SimCluster, run_virtual

CALLS_OF_SESSION = 10
_WARM_UP_TURNS = 2
_CORE = {"max_sessions_num": 1_000_000, "global_scheduler": {"max_queue_size": 100_000}}


class Collector:
    """Counts the spans that it receives."""

    def __init__(self) -> None:
        self.num_spans = 0
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def serving(self, port: int) -> AsyncIterator[None]:
        app = web.Application(client_max_size=2**28)
        app.router.add_post("/v1/traces", self._take)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", port).start()
            yield
        finally:
            await runner.cleanup()

    async def wait_for(self, num_spans: int) -> None:
        async with asyncio.timeout(60), self._changed:
            await self._changed.wait_for(lambda: self.num_spans >= num_spans)

    async def _take(self, request: web.Request) -> web.Response:
        sent = ExportTraceServiceRequest.FromString(await request.read())
        async with self._changed:
            self.num_spans += sum(
                len(scope.spans) for one in sent.resource_spans for scope in one.scope_spans
            )
            self._changed.notify_all()
        return web.Response()


async def sessions(http: aiohttp.ClientSession, url: str, num_programs: int, count: int) -> int:
    """Run `count` sessions by concurrent programs. Returns the number of calls and sessions."""
    remaining = iter(range(count))

    async def work() -> None:
        for _ in remaining:
            program = Program(http, url)
            for number in range(CALLS_OF_SESSION):
                await program.call(f"what is {number}?")
            await program.end()

    await asyncio.gather(*(work() for _ in range(num_programs)))
    return count * (CALLS_OF_SESSION + 1)


@asynccontextmanager
async def scraping(
    http: aiohttp.ClientSession, cluster: Cluster, sizes: list[int]
) -> AsyncIterator[None]:
    """Scrapes the metrics once a second. `sizes`: the sizes of the answers, in bytes."""
    headers = {"Authorization": f"Bearer {cluster.cluster_token}"}

    async def scrape() -> None:
        while True:
            async with http.get(f"{cluster.core_url}/metrics", headers=headers) as reply:
                assert reply.status == 200, await reply.text()
                sizes.append(len(await reply.read()))
            await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        scraper = group.create_task(scrape())
        yield
        scraper.cancel()


def counted(num_calls: int) -> dict[str, object]:
    """The time of counting a finished call."""
    spent_us: list[float] = []

    def timed(count: Callable[[TaskEnded], None], event: TaskEnded) -> None:
        began = time.thread_time_ns()
        count(event)
        spent_us.append(1e-3 * (time.thread_time_ns() - began))

    made = CoreMetrics.sink.fget
    assert made is not None

    def sink(metrics: CoreMetrics) -> Sink:
        handlers = made(metrics)
        return {**handlers, TaskEnded: partial(timed, handlers[TaskEnded])}

    async def make_calls() -> None:
        async with SimCluster(1, core=PATIENT) as cluster:
            program = await ProgramSession.begin(cluster.client())
            for number in range(num_calls):
                await program.read(await program.call([f"what is {number}? "], 8))

    with patch.object(CoreMetrics, "sink", property(sink)):
        run_virtual(make_calls())
    return {"what": "counted", "us_per_call": statistics.fmean(spent_us)}


async def scraped(cluster: Cluster, args: argparse.Namespace) -> dict[str, object]:
    url, pid = cluster.core_url, cluster.process("core").pid
    sizes: list[int] = []
    on: list[float] = []
    off: list[float] = []

    async def load() -> float:
        began, before = time.monotonic(), cpu_seconds(pid)
        await sessions(http, url, args.concurrency, args.sessions)
        return (cpu_seconds(pid) - before) / (time.monotonic() - began)

    async with connect() as http:
        for turn in range(-1, args.scraped_turns):
            async with scraping(http, cluster, sizes):
                with_scraper = await load()
            without = await load()
            if turn >= 0:
                on.append(with_scraper)
                off.append(without)
    return {"what": "scraped", "bytes": max(sizes), "scrapes": len(sizes)} | summary(on, off)


async def traced(
    traced: Cluster, plain: Cluster, port: int, args: argparse.Namespace
) -> dict[str, object]:
    spent: dict[Cluster, list[float]] = {traced: [], plain: []}
    collector = Collector()
    async with collector.serving(port), connect() as http:
        num_spans = 0
        for turn in range(-_WARM_UP_TURNS, args.turns):
            for side in (traced, plain) if turn % 2 else (plain, traced):
                pid = side.process("core").pid
                before = cpu_seconds(pid)
                made = await sessions(http, side.core_url, args.concurrency, args.sessions)
                if side is traced:
                    num_spans += made
                    await collector.wait_for(num_spans)
                if turn >= 0:
                    num_calls = args.sessions * CALLS_OF_SESSION
                    spent[side].append(1e3 * (cpu_seconds(pid) - before) / num_calls)
    figures = bench_calls.summary(spent[traced], spent[plain])
    return {"what": "traced", "spans": collector.num_spans} | figures


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--counted", type=int, default=2000, help="calls that are counted")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument(
        "--sessions", type=int, default=32, help="sessions of a turn, with 10 calls each"
    )
    parser.add_argument(
        "--turns", type=int, default=40, help="turns with traces, and as many without"
    )
    parser.add_argument(
        "--scraped-turns",
        type=int,
        default=8,
        help="turns of 7 s with scrapes, and as many without",
    )
    parser.add_argument(
        "--step-s", type=float, default=0.08, help="step time of the engine for `scraped`"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.add("rows", counted(args.counted))
    engine = {"engine_type": "sim", "instance": ZERO_COST | {"step_s": args.step_s}}
    report.uses("engine", engine)
    with Cluster(core=_CORE, engines=[engine]) as cluster, pinned(cluster):
        report.add("rows", asyncio.run(scraped(cluster, args)))
    port = free_port("127.0.0.1", set())
    otlp = {"otlp_endpoint": f"http://127.0.0.1:{port}/v1/traces"}
    with (
        Cluster(core=_CORE | otlp, engines=[ENGINE]) as on,
        Cluster(core=_CORE, engines=[ENGINE]) as off,
        pinned(on, off),
    ):
        report.add("rows", asyncio.run(traced(on, off, port, args)))


if __name__ == "__main__":
    run_benchmark(__name__)
