"""Speed of the builtin engine on a GPU: random weights of well-known shapes, in bfloat16.

    python -m benchmark.engine.bench_gpu [--models qwen3-0.6b ...] [--parts decode http ...]

Parts: `decode`, `prefill` and `mixed` (a part of a prompt beside decodes) run steps in this
process, without an engine around them; `load256`
runs the engine core without HTTP; `http` starts the engine's server and asks it from here. Floors:
weights and unique KV once at the copy rate of an H200, or the arithmetic at its matrix rate.
Contexts of `decode` begin with random KV.
"""

import argparse
import asyncio
import gc
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import torch

from benchmark.apps.workloads.shared_prompts import requests_256
from benchmark.engine import gpu_http
from benchmark.engine.gpu_cases import (
    CROWD,
    DECODES,
    MIXED,
    PREFILLS,
    Decode,
    Sequences,
    Shape,
)
from benchmark.engine.vllm import vllm_ms
from benchmark.results import Report, run
from parrot.engine.config import BuiltinConfig
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.jobs import EngineRequest, Piece
from parrot.engine.core.output import Language
from parrot.engine.core.plan import StepPlan
from parrot.engine.models.shapes import KNOWN_SHAPES
from parrot.engine.runner.cuda import CudaRunner
from parrot.engine.runner.load import load_runner
from parrot.protocol.engine_api import TokenizerResponse
from parrot.protocol.sampling import SamplingConfig
from parrot.testing.answer import Answer
from parrot.utils.clock import MonotonicClock

MODELS = ("qwen3-0.6b", "llama-3.1-8b", "llama-2-7b", "llama-2-13b")
LONG_MODELS = ("llama-2-7b", "llama-2-13b")  # with contexts beyond their own limit
PARTS = ("decode", "prefill", "mixed", "load256", "http")
WARM_STEPS, STEPS = 10, 60
Row = dict[str, Any]


def config_of(model: str, *, shares: bool = True) -> BuiltinConfig:
    return BuiltinConfig.model_validate(
        {
            "model": model,
            "device": "cuda",
            "dtype": "bfloat16",
            "scheduler": {"max_batch_size": 256, "max_num_batched_tokens": 8192},
            "instance": {
                "load_format": "dummy",
                "max_seq_len": 16384,
                "shared_prefix": shares,
            },
        }
    )


def load_cuda(config: BuiltinConfig) -> tuple[CudaRunner, TokenizerResponse]:
    """The runner with random KV in its pool, which contexts of `decode` begin with."""
    runner, tokenizer = load_runner(config)
    assert isinstance(runner, CudaRunner)
    for layer in range(runner._cache.pool.shape[0]):
        runner._cache.pool[layer].normal_()
    return runner, tokenizer


def bench_decode(runner: CudaRunner, case: Decode) -> Row:
    """`ms`: a step as the engine core sees it, plan in, tokens out. `gpu_ms`: its graph alone."""
    sequences = Sequences(case, runner.info.block_size, runner.info.num_blocks)
    times = []
    shared = runner.num_shared_steps
    for _ in range(WARM_STEPS + STEPS):
        plan = StepPlan(sequences.next_step())
        began = time.perf_counter()
        result = runner.run(plan)
        times.append((time.perf_counter() - began) * 1e3)
        assert len(result.tokens) == case.batch, result.errors
    return {
        "ms": statistics.median(times[WARM_STEPS:]),
        "p90_ms": sorted(times[WARM_STEPS:])[int(STEPS * 0.9)],
        "gpu_ms": _graph_ms(runner),
        "shared_steps": runner.num_shared_steps - shared,
    }


def _graph_ms(runner: CudaRunner) -> float | None:
    graphs, work = runner.computer.graphs, runner._planner.last
    assert graphs is not None
    assert work is not None
    captured = (graph for rooms in graphs._graphs.values() for graph in rooms.values())
    used = [graph for graph in captured if graph.work is work]
    if not used:
        return None
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(21)]
    marks[0].record()
    for mark in marks[1:]:
        used[0].graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))


def bench_prefill(runner: CudaRunner, tokens: int, chunk: int) -> Row:
    times = []
    for _ in range(2 + gpu_http.PREFILL_RUNS):
        case = Decode(f"prefill {tokens}", 1, 0)
        sequences = Sequences(case, runner.info.block_size, runner.info.num_blocks)
        steps = sequences.fill(tokens, chunk)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for step in steps:
            runner.run(StepPlan((step,)))
        times.append((time.perf_counter() - began) * 1e3)
    measured = sorted(times[2:])
    return {"ms": statistics.median(measured), "least_ms": measured[0], "most_ms": measured[-1]}


def bench_mixed(runner: CudaRunner, chunk: int) -> Row:
    sequences = Sequences(CROWD, runner.info.block_size, runner.info.num_blocks)
    times = []
    for part in sequences.fill(8192, chunk):
        plan = StepPlan((*sequences.next_step(), part))
        began = time.perf_counter()
        runner.run(plan)
        times.append((time.perf_counter() - began) * 1e3)
    return {"ms": statistics.median(times)}


def bench_256(config: BuiltinConfig, runner: CudaRunner, tokenizer: TokenizerResponse) -> Row:
    """All requests at once, greedy, through the engine core in this thread."""
    core = EngineCore(config, runner, Language.of(tokenizer), MonotonicClock())
    requests, best = requests_256(), None
    for attempt in range(2):
        sinks = [Answer() for _ in requests]
        began = time.perf_counter()
        for number, ((prompt, output), sink) in enumerate(zip(requests, sinks, strict=True)):
            sampling = SamplingConfig(
                temperature=0.0, max_gen_length=output, ignore_tokenizer_eos=True
            )
            key = attempt * len(requests) + number
            fresh = array("i", [token + attempt for token in prompt])  # nothing cached
            core.requests.submit(EngineRequest(key, (Piece(key, fresh),), sampling=sampling), sink)
        while core.has_work and core.step():
            pass
        seconds = time.perf_counter() - began
        for call, argument in core.requests.outbox.take():
            call(argument)
        assert all(sink.response is not None for sink in sinks)
        core.requests.free(range(attempt * len(requests), (attempt + 1) * len(requests)))
        best = min(best or seconds, seconds)
    assert best is not None
    tokens = sum(output for _, output in requests)
    return {"seconds": best, "tokens_per_s": tokens / best, "steps": core.runtime_info().num_steps}


def show(rows: list[Row], row: Row) -> None:
    rows.append(row)
    texts = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()]
    print("  ".join(texts), flush=True)


def bench_model(model: str, parts: list[str], shares: bool, rows: list[Row]) -> None:
    config = config_of(model, shares=shares)
    shape = Shape.of(model)
    began = time.perf_counter()
    loaded, tokenizer = load_cuda(config)
    show(rows, {"model": model, "case": "load", "seconds": time.perf_counter() - began})
    if "decode" in parts:
        for case in DECODES[model]:
            row = {"model": model, "case": case.name, "floor_ms": shape.decode_floor_ms(case)}
            row |= {"vllm_ms": vllm_ms(model, case.name)} | bench_decode(loaded, case)
            show(rows, row | {"over_floor": row["ms"] / row["floor_ms"]})
    if "prefill" in parts:
        for tokens, chunk in PREFILLS[model]:
            row = {"model": model, "case": f"prefill {tokens}", "chunk": chunk}
            row |= {"floor_ms": shape.prefill_floor_ms(tokens)}
            row |= bench_prefill(loaded, tokens, chunk)
            show(rows, row | {"vllm_ms": vllm_ms(model, f"prefill {tokens}")})
    if "mixed" in parts and CROWD in DECODES[model]:
        for chunk in MIXED:
            row = {"model": model, "case": f"{CROWD.name} + {chunk}"}
            show(rows, row | bench_mixed(loaded, chunk))
    if "load256" in parts and model not in LONG_MODELS:
        row = bench_256(config, loaded, tokenizer)
        show(rows, {"model": model, "case": "256, no HTTP"} | row)


def bench_http(model: str, shares: bool, rows: list[Row]) -> None:
    """A server in a process of its own."""
    folder = Path(tempfile.mkdtemp(prefix=f"{model}_"))
    (folder / "config.json").write_text(json.dumps(KNOWN_SHAPES[model]))
    path = folder / "engine.json"
    config = config_of(str(folder), shares=shares)
    path.write_text(config.model_dump_json(exclude={"engine_name"}))
    command = [sys.executable, "-m", "parrot.engine.http_server", "--without_core"]
    server = subprocess.Popen([*command, "--config_path", str(path), "--release_mode"])
    try:
        url = "http://localhost:9001"
        cases = DECODES[model]
        for row in asyncio.run(gpu_http.measure(model, url, lambda: server.poll() is None, cases)):
            show(rows, {"model": model, **row})
    finally:
        server.terminate()
        server.wait(30)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--no-sharing", dest="shares", action="store_false")


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in LONG_MODELS:
        KNOWN_SHAPES[model]["max_position_embeddings"] = 16384
    rows: list[Row] = []
    report["rows"] = rows
    for model in args.models:
        config = config_of(model, shares=args.shares).model_dump(mode="json")
        report.uses(model, {"config": config, "shape": KNOWN_SHAPES[model]})
        if "http" in args.parts:
            bench_http(model, args.shares, rows)
        if set(args.parts) - {"http"}:
            bench_model(model, args.parts, args.shares, rows)
            gc.collect()
            torch.cuda.empty_cache()


if __name__ == "__main__":
    run(__name__)
