"""The cost of prefix caching in the engine core, and its savings.

    python -m benchmark.engine.bench_prefix_caching --output benchmark/results/prefix_caching.json

A client sends requests to the engine directly. Each request has a new context, which is freed at
its end. There is no model, so a step takes only the time of the engine core.
"""

import argparse
import random
from array import array
from statistics import median
from typing import Any

from benchmark.engine.core_load import serve_all
from benchmark.results import Report, run
from parrot.engine.config import SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.sim import VOCAB_SIZE, SimRunner, byte_tokenizer_response
from parrot.utils.clock import MonotonicClock

LANGUAGE = Language.of(byte_tokenizer_response())
NUM_REQUESTS, OUTPUT, REPEATS = 256, 32, 7
BLOCK_SIZE = 16


def time_steps(prompts: list["array[int]"], prefix_caching: bool) -> dict[str, float]:
    config = SimConfig.model_validate(
        {
            "scheduler": {"prefix_caching": prefix_caching, "max_num_batched_tokens": 8192},
            "instance": {"num_kv_cache_blocks": 100_000, "block_size": BLOCK_SIZE},
        }
    )
    clock = MonotonicClock()
    core = EngineCore(config, SimRunner(config.instance, clock), LANGUAGE, clock)
    served = serve_all(core, [(prompt, OUTPUT) for prompt in prompts])
    return {
        "seconds": served.seconds,
        "num_steps": core.runtime_info().num_steps or 0,
        "computed_tokens": sum(usage.computed_tokens for usage in served.usages),
    }


def compare(shared: int, own: int) -> dict[str, Any]:
    """All prompts begin with the same `shared` tokens. The next `own` tokens differ."""
    numbers = random.Random(0)
    beginning = numbers.choices(range(VOCAB_SIZE), k=shared)
    prompts = [
        array("i", beginning + numbers.choices(range(VOCAB_SIZE), k=own))
        for _ in range(NUM_REQUESTS)
    ]
    runs: dict[str, list[dict[str, float]]] = {"off": [], "on": []}
    for _ in range(REPEATS):
        for name, found in runs.items():
            found.append(time_steps(prompts, name == "on"))
    row: dict[str, Any] = {"shared": shared, "own": own}
    for name, found in runs.items():
        row[name] = found[0] | {"seconds": median(run["seconds"] for run in found)}
    extra_s = row["on"]["seconds"] - row["off"]["seconds"]
    return row | {"extra_us_per_request": extra_s / NUM_REQUESTS * 1e6}


def arguments(parser: argparse.ArgumentParser) -> None:
    """There are no options."""


def measure(args: argparse.Namespace, report: Report) -> None:
    report |= {"num_requests": NUM_REQUESTS, "output_tokens": OUTPUT, "block_size": BLOCK_SIZE}
    report["rows"] = [compare(0, 512), compare(0, 2048), compare(2000, 48)]


if __name__ == "__main__":
    run(__name__)
