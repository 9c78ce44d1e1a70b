"""The speed of simulating a large cluster on one core: the real ServeCore, and hundreds of engine
cores with their contexts.

    python -m benchmark.serve.bench_simulation [--engines 512] [--tasks 10000]

Applications have ten calls: nine in parallel with a long shared prefix, and one that joins their
outputs. All are submitted and read at time 0, so that most calls queue."""

import argparse
import asyncio
import random
import resource
import time
from typing import Any

from benchmark.results import Report, run
from benchmark.simulated import ENGINES, core_config, sim_engine, words
from parrot.cli.bench.sessions import BenchSession, Data, spaced
from parrot.protocol.public import CompletionInfo
from parrot.protocol.serve_client import ServeClient
from parrot.simulation import SimCluster, VirtualLoop, run_virtual

COSTS = ENGINES / "sim_llama_3_1_8b.json"
NUM_MAPS = 9
NUM_PREFIXES = 50
SLOTS = 8  # Completions that ServeCore may place on one engine at once.


async def application(client: ServeClient, prefix: str, rng: random.Random) -> list[CompletionInfo]:
    session = await BenchSession.begin(client)
    parts = []
    for _ in range(NUM_MAPS):
        text = Data(words(rng, rng.randint(100, 600)))
        parts.append(await session.call([prefix, text, " "], rng.randint(25, 150)))
    await session.read(await session.call(["Join: ", *spaced(parts)], 200))
    return (await session.info()).calls


async def simulate(num_engines: int, num_tasks: int, leaps: bool) -> dict[str, Any]:
    began, wall = time.process_time(), time.perf_counter()
    rng = random.Random(0)
    prefixes = [words(rng, 1000) for _ in range(NUM_PREFIXES)]
    core = core_config(max_queue_size=10 * num_tasks)
    config = sim_engine(COSTS).model_copy(update={"tasks_capacity": SLOTS})
    async with SimCluster(num_engines, engine=config, core=core, leaps=leaps) as cluster:
        up = time.process_time()
        client = cluster.client()
        programs = [
            application(client, rng.choice(prefixes), rng)
            for _ in range(num_tasks // (NUM_MAPS + 1))
        ]
        calls = [call for rows in await asyncio.gather(*programs) for call in rows]
        ran = time.process_time()
        simulated_s = cluster.clock.now()
        loop = asyncio.get_running_loop()
        timers = loop.num_timers if isinstance(loop, VirtualLoop) else 0
        cluster.check_integrity()
        checked = time.process_time()
        steps = sum(e.service.runtime_info().num_steps for e in cluster.engines.values())
    tokens = sum(call.output_tokens for call in calls)
    run_s = ran - up
    return {
        "engines": num_engines,
        "tasks": len(calls),
        "placements": sum(call.attempts for call in calls),
        "unfinished": sum(call.state != "done" for call in calls),
        "engines_used": len({call.engine for call in calls}),
        "simulated_s": simulated_s,
        "wall_s": time.perf_counter() - wall,
        "cpu_start_s": up - began,
        "cpu_run_s": run_s,
        "cpu_check_integrity_s": checked - ran,
        "steps": steps,
        "output_tokens": tokens,
        "prompt_tokens": sum(call.cached_tokens + call.computed_tokens for call in calls),
        "cached_tokens": sum(call.cached_tokens for call in calls),
        "tasks_per_cpu_s": len(calls) / run_s,
        "steps_per_cpu_s": steps / run_s,
        "output_tokens_per_cpu_s": tokens / run_s,
        "timers": timers,
        "timers_per_cpu_s": timers / run_s,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument(
        "--every_step", action="store_true", help="simulate each step as a separate event"
    )


def measure(args: argparse.Namespace, report: Report) -> None:
    report.uses("engine", COSTS)
    report["row"] = run_virtual(simulate(args.engines, args.tasks, not args.every_step))


if __name__ == "__main__":
    run(__name__)
