"""Prefix hits of a model with sliding windows, while chat sessions take turns.

    python -m benchmark.engine.bench_windows --output benchmark/results/windows.json

Sessions with different prompts take turns, round after round. Each turn has the session's earlier
text, a short question and a short output. Contexts are freed after each turn, as with the OpenAI
API. An ideal cache has all full blocks of the previous turn. `occupancy` is the fraction of all
blocks that the sessions need. `slots` is the fraction of all slots that their windows need. Sizes
are those of a model on a GPU, but no model is loaded.
"""

import argparse
import random
from array import array
from collections.abc import Sequence
from dataclasses import replace

import torch

from benchmark.engine.core_load import serve_all
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig, SimConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import Landed, RunnerInfo, StepPlan, StepResult, WindowInfo
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.host.copies import GIB
from parrot.engine.runner.sizes import KvMemory, KvSizes
from parrot.engine.sim import VOCAB_SIZE, SimRunner, byte_tokenizer_response
from parrot.utils.clock import MonotonicClock

LANGUAGE = Language.of(byte_tokenizer_response())
BLOCK_SIZE, CHUNK = 64, 2048
LENGTHS = (4096, 8192, 16384, 32768)  # Tokens of a session before its first question.
OCCUPANCIES = (0.25, 0.6, 0.9)
ROUNDS, QUESTION, OUTPUT = 4, 40, 20
# Of Gemma 3 27B on an H200: a token of a prompt, and its KV in windows at 50 GB/s.
TOKEN_S, COPY_S = 66e-6, 8.5e-6


class WorkClock(MonotonicClock):
    """A clock that advances only with the work of a `WindowedSim`."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        return self._now

    def work(self, seconds: float) -> None:
        self._now += seconds


class WindowedSim(SimRunner):
    """A `SimRunner` that reports window slots but does not use them."""

    def __init__(self, config: SimConfig, window: WindowInfo, clock: WorkClock) -> None:
        super().__init__(config.instance, clock)
        self._window = window
        self._clock = clock

    @property
    def info(self) -> RunnerInfo:
        return replace(super().info, window=self._window)

    def run(self, plan: StepPlan) -> StepResult:
        self._clock.work(plan.num_tokens * TOKEN_S)
        return super().run(plan)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        if wait and (end := self.next_landing) is not None:
            self._clock.work(max(0.0, end - self._clock.now()))
        return super().landed(wait=wait)


def sizes_of(model: str, gib: float, host_gib: float = 0.0) -> tuple[KvSizes, int]:
    """The sizes in `gib` GiB and `host_gib` GiB of CPU memory, and the window of the model."""
    spec = spec_from_config(KNOWN_SHAPES[model], model)
    memory = KvMemory(spec, BuiltinConfig(), BLOCK_SIZE, torch.bfloat16)
    num_blocks = int(gib * GIB) // memory.layout.block_bytes
    sizes = memory.with_host(memory.in_memory_of(num_blocks), int(host_gib * GIB))
    assert spec.window is not None
    assert sizes.num_slots, f"{model} has no window slots in {gib} GiB"
    return sizes, spec.window


def core_of(sizes: KvSizes, window: int) -> EngineCore:
    config = SimConfig.model_validate(
        {
            "scheduler": {"max_num_batched_tokens": CHUNK},
            "instance": {
                "num_kv_cache_blocks": sizes.num_blocks,
                "num_host_kv_blocks": sizes.num_host_blocks,
                "host_token_s": COPY_S,
                "block_size": BLOCK_SIZE,
                "max_seq_len": 131072,
            },
        }
    )
    clock = WorkClock()
    windows = WindowInfo(sizes.num_slots, window, num_host_slots=sizes.num_host_slots)
    return EngineCore(config, WindowedSim(config, windows, clock), LANGUAGE, clock)


def hit_rate(sizes: KvSizes, window: int, length: int, occupancy: float) -> dict[str, float]:
    """The found fraction of the ideal hits, after the first round."""
    last = length + ROUNDS * (QUESTION + OUTPUT)
    count = max(1, int(occupancy * sizes.num_blocks / -(-last // BLOCK_SIZE)))
    num_slots = count * (-(-window // BLOCK_SIZE) + 1)
    core = core_of(sizes, window)
    numbers = random.Random(0)
    texts = [numbers.choices(range(1, VOCAB_SIZE), k=length) for _ in range(count)]
    found = ideal = 0
    for number in range(ROUNDS):
        for text in texts:
            known = len(text) // BLOCK_SIZE * BLOCK_SIZE if number else 0
            text += numbers.choices(range(1, VOCAB_SIZE), k=QUESTION)
            served = serve_all(core, [(array("i", text), OUTPUT)])
            ideal += known
            found += served.usages[0].cached_tokens if number else 0
            text += served.outputs[0]
    core.check_integrity()
    slots = num_slots / sizes.num_slots
    return {"sessions": count, "slots": slots, "hits_of_ideal": found / ideal}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="gemma-3-27b")
    parser.add_argument("--gib", type=float, default=60.0, help="memory for KV")
    parser.add_argument("--host-gib", type=float, default=0.0, help="CPU memory for KV")


def measure(args: argparse.Namespace, report: Report) -> None:
    sizes, window = sizes_of(args.model, args.gib, args.host_gib)
    report.uses(args.model, KNOWN_SHAPES[args.model])
    report |= {"model": args.model, "gib": args.gib, "window": window, "rounds": ROUNDS}
    report |= {"num_blocks": sizes.num_blocks, "num_slots": sizes.num_slots}
    report |= {"host_gib": args.host_gib, "num_host_slots": sizes.num_host_slots}
    for length in LENGTHS:
        for occupancy in OCCUPANCIES:
            row = {"length": length, "occupancy": occupancy}
            report.add("rows", row | hit_rate(sizes, window, length, occupancy))


if __name__ == "__main__":
    run(__name__)
