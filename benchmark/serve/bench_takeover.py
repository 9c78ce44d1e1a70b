"""The time until a standby serves, after the active ServeCore is killed, hangs, or is stopped.

    python -m benchmark.serve.bench_takeover --journal postgresql://USER:PASSWORD@HOST/DATABASE

Two ServeCores share a journal in a database that has no other use. A `sim` engine without costs
knows both. In each round the active ServeCore is ended in one of three ways, and a client with both
addresses measures the seconds until

  write    a new call is acknowledged
  value    that call has its value, so the engine has found the new ServeCore

Before, `--sessions` sessions of three calls each are written to the journal. The standby reads
them.
"""

import argparse
import asyncio
import os
import signal
import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from benchmark.serve.bench_calls import ENGINE, connect, run
from benchmark.serve.bench_journal import CALLS_OF_A_SESSION, CORE, ShortProgram
from parrot.cluster import Cluster
from parrot.cluster.ports import free_port
from parrot.protocol.errors import NoEngine, Standby, Unavailable
from parrot.protocol.failover_client import client_of
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.serve_client import ServeClient

HOW = {"killed": signal.SIGKILL, "hangs": signal.SIGSTOP, "stopped": signal.SIGTERM}


class Pair:
    """Two ServeCores, and an engine that follows the active one."""

    def __init__(self, stack: ExitStack, journal: str) -> None:
        ports = [free_port("127.0.0.1", set()) for _ in range(2)]
        core = CORE | {"journal": journal}
        engine = ENGINE | {"standby_cores": [{"host": "127.0.0.1", "port": ports[1]}]}
        self.cores = []
        for port, engines in zip(ports, ([engine], []), strict=True):
            cluster = Cluster(core=core | {"port": port}, engines=engines)
            self.cores.append(stack.enter_context(cluster))

    @property
    def urls(self) -> list[str]:
        return [core.core_url for core in self.cores]

    async def serving(self) -> Cluster:
        """The ServeCore that is active and has its engine."""
        while True:
            for core in self.cores:
                async with HttpClient(core.core_url) as http:
                    try:
                        await http.request("GET", "/ready", timeout_s=1.0)
                        return core
                    except Unavailable:
                        await asyncio.sleep(0.05)

    async def is_standby(self, core: Cluster) -> None:
        """Wait until the ServeCore is a standby."""
        async with HttpClient(core.core_url) as http:
            while True:
                try:
                    await http.request("GET", "/ready", timeout_s=1.0)
                except Standby:
                    return
                except (NoEngine, Unavailable):
                    pass
                await asyncio.sleep(0.05)


async def fill(pair: Pair, num_sessions: int) -> None:
    core = await pair.serving()
    async with connect() as http:
        programs = [ShortProgram(http, core.core_url) for _ in range(32)]
        await run(programs, CALLS_OF_A_SESSION * num_sessions)


async def takeover(pair: Pair, how: str) -> dict[str, float]:
    core = await pair.serving()
    client = ServeClient(client_of(pair.urls))
    session = await client.create_session()
    parameters = [CallParameter(name="y", is_output=True)]
    request = SemanticCallRequest(
        **session.model_dump(), template="Say {{y}}", parameters=parameters, idempotency_key="k"
    )
    process = core.process("core")
    start = time.perf_counter()
    os.killpg(process.pid, HOW[how])
    if how == "stopped":  # It answers until it has ended.
        await asyncio.to_thread(process.stop)
    while True:
        try:
            answer = await client.semantic_call(request)
            break
        except Unavailable:  # The request was in flight.
            pass
    written_s = time.perf_counter() - start
    var_id = answer.param_info[-1].var_id
    await client.get_var(session.session_id, session.session_auth, var_id)
    value_s = time.perf_counter() - start
    await client.close()
    if how == "hangs":
        os.killpg(process.pid, signal.SIGCONT)
    else:
        await asyncio.to_thread(core.restart, "core")
    await pair.is_standby(core)
    return {"write_s": written_s, "value_s": value_s}


async def compare(pair: Pair, args: argparse.Namespace, report: Report) -> None:
    await fill(pair, args.sessions)
    for how in args.how:
        found = [await takeover(pair, how) for _ in range(args.rounds)]
        row: dict[str, Any] = {"how": how, "sessions": args.sessions, "rounds": args.rounds}
        for name in found[0]:
            times = sorted(one[name] for one in found)
            row |= {f"{name}_p50": statistics.median(times), f"{name}_max": times[-1]}
        report.add("takeovers", row)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--journal", required=True, help="an empty database")
    parser.add_argument("--how", nargs="+", choices=list(HOW), default=list(HOW))
    parser.add_argument("--rounds", type=int, default=10, help="of each")
    parser.add_argument("--sessions", type=int, default=1000)


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", ENGINE)
    with ExitStack() as stack:
        asyncio.run(compare(Pair(stack, args.journal), args, report))


if __name__ == "__main__":
    run_benchmark(__name__)
