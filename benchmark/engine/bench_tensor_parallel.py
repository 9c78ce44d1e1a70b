"""Steps of a model with tensor parallelism: random weights of well-known shapes in bfloat16.

    python -m benchmark.engine.bench_tensor_parallel [--ranks 2] [--models llama-3.1-8b ...]

`ms`: a step whose end is awaited. `ahead_ms`: one of many steps that are launched ahead, as in the
engine. Floors: the time to read a rank's weights and unique KV once at the copy rate of an H200, or
to compute its products at the peak rate, plus the time to send sums and largest logits over NVLink.
Waiting for other ranks is not included. `reductions` is the number of these exchanges.
`--ranks 1` measures the same on one GPU for comparison.

Only rank 0 has random KV. The KV of the other ranks is zero."""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch

from benchmark.engine.bench_gpu import (
    STEPS,
    WARM_STEPS,
    bench_prefill,
    config_of,
    load_cuda,
    run_ms,
)
from benchmark.engine.gpu_cases import COPILOT, PLAIN, Decode, Row, Sequences, Shape
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.steps import PENDING, LaunchedStep, StepPlan
from parrot.engine.models.families import spec_from_config
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.runner.cuda import CudaRunner

MODELS = ("llama-3.1-8b", "llama-3.1-70b")
DECODES = (PLAIN[0], PLAIN[2], COPILOT[2])
PREFILL = 8192
LINK_RATE = 450e9  # Bytes/s of an H200's NVLink in each direction.


def config(model: str, ranks: int) -> BuiltinConfig:
    one = config_of(model)
    instance = one.instance.model_copy(update={"tensor_parallel": ranks})
    return one.model_copy(update={"instance": instance})


def link_ms(spec: DecoderSpec, ranks: int, tokens: int, sampled: int) -> float:
    """Milliseconds to send a rank's bytes: two sums in each layer, one of embeddings, and the
    largest logits with their tokens."""
    sums = (2 * spec.num_layers + 1) * tokens * spec.hidden_size * 2 * 2 * (ranks - 1) / ranks
    logits = sampled * -(-spec.vocab_size // ranks // 4096) * 8 * (ranks - 1)
    return (sums + logits) / LINK_RATE * 1e3


def floors(shape: Shape, spec: DecoderSpec, ranks: int, case: Decode | None) -> Row:
    own = shape.prefill_floor_ms(PREFILL) if case is None else shape.decode_floor_ms(case)
    tokens, sampled = (PREFILL, 1) if case is None else (case.batch, case.batch)
    over_link = link_ms(spec, ranks, tokens, sampled)
    return {
        "floor_ms": own / ranks + over_link,
        "link_ms": over_link,
        "reductions": 0 if ranks == 1 else 2 * spec.num_layers + 1,
    }


def ahead_ms(runner: CudaRunner, sequences: Sequences) -> float:
    """Mean milliseconds of steps that are launched before the previous step's tokens are known."""
    previous: LaunchedStep | None = None
    began = 0.0
    for number in range(WARM_STEPS + STEPS):
        if number == WARM_STEPS:
            began = time.perf_counter()
        steps = sequences.next_step()
        if previous is not None:
            steps = tuple(step._replace(token_ids=[PENDING]) for step in steps)
        launched = runner.launch(StepPlan(steps), previous)
        if previous is not None:
            previous.wait()
        previous = launched
    assert previous is not None
    previous.wait()
    return (time.perf_counter() - began) / STEPS * 1e3


def bench_decode(runner: CudaRunner, case: Decode) -> Row:
    sequences = Sequences(case, runner.info, steps=2 * (WARM_STEPS + STEPS))
    plans = (sequences.next_plan() for _ in range(WARM_STEPS + STEPS))
    alone = statistics.median(run_ms(runner, plans)[WARM_STEPS:])
    return {"ms": alone, "ahead_ms": ahead_ms(runner, sequences)}


def bench_model(config: BuiltinConfig) -> Iterator[Row]:
    model, ranks = config.model, config.instance.tensor_parallel
    shape, spec = Shape.of(model), spec_from_config(KNOWN_SHAPES[model], model)
    began = time.perf_counter()
    runner, _ = load_cuda(config)
    info = runner.info
    facts: dict[str, Any] = {"weights_mib": info.model_mem, "kv_tokens": info.num_blocks * 64}
    yield {"case": "load", "seconds": time.perf_counter() - began} | facts
    for case in DECODES:
        row = {"case": case.name} | floors(shape, spec, ranks, case) | bench_decode(runner, case)
        yield row | {"over_floor": row["ahead_ms"] / row["floor_ms"]}
    row = {"case": f"prefill {PREFILL}"} | floors(shape, spec, ranks, None)
    row |= bench_prefill(runner, PREFILL, PREFILL)
    yield row | {"over_floor": row["ms"] / row["floor_ms"]}
    runner.close()


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--ranks", type=int, default=2)


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in args.models:
        settings = config(model, args.ranks)
        report.uses(model, {"config": settings.model_dump(mode="json"), "ranks": args.ranks})
        for row in bench_model(settings):
            report.add("rows", {"model": model, "ranks": args.ranks} | row)
        gc.collect()
        torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__name__)
