"""Speed of the builtin engine on a GPU: random weights of well-known shapes.

    python -m benchmark.engine.bench_gpu [--models qwen3-0.6b ...] [--parts decode http ...]

Parts: `decode`, `prefill` and `mixed` (a prompt chunk next to decodes) run steps in this process
without an engine. `load256` runs the engine core without HTTP. `http` starts the engine's server
and sends requests to it. A floor is the time to read weights and unique KV once at the copy rate of
an H200, or to compute all products at its peak rate. Drafts are off, so that a step gives each
sequence one token (`bench_drafts` measures drafts). Contexts of `decode` begin with random KV.
"""

import argparse
import asyncio
import gc
import json
import statistics
import tempfile
import time
from array import array
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch

from benchmark.engine import gpu_http
from benchmark.engine.core_load import serve_all
from benchmark.engine.gpu_cases import (
    CROWD,
    DECODES,
    LONG_MODELS,
    MIXED,
    MODELS,
    OTHER_MODELS,
    PREFILLS,
    Decode,
    Row,
    Sequences,
    Shape,
    spread_ms,
)
from benchmark.engine.vllm import vllm_ms
from benchmark.kernels.timing import replay_us
from benchmark.results import Report, run
from parrot.cli.bench.requests import requests_256
from parrot.cluster import Cluster
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.output import Language
from parrot.engine.core.steps import StepPlan
from parrot.engine.models.quantisation import group_size
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import TokenizerResponse
from parrot.utils.clock import MonotonicClock

PARTS = ("decode", "prefill", "mixed", "load256", "http")
WARM_STEPS, STEPS = 10, 60
LOAD_TIMEOUT_S = 240.0
# Random codes of four bits, with a scale and a zero for each group of inputs.
FOUR_BITS = {
    f"int4-g{size}": {"quant_method": "awq", "bits": 4, "group_size": size} for size in (32, 128)
}
DTYPES = ("bfloat16", "fp8", *FOUR_BITS)
MAX_LENGTHS = {"gemma-3-27b": 98_304}


def config_of(
    model: str, *, shares: bool = True, kv: str = "auto", dtype: str = "bfloat16"
) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": model,
            "device": "cuda",
            "dtype": dtype,
            "scheduler": {
                "max_batch_size": 256,
                "max_num_batched_tokens": 8192,
                # Models with random weights repeat themselves, which drafts would guess.
                "max_draft_tokens": 0,
            },
            "instance": {
                "load_format": "dummy",
                "max_seq_len": MAX_LENGTHS.get(model, 16384),
                "shared_prefix": shares,
                "host_kv_gb": 0,
                "kv_cache_dtype": kv,
            },
        }
    )


def load_cuda(config: BuiltinConfig) -> tuple[CudaRunner, TokenizerResponse]:
    """The runner with random KV in its pool, for the contexts of `decode`."""
    runner, tokenizer, _ = load_runner(config)
    assert isinstance(runner, CudaRunner)
    cache = runner._cache
    for layer in (layer for pool in cache.pools for layer in pool):
        if not cache.exponents:
            layer.normal_()
        else:
            layer.random_(0, 256).bitwise_and_(0xBF)  # Numbers from -1.9 to 1.9.
    for exponents in cache.exponents:
        exponents.fill_(127)
    return runner, tokenizer


def run_ms(runner: CudaRunner, plans: Iterable[StepPlan]) -> list[float]:
    """Milliseconds of each step, from the plan to the tokens."""
    times = []
    for plan in plans:
        began = time.perf_counter()
        result = runner.run(plan)
        times.append((time.perf_counter() - began) * 1e3)
        assert not result.errors, result.errors
        assert not result.broken, result.broken
    return times


def bench_decode(runner: CudaRunner, case: Decode) -> Row:
    """`ms`: a step as seen by the engine core. `gpu_ms`: its CUDA graph alone."""
    sequences = Sequences(case, runner.info)
    shared = runner.planner.num_shared_steps
    plans = (sequences.next_plan() for _ in range(WARM_STEPS + STEPS))
    times = run_ms(runner, plans)[WARM_STEPS:]
    return {
        "ms": statistics.median(times),
        "p90_ms": sorted(times)[int(STEPS * 0.9)],
        "gpu_ms": _graph_ms(runner),
        "shared_steps": runner.planner.num_shared_steps - shared,
    }


def _graph_ms(runner: CudaRunner) -> float | None:
    graphs, work = runner.computer.graphs, runner.planner.last
    assert graphs is not None
    assert work is not None
    captured = (graph for rooms in graphs._graphs.values() for graph in rooms.values())
    used = next((graph for graph in captured if graph.plan.work is work), None)
    return None if used is None else replay_us(used.graph, 20) / 1e3


def bench_prefill(runner: CudaRunner, tokens: int, chunk: int) -> Row:
    times = []
    for _ in range(2 + gpu_http.PREFILL_RUNS):
        sequences = Sequences(Decode(f"prefill {tokens}", 1, 0), runner.info)
        parts = sequences.fill(tokens, chunk)
        torch.cuda.synchronize()
        changes = sequences.slots_of(parts[-1].block_ids, runner.info)
        plans = [StepPlan((part,), slot_changes=changes) for part in parts]
        times.append(sum(run_ms(runner, plans)))
    return spread_ms(times[2:])


def bench_mixed(runner: CudaRunner, chunk: int) -> Row:
    sequences = Sequences(CROWD, runner.info)
    plans = (sequences.next_plan(part) for part in sequences.fill(8192, chunk))
    return {"ms": statistics.median(run_ms(runner, plans))}


def bench_256(config: BuiltinConfig, runner: CudaRunner, tokenizer: TokenizerResponse) -> Row:
    """All requests at once, greedy, through the engine core in this thread."""
    core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
    times = []
    for attempt in range(2):  # Each attempt has new tokens, so that nothing is cached.
        requests = [
            (array("i", [token + attempt for token in prompt]), output)
            for prompt, output in requests_256()
        ]
        times.append(serve_all(core, requests).seconds)
    tokens, best = sum(output for _, output in requests), min(times)
    return {"seconds": best, "tokens_per_s": tokens / best, "steps": core.runtime_info().num_steps}


def bench_model(config: BuiltinConfig, parts: list[str]) -> Iterator[Row]:
    model = config.model
    quantised, is_plain = config.instance.kv_cache_dtype == "fp8", config.dtype == "bfloat16"
    matrix_bytes = 1.0 if config.dtype == "fp8" else 2.0
    if (group := group_size(KNOWN_SHAPES[model])) is not None:
        matrix_bytes = 0.5 + 4 / group
    shape = Shape.of(model, quantised=quantised, matrix_bytes=matrix_bytes)
    began = time.perf_counter()
    loaded, tokenizer = load_cuda(config)
    yield {"case": "load", "seconds": time.perf_counter() - began}
    if "decode" in parts:
        for case in DECODES[model]:
            row: Row = {"case": case.name, "floor_ms": shape.decode_floor_ms(case)}
            row |= {"vllm_ms": vllm_ms(model, case.name) if is_plain else None}
            row |= bench_decode(loaded, case)
            yield row | {"over_floor": row["ms"] / row["floor_ms"]}
    if "prefill" in parts:
        for tokens, chunk in PREFILLS[model]:
            row = {"case": f"prefill {tokens}", "chunk": chunk}
            row |= {"floor_ms": shape.prefill_floor_ms(tokens)}
            row |= bench_prefill(loaded, tokens, chunk)
            theirs = vllm_ms(model, f"prefill {tokens}") if is_plain else None
            yield row | {"vllm_ms": theirs}
    if "mixed" in parts and CROWD in DECODES[model]:
        for chunk in MIXED:
            yield {"case": f"{CROWD.name} + {chunk}"} | bench_mixed(loaded, chunk)
    if "load256" in parts and model not in LONG_MODELS:
        yield {"case": "256, no HTTP"} | bench_256(config, loaded, tokenizer)


async def bench_http(config: BuiltinConfig, report: Report) -> None:
    """Run the engine's server as another process, and measure it over HTTP."""
    model = config.model
    with tempfile.TemporaryDirectory(prefix=f"{model}_") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(KNOWN_SHAPES[model]))
        config = config.model_copy(update={"model": folder})
        engine = config.model_dump(mode="json", exclude={"engine_name", "port"})
        began = time.perf_counter()
        cluster = Cluster(engines=[engine], with_core=False, ready_timeout_s=LOAD_TIMEOUT_S)
        with cluster:
            ready = {"case": "HTTP ready", "seconds": time.perf_counter() - began}
            report.add("rows", {"model": model} | ready)
            async for row in gpu_http.measure(model, cluster.url(cluster.engine_names[0])):
                report.add("rows", {"model": model} | row)


def arguments(parser: argparse.ArgumentParser) -> None:
    known = (*MODELS, *OTHER_MODELS)
    parser.add_argument("--models", nargs="+", choices=known, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-sharing", dest="shares", action="store_false")
    parser.add_argument("--kv", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in LONG_MODELS:
        KNOWN_SHAPES[model]["max_position_embeddings"] = 16384
    for model in args.models:
        if args.dtype in FOUR_BITS:
            KNOWN_SHAPES[model]["quantization_config"] = FOUR_BITS[args.dtype]
        dtype = "auto" if args.dtype in FOUR_BITS else args.dtype
        config = config_of(model, shares=args.shares, kv=args.kv, dtype=dtype)
        settings = {"config": config.model_dump(mode="json"), "shape": KNOWN_SHAPES[model]}
        report.uses(model, settings)
        if "http" in args.parts:
            asyncio.run(bench_http(config, report))
        if set(args.parts) - {"http"}:
            for row in bench_model(config, args.parts):
                report.add("rows", {"model": model} | row)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__name__)
