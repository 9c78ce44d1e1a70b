"""How fast a large cluster is simulated: the real ServeCore, and hundreds of engines' cores with
their contexts, on one core of one machine.

    python benchmark/serve/bench_simulation.py [--engines 512] [--tasks 10000] [--output FILE.json]

Applications of ten calls each: nine in parallel that share a long prefix, and one that takes all
their outputs. All are submitted and read at time 0, so that most calls queue."""

import argparse
import asyncio
import json
import random
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import ROOT, bound, circumstances, core_config, output_id, places, save, submit, words

from parrot.engine.config import SimConfig, load_engine_config
from parrot.protocol.public import CompletionInfo
from parrot.simulation import SimClient, SimCluster, VirtualLoop, run_virtual

COSTS = ROOT / "sample_configs" / "engine" / "sim_llama_3_1_8b.json"
NUM_MAPS = 9
NUM_PREFIXES = 50
SLOTS = 8  # completions that ServeCore may place on one engine at once


async def application(
    client: SimClient, prefix: str, rng: random.Random
) -> tuple[dict[str, Any], list[CompletionInfo]]:
    scope = (await client.create_session()).model_dump()

    async def call(template: str, inputs: Sequence[dict[str, Any]], length: int) -> str:
        sampling = {"max_gen_length": length}
        return output_id(await submit(client, scope, template + " {{out}}", inputs, sampling))

    parts = []
    for _ in range(NUM_MAPS):
        value = {"name": "text", "value": words(rng, rng.randint(100, 600))}
        parts.append(await call(prefix + "{{text}}", [value], rng.randint(25, 150)))
    final = await call(f"Join: {places(NUM_MAPS, ' ')}", bound(parts), 200)
    await client.get_var(**scope, var_id=final)
    return scope, (await client.session_info(**scope)).calls


async def simulate(num_engines: int, num_tasks: int, leaps: bool) -> dict[str, Any]:
    began = time.process_time()
    wall = time.perf_counter()
    rng = random.Random(0)
    prefixes = [words(rng, 1000) for _ in range(NUM_PREFIXES)]
    core = core_config(max_queue_size=10 * num_tasks)
    config = load_engine_config(str(COSTS), {"tasks_capacity": SLOTS})
    assert isinstance(config, SimConfig)
    async with SimCluster(num_engines, engine=config, core=core, leaps=leaps) as cluster:
        up = time.process_time()
        client = cluster.client()
        apps = await asyncio.gather(
            *(
                application(client, rng.choice(prefixes), rng)
                for _ in range(num_tasks // (NUM_MAPS + 1))
            )
        )
        ran = time.process_time()
        simulated_s = cluster.clock.now()
        loop = asyncio.get_running_loop()
        timers = loop.num_timers if isinstance(loop, VirtualLoop) else 0
        cluster.check_integrity()
        checked = time.process_time()
        engines = [engine.service.runtime_info() for engine in cluster.engines.values()]
    calls = [call for _, rows in apps for call in rows]
    tokens = sum(call.output_tokens for call in calls)
    steps = sum(engine.num_steps for engine in engines)
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engines", type=int, default=512)
    parser.add_argument("--tasks", type=int, default=10_000)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--every_step", action="store_true", help="each step an event of its own")
    args = parser.parse_args()
    row = run_virtual(simulate(args.engines, args.tasks, not args.every_step))
    report = circumstances() | {"row": row}
    print(json.dumps(report, indent=1))
    if args.output is not None:
        save(args.output, report)


if __name__ == "__main__":
    main()
