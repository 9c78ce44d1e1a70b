"""Measure CPU time and memory of one ServeCore by the number of its engines.

    python -m tests.scale.bench_size

  calls       CPU microseconds per call, by stage, for chats, map-reduce and calls with a long
              shared prefix, at the rate per engine of `tests.scale.simulate`. `join`: CPU
              microseconds to register an engine. The garbage collector has ServeCore's settings.
  heartbeats  CPU microseconds per heartbeat request to the same ServeCore's app, without sockets:
              the mean, the median, and the garbage collector's share of the mean. Also the size of
              the request body in bytes.
  memory      bytes that a session and its calls keep in ServeCore, without the engines

Everything runs in virtual time on modelled engines. Times are CPU times of the thread. `model` is
the CPU time of the modelled engines and programs.
"""

import argparse
import asyncio
import gc
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import fmean
from typing import Any

import orjson

from benchmark.results import Report
from benchmark.results import run as run_benchmark
from parrot.engine.config import RegisteredConfig
from parrot.protocol.engine_api import HeartbeatRequest
from parrot.protocol.registration_client import RegistrationClient
from parrot.protocol.transport import AppTransport
from parrot.server.app import create_app
from parrot.simulation import run_virtual
from parrot.simulation.report import percentile
from parrot.utils.collector import bounded_collections
from tests.scale.simulate import COSTS, engine_config
from tests.scale.simulated.programs import Session, Text
from tests.scale.simulated.shard import CORE, Shard, Window
from tests.scale.simulated.stages import MODEL, STAGES, Stages
from tests.scale.simulated.summary import summary
from tests.scale.simulated.traffic import CALLS_PER_S, PEAK, App, Kind, applications, starts

CALLS_OF_ENGINE = 3
TENANTS = 20
NUM_BEATS = 2000
NUM_TURNS, TOKENS = 5, 400  # turns of a session in `memory`, and tokens that each turn adds


def calls(num_engines: int, num_calls: int) -> dict[str, Any]:
    """Measure the calls, engine registrations and heartbeats of one ServeCore."""
    apps = [app for app in applications(TENANTS, 0) if app.kind is not Kind.AGENT]
    rate = num_engines * sum(CALLS_PER_S[kind] for kind in {app.kind for app in apps})
    num_calls = max(num_calls, CALLS_OF_ENGINE * num_engines)
    window = Window(0.0, num_calls / rate)
    sessions = starts([(app, 1.0) for app in apps], num_engines, PEAK, window.end_s, "size")

    async def main() -> dict[str, Any]:
        shard, stages = Shard(engine_config()), Stages()
        with bounded_collections():
            began = time.thread_time()
            await shard.add_engines(num_engines)
            join_s = time.thread_time() - began
            began = time.thread_time()
            with stages.counted():
                (outcome,) = await shard.run(sessions, [window])
            taken_s = time.thread_time() - began
            beats = await heartbeats(shard)
        shard.check_integrity()
        row = summary(outcome)
        micros = 1e6 / len(outcome.calls)
        row = {name: row[name] for name in ("engines", "calls", "hit", "busiest_over_mean")}
        row |= {name: stages.seconds[name] * micros for name in STAGES}
        row["rest"] = (taken_s - sum(stages.seconds.values())) * micros
        row["serve_core"] = (taken_s - stages.seconds[MODEL]) * micros
        row["join"] = 1e6 * join_s / num_engines
        row |= beats
        await shard.close()
        return row

    return run_virtual(main())


async def heartbeats(shard: Shard) -> dict[str, Any]:
    client = RegistrationClient(AppTransport(create_app(shard.core)))
    engines = list(enumerate(shard.engines.items()))
    beats = [engines[number % len(engines)] for number in range(NUM_BEATS)]
    times = list[float]()
    with _collecting() as pauses:
        for engine_id, (name, engine) in beats:
            began = time.thread_time()
            await client.engine_heartbeat(engine_id, name, engine.runtime_info())
            times.append(time.thread_time() - began)
    await client.close()
    engine_id, (name, engine) = engines[-1]
    request = HeartbeatRequest(
        engine_id=engine_id, engine_name=name, runtime_info=engine.runtime_info()
    )
    per_s = len(engines) / RegisteredConfig().heartbeat_interval
    beat_s = fmean(times)
    return {
        "heartbeat": 1e6 * beat_s,
        "heartbeat_p50": 1e6 * percentile(times, 50),
        "heartbeat_collector": 1e6 * sum(pauses) / NUM_BEATS,
        "heartbeat_bytes": len(orjson.dumps(request.model_dump(mode="json"))),
        "heartbeats_per_s": per_s,
        "heartbeats_of_core": per_s * beat_s,
    }


@contextmanager
def _collecting() -> Iterator[list[float]]:
    """Record the CPU seconds of each pass of the garbage collector."""
    pauses = list[float]()

    def note(phase: str, info: dict[str, int]) -> None:
        now = time.thread_time()
        if phase == "start":
            pauses.append(-now)
        else:
            pauses[-1] += now

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


def memory(num_sessions: int) -> dict[str, float]:
    """Measure sessions without calls, then with chat turns whose values are all kept."""
    app = App("tenant", "app", Kind.CHAT, 500, 1.0)

    async def talk(session: Session) -> None:
        history = list[Text]()
        for _ in range(NUM_TURNS):
            new = session.give("x" * (TOKENS // 2))
            history += [new, await session.ask([*history, new], TOKENS // 2, ideal=0)]

    async def main() -> dict[str, float]:
        shard = Shard(engine_config())
        await shard.add_engines(4)
        await talk(Session(shard.client, app))  # allocates what all sessions share
        tracemalloc.start()
        before = _num_bytes()
        sessions = [Session(shard.client, app) for _ in range(num_sessions)]
        begun = _num_bytes()
        await asyncio.gather(*map(talk, sessions))
        ended = _num_bytes()
        tracemalloc.stop()
        await shard.close()
        return {
            "sessions": num_sessions,
            "turns": NUM_TURNS,
            "tokens_of_turn": TOKENS,
            "session_bytes": (begun - before) / num_sessions,
            "turn_bytes": (ended - begun) / num_sessions / NUM_TURNS,
        }

    return run_virtual(main())


def _num_bytes() -> int:
    """Return the traced bytes, without those of the engine model, the programs and tracemalloc."""
    snapshot = tracemalloc.take_snapshot()
    others = [tracemalloc.Filter(False, name) for name in ("*/benchmark/*", "*tracemalloc*")]
    return sum(trace.size for trace in snapshot.filter_traces(others).traces)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--calls", type=int, default=6000, help="minimum number of calls")
    parser.add_argument("--sessions", type=int, default=200, help="sessions in `memory`")


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", COSTS)
    report.uses("core", CORE.model_dump(mode="json"))
    report["memory"] = memory(args.sessions)
    for num_engines in args.engines:
        report.add("sizes", calls(num_engines, args.calls))


if __name__ == "__main__":
    run_benchmark(__name__)
