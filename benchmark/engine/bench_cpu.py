"""Decode speed of the builtin engine on a CPU, against transformers on the same weights.

    OMP_WAIT_POLICY=PASSIVE GOMP_SPINCOUNT=10000 python -m benchmark.engine.bench_cpu

Everything runs in one process and alternates, round by round, so that a slow moment of the machine
hits all arms alike; ratios are medians of the ratios within a round. Prompts are random tokens; the
first token (the prompt's computation) is not timed. The variables are what `parrot.engine` sets for
a server; here torch is loaded first.
"""

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.models.checkpoint import open_checkpoint
from parrot.engine.runner.cpu import ModelRunner
from parrot.engine.runner.load import load_runner
from parrot.testing.runner_driver import Driver

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
    """Tokens per second of decoding; with `shared`, all are forks of one context."""
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
    """transformers' model with the weights that the engine uses."""
    checkpoint = open_checkpoint(model)
    config = transformers.AutoConfig.for_model("llama", **checkpoint.config)
    twin = transformers.LlamaForCausalLM(config)
    twin.load_state_dict({n: checkpoint.take(n) for n in checkpoint.shapes}, strict=False)
    twin.tie_weights()
    twin.generation_config.eos_token_id = None
    return twin.to(dtype).eval()


def arms_of(
    model: str, dtypes: list[str], args: argparse.Namespace
) -> dict[str, Callable[[], float]]:
    arms: dict[str, Callable[[], float]] = {}
    for name in dtypes:
        instance = {"num_kv_cache_blocks": 4096, "num_threads": args.threads}
        config = BuiltinConfig.model_validate({"model": model, "dtype": name, "instance": instance})
        runner = load_runner(config)[0]
        for batch in (1, 8, 16):
            load = Load(batch, args.prompt, args.decode)
            arms[f"parrot_{name}_b{batch}"] = lambda r=runner, x=load: parrot_rate(r, x)
        shared = Load(8, args.prompt, args.decode)
        arms[f"parrot_{name}_b8_shared_{SHARED_PREFIX}"] = lambda r=runner, x=shared: parrot_rate(
            r, x, SHARED_PREFIX
        )
        if not args.without_transformers:
            twin = twin_of(model, DTYPES[name])
            for batch in (1, 8):
                load = Load(batch, args.prompt, args.decode)
                arms[f"transformers_{name}_b{batch}"] = lambda t=twin, x=load: transformers_rate(
                    t, x
                )
    return arms


def ratios_of(rates: dict[str, list[float]], dtypes: list[str]) -> dict[str, float]:
    pairs = {}
    for name in dtypes:
        one = f"parrot_{name}_b1"
        pairs |= {
            f"{name}: batch 8 / batch 1": (f"parrot_{name}_b8", one),
            f"{name}: batch 16 / batch 1": (f"parrot_{name}_b16", one),
            f"{name}: parrot / transformers, batch 1": (one, f"transformers_{name}_b1"),
            f"{name}: parrot / transformers, batch 8": (
                f"parrot_{name}_b8",
                f"transformers_{name}_b8",
            ),
        }
    pairs["parrot bfloat16 / transformers float32, batch 1"] = (
        "parrot_bfloat16_b1",
        "transformers_float32_b1",
    )
    return {
        label: round(
            statistics.median(a / b for a, b in zip(rates[top], rates[bottom], strict=True)), 3
        )
        for label, (top, bottom) in pairs.items()
        if top in rates and bottom in rates
    }


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--decode", type=int, default=64)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--without-transformers", action="store_true")


def measure(args: argparse.Namespace, report: Report) -> None:
    arms = arms_of(args.model, args.dtypes, args)
    rates: dict[str, list[float]] = {name: [] for name in arms}
    for round_number in range(args.rounds + 1):  # the first one warms up
        for name, arm in arms.items():
            rate = arm()
            if round_number:
                rates[name].append(rate)
            print(f"round {round_number}  {name:38s} {rate:8.1f} tokens/s", flush=True)
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
