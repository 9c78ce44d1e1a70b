"""Decode speed of the builtin engine on a CPU, against transformers on the same weights.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000 python -m benchmark.engine.bench_cpu

All arms run in one process and take turns, so that a slow phase of the machine affects all of them.
Ratios are medians of the ratios within a round. Prompts are random tokens. The first token is not
timed, since it includes the prompt's computation. `parrot.engine` sets these environment variables
for a server. Here they must be set outside, because torch is loaded first.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import transformers

from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.load import load_runner
from tests.support.runner_driver import Driver

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
SHARED_PREFIX = 1000


@dataclass(frozen=True)
class Load:
    """`batch` sequences of `prompt` tokens each, of which `decode` tokens are timed."""

    batch: int
    prompt: int
    decode: int

    def prompts(self, shared: int = 0) -> list[list[int]]:
        rng = random.Random(0)
        prefix = [rng.randrange(100, 20_000) for _ in range(shared)]
        return [
            prefix + [rng.randrange(100, 20_000) for _ in range(self.prompt)]
            for _ in range(self.batch)
        ]


def parrot_rate(runner: ModelRunner, load: Load, shared: int = 0) -> float:
    """Decoded tokens per second. With `shared`, all sequences are forks of one context."""
    driver = Driver(runner)
    prompts = load.prompts(shared)
    contexts = [driver.context(prompt) for prompt in prompts]
    if shared:
        parent = driver.context(prompts[0][:shared])
        driver.step([(parent, shared)])
        for i, prompt in enumerate(prompts):
            contexts[i] = driver.fork(parent, shared)
            contexts[i].tokens = prompt
    outputs = driver.generate(contexts, 1)
    started = time.perf_counter()
    outputs = driver.generate(contexts, load.decode)
    elapsed = time.perf_counter() - started
    return sum(map(len, outputs)) / elapsed


def transformers_rate(model: Any, load: Load) -> float:
    ids = torch.tensor(load.prompts())

    def timed(num_tokens: int) -> float:
        started = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids, max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
            )
        return time.perf_counter() - started

    return load.batch * load.decode / (timed(load.decode + 1) - timed(1))


def twin_of(model: str, dtype: torch.dtype) -> Any:
    """A transformers model with the engine's weights."""
    checkpoint = open_checkpoint(model)
    config = transformers.AutoConfig.for_model("llama", **checkpoint.config)
    twin = transformers.LlamaForCausalLM(config)
    twin.load_state_dict({n: checkpoint.take(n) for n in checkpoint.shapes}, strict=False)
    twin.tie_weights()
    twin.generation_config.eos_token_id = None
    return twin.to(dtype).eval()


def arms_of(args: argparse.Namespace, dtype: str) -> dict[str, Callable[[], float]]:
    """The timed functions by name. Each returns tokens per second."""
    instance = {"num_kv_cache_blocks": 4096, "num_threads": args.threads}
    runner = load_runner(
        BuiltinConfig.model_validate({"model": args.model, "dtype": dtype, "instance": instance})
    )[0]
    loads = {batch: Load(batch, args.prompt, args.decode) for batch in (1, 8, 16)}
    arms: dict[str, Callable[[], float]] = {
        f"parrot_{dtype}_b{batch}": partial(parrot_rate, runner, load)
        for batch, load in loads.items()
    }
    shared = partial(parrot_rate, runner, loads[8], SHARED_PREFIX)
    arms[f"parrot_{dtype}_b8_shared_{SHARED_PREFIX}"] = shared
    if dtype in DTYPES and not args.without_transformers:
        twin = twin_of(args.model, DTYPES[dtype])
        for batch in (1, 8):
            arm = partial(transformers_rate, twin, loads[batch])
            arms[f"transformers_{dtype}_b{batch}"] = arm
    return arms


def ratios_of(rates: dict[str, list[float]], dtypes: list[str]) -> dict[str, float]:
    pairs = {}
    for name in dtypes:
        ours, theirs = f"parrot_{name}", f"transformers_{name}"
        pairs[f"{name}: batch 8 / batch 1"] = f"{ours}_b8", f"{ours}_b1"
        pairs[f"{name}: batch 16 / batch 1"] = f"{ours}_b16", f"{ours}_b1"
        pairs[f"{name}: parrot / transformers, batch 1"] = f"{ours}_b1", f"{theirs}_b1"
        pairs[f"{name}: parrot / transformers, batch 8"] = f"{ours}_b8", f"{theirs}_b8"
    four_bit = "auto: parrot's, of which some are in four bits / parrot's in bfloat16, batch 1"
    pairs[four_bit] = "parrot_auto_b1", "parrot_bfloat16_b1"
    both = "parrot bfloat16 / transformers float32, batch 1"
    pairs[both] = "parrot_bfloat16_b1", "transformers_float32_b1"
    return {
        label: round(
            statistics.median(a / b for a, b in zip(rates[top], rates[bottom], strict=True)), 3
        )
        for label, (top, bottom) in pairs.items()
        if top in rates and bottom in rates
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtypes", nargs="+", choices=[*DTYPES, "auto"], default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--without-transformers", action="store_true")


def measure(args: argparse.Namespace, report: Report) -> None:
    arms = {name: arm for dtype in args.dtypes for name, arm in arms_of(args, dtype).items()}
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(args.rounds + 1):  # The first round warms up.
        for name, arm in arms.items():
            rate = arm()
            if round_number:
                rates[name].append(rate)
            print(f"round {round_number}  {name:38s} {rate:8.1f} tokens/s", flush=True)
    report.uses("model", args.model)
    report["machine"] = {
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY"),
        "GOMP_SPINCOUNT": os.environ.get("GOMP_SPINCOUNT"),
        "threads": torch.get_num_threads(),
    }
    report["tokens_per_s"] = {name: round(statistics.median(r), 1) for name, r in rates.items()}
    report["spread"] = {name: [round(min(r), 1), round(max(r), 1)] for name, r in rates.items()}
    report["ratios"] = ratios_of(rates, args.dtypes)


if __name__ == "__main__":
    run(__name__)
