"""Time the CUDA kernels against the floors of the device and against FlashInfer.

    python -m benchmark.kernels.bench_kernels [--only cells,trees,...] [--output FILE.json]

Each case is one layer in a CUDA graph, in bfloat16, over rotating KV pools. FlashInfer's figures
come from benchmark/results/baseline_flashinfer-0.6.13.json: the same cells on the same kind of
GPU, with pages of 64 tokens. Each is the better of its decode and its cascade."""

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import (
    PAGE,
    Bench,
    Workload,
    fill_step,
    floor_us,
    normal,
    prepared,
    split_of,
    step_rows,
)
from benchmark.kernels.layers import MODELS, LayerProducts
from benchmark.kernels.timing import ceilings, repeat, time_graph
from benchmark.results import Report, load, run
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import KernelConfig
from parrot.engine.attention.work_list import SplitConfig, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store, silu_mul
from parrot.engine.kernels.launch import MATRIX_RATE

SHARE_ALL = GateConfig(memory_rate=1.0, l2_bytes=0, partial_rate=1.0e30, launch_s=0.0)
Row = dict[str, Any]
Rows = Iterator[Row]
KV_HEADS = (8, 32)
BATCHES = (1, 8, 16, 32, 64, 128, 256)
PREFIXES = (0, 512, 2048, 6144, 16384)
SUFFIXES = {"64": (64, 0), "200": (200, 0), "800": (800, 0), "64-800": (432, 368)}
TREES = {  # (sharers, tokens) per level, then the suffix; PAT's, its lengths rounded up to pages
    "2 roots x 6144": (64, ((32, 6144),), 200),
    "4096 -> 4 x 1024": (64, ((64, 4096), (16, 1024)), 200),
    "PAT 1,8,512 x 64,512,256": (512, ((512, 64), (64, 512)), 256),
    "PAT 4,16,256,512 x 512,64,128,64": (512, ((128, 512), (32, 64), (2, 128)), 64),
}
POOLS = 2
MAX_POOL_BYTES = 40 * 2**30  # Larger cases are skipped.


def shape_of(
    kv_heads: int, heads: int = 32, dim: int = 128, number_bytes: int = 2
) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, PAGE, number_bytes)


def time_case(work: Workload, shape: AttentionShape) -> Row:
    bench = Bench(work, shape)
    plan = bench.plan(GateConfig())
    times = [bench.time_us(plan) for _ in range(2)]
    floor = floor_us(work, shape)
    return {
        "us": min(times),
        "us_again": max(times),
        "floor_us": floor,
        "over_floor": min(times) / floor,
        "unique_tb_s": work.unique_tokens * shape.kv_token_bytes / min(times) / 1e6,
        "error": bench.error(plan),
        "items": [len(plan.narrow), len(plan.shared)],
    }


def bench_cells() -> Rows:
    """The cells of FlashInfer's table: one shared prompt of 6144 tokens."""
    known = load("baseline_flashinfer-0.6.13.json")
    for kv_heads, batch, suffix in itertools.product(KV_HEADS, (16, 64, 128), (200, 800)):
        row = time_case(Workload(batch, ((batch, 6144),), suffix), shape_of(kv_heads))
        cell = f"hkv{kv_heads}_b{batch}_s{suffix}"
        best = min(known[f"{cell}_flat_us"], known[f"{cell}_cascade_us"])
        yield {
            "cell": cell,
            **row,
            "flashinfer_us": best,
            "over_flashinfer": best / row["us"],
        }


def bench_trees() -> Rows:
    """Several roots and levels, and batches without shared prefixes."""
    cases = {
        "one root": (Workload(64, ((64, 20480),), 500), 32, 8),
        "4 roots": (Workload(64, ((16, 5120),), 500), 32, 8),
        "4 roots, 32 kv heads": (Workload(64, ((16, 5120),), 500), 32, 32),
        "one root, 32 kv heads": (Workload(64, ((64, 20480),), 500), 32, 32),
        "one root, unique as 2 levels": (Workload(64, ((64, 8192),), 200), 32, 8),
        "2 levels": (Workload(64, ((64, 4096), (16, 1024)), 200), 32, 8),
        "one root, unique as 3 levels": (Workload(64, ((64, 16384),), 200), 32, 8),
        "3 levels": (Workload(64, ((64, 4096), (16, 1024), (4, 512)), 200), 32, 8),
        "one root, 32, as 3 levels": (Workload(64, ((64, 16384),), 200), 32, 32),
        "3 levels, 32 kv heads": (Workload(64, ((64, 4096), (16, 1024), (4, 512)), 200), 32, 32),
        "none, B=1, 2k": (Workload(1, (), 2048), 32, 8),
        "none, B=8, 2k": (Workload(8, (), 2048), 32, 8),
        "none, B=64, 2k": (Workload(64, (), 2048), 32, 8),
        "none, B=64, 2k, 32 kv heads": (Workload(64, (), 2048), 32, 32),
        "none, B=128, 100-1900": (Workload(128, (), 1000, 900), 32, 8),
        "none, B=256, 100-1900, 16/8 heads": (Workload(256, (), 1000, 900), 16, 8),
    }
    for name, (work, heads, kv_heads) in cases.items():
        yield {"case": name, **time_case(work, shape_of(kv_heads, heads))}


def bench_quantised() -> Rows:
    """KV in bfloat16 and in e4m3."""
    cases = {
        f"B={batch}, {length // 1024}k": (Workload(batch, (), length), 8)
        for batch, length in itertools.product((1, 8, 64), (2048, 8192))
    } | {
        "B=64, 2k, 32 kv heads": (Workload(64, (), 2048), 32),
        "B=128, 100-1900": (Workload(128, (), 1000, 900), 8),
        "B=64, 6144 shared + 500": (Workload(64, ((64, 6144),), 500), 8),
        "copilot, B=64, 32 kv heads": (Workload(64, ((64, 5120),), 1180), 32),
        "roots4, B=64, 32 kv heads": (Workload(64, ((16, 5120),), 1180), 32),
    }
    for name, (work, kv_heads) in cases.items():
        plain, quantised = (time_case(work, shape_of(kv_heads, 32, 128, n)) for n in (2, 1))
        row: Row = {"case": name, "kv_heads": kv_heads, "bfloat16_us": plain["us"]}
        yield row | quantised | {"speedup": plain["us"] / quantised["us"]}
    for tokens, start in ((64, 8192), (256, 8192), (2048, 0), (2048, 6144), (8192, 24576)):
        times = {}
        for number_bytes in (2, 1):
            shape = shape_of(8, 32, 128, number_bytes)
            step, layer, q = fill_step(tokens, start, 1, shape)
            attention, plan = prepared(plan_work(step, shape, None, split_of(shape)), shape)
            out = torch.empty_like(q)
            call = partial(attention.run, q, layer, plan, out)
            times[number_bytes] = time_graph(call, replays=10)
        row = {"case": f"fill of {tokens} after {start}", "kv_heads": 8}
        row |= {"bfloat16_us": times[2], "us": times[1]}
        yield row | {"speedup": times[2] / times[1]}


def bench_gate() -> Rows:
    """The prompt length at which sharing starts to gain: suffixes of 200 tokens, shared or not."""
    prefixes = (128, 256, 512, 1024, 2048, 4096)
    for kv_heads, batch, prefix in itertools.product(KV_HEADS, (2, 4, 8, 16, 32, 64), prefixes):
        work = Workload(batch, ((batch, prefix),), 200)
        bench = Bench(work, shape_of(kv_heads), pools=6 if prefix * batch < 16384 else 3)
        yield {
            "kv_heads": kv_heads,
            "batch": batch,
            "prefix": prefix,
            "shared_us": bench.time_us(bench.plan(SHARE_ALL)),
            "alone_us": bench.time_us(bench.plan(None)),
            "gate_shares": bench.plan(GateConfig()).num_shared_tokens > 0,
        }


def bench_fills() -> Rows:
    """Fills: (tokens, cached tokens before them, sequences, kv heads)."""
    cases = ((2048, 0, 1, 8), (8192, 0, 1, 8), (2048, 6144, 1, 8), (512, 0, 4, 8))
    for tokens, start, sequences, kv_heads in (*cases, (32, 6144, 64, 8), (2048, 0, 1, 32)):
        shape = shape_of(kv_heads)
        step, layer, q = fill_step(tokens, start, sequences, shape, shared=tokens == 32)
        operations = 4 * 32 * 128 * sequences * (tokens * start + tokens * tokens / 2)
        row: dict[str, Any] = {
            "tokens": tokens,
            "cached": start,
            "sequences": sequences,
            "kv_heads": kv_heads,
            "floor_us": operations / MATRIX_RATE * 1e6,
        }
        for name, gate in (("us", GateConfig()), ("unshared_us", None)):
            attention, plan = prepared(plan_work(step, shape, gate, split_of(shape)), shape)
            out = torch.empty_like(q)
            row[name] = time_graph(partial(attention.run, q, layer, plan, out), replays=10)
        row["tflop_s"] = operations / row["us"] / 1e6
        if start == 0:
            row |= _time_sdpa(q.view(sequences, tokens, 32, 128).transpose(1, 2))
        yield row


def _time_sdpa(q: torch.Tensor) -> dict[str, float]:
    """PyTorch's dense causal attention on inputs of the same size, with unshared heads."""
    k, v = torch.randn_like(q), torch.randn_like(q)
    backends = {"cudnn_us": SDPBackend.CUDNN_ATTENTION, "torch_us": SDPBackend.FLASH_ATTENTION}
    times = {}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            times[name] = time_graph(call, replays=10)
    return times


def bench_fused() -> Rows:
    """Fused kernels at Llama-3.1-8B's sizes. The floor is the bytes divided by the copy rate."""
    shape = shape_of(8)
    for tokens in (1, 64, 256, 2048):
        x, residual, out = (normal(tokens, 4096) for _ in range(3))
        gate_up, half = normal(tokens, 2 * 14336), normal(tokens, 14336)
        _, layer, _ = fill_step(tokens, 0, 1, shape)
        qkv = normal(tokens, 48 * 128)
        cos_sin = torch.rand(8192, 128, device="cuda")
        table_rows = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        calls: dict[str, Callable[[], object]] = {
            "add_rms_norm": partial(add_rms_norm, x, residual, normal(4096), 1e-5, out),
            "silu_mul": partial(silu_mul, gate_up, half),
            "rope_and_store": partial(rope_and_store, qkv, layer, table_rows, cos_sin, shape),
        }
        moved = (4 * x.nbytes, 3 * half.nbytes, 2 * qkv.nbytes)
        for (name, call), size in zip(calls.items(), moved, strict=True):
            us = time_graph(partial(repeat, call, 20), per_run=20)
            floor = size / MEMORY_RATE * 1e6
            yield {"kernel": name, "tokens": tokens, "us": us, "floor_us": floor}


def bench_layers() -> Rows:
    for name, model in MODELS.items():
        for num_rows in (1, 8, 16, 32, 48, 64):
            layers = LayerProducts(model, num_rows)
            us, cublas_us = (
                time_graph(run, per_run=len(layers.layers)) for run in (layers.ours, layers.cublas)
            )
            row = {"model": name, "rows": num_rows, "us": us, "cublas_us": cublas_us}
            yield row | {"floor_us": layers.floor_us}
            del layers
            torch.cuda.empty_cache()


def bench_planner() -> Rows:
    """Microseconds of a new plan on this machine's CPU."""
    for batch in (16, 64, 128, 256):
        for roots in (1, 4, batch):
            work = Workload(batch, ((batch // roots, 6144),) if roots < batch else (), 200)
            step, _ = step_rows(work, PAGE)
            times = []
            for _ in range(100):
                start = time.perf_counter()
                plan_work(step, shape_of(8), GateConfig(), SplitConfig())
                times.append(time.perf_counter() - start)
            yield {"batch": batch, "roots": roots, "us": statistics.median(times) * 1e6}


def fits(work: Workload, shape: AttentionShape) -> bool:
    return POOLS * work.unique_tokens * shape.kv_token_bytes <= MAX_POOL_BYTES


def time_sharing(work: Workload, shape: AttentionShape) -> Row:
    """Time the gate's choice of sharing, and no sharing, on the same pages."""
    bench = Bench(work, shape, pools=POOLS)
    plan = bench.plan(GateConfig())
    shared_us, alone_us = bench.time_us(plan), bench.time_us(bench.plan(None))
    floor = floor_us(work, shape)
    return {
        "floor_us": floor,
        "shared_us": shared_us,
        "alone_us": alone_us,
        "over_floor": shared_us / floor,
        "speedup": alone_us / shared_us,
        "gate_shares": plan.num_shared_tokens > 0,
        "error": bench.error(plan),
    }


def bench_grid() -> Rows:
    """All combinations of batch, shared prompt and suffix: with sharing, without it on the same
    pages (as in paged attention), and with separate pages (the usual baseline of papers)."""
    for kv_heads, prefix, batch in itertools.product(KV_HEADS, PREFIXES, BATCHES):
        if batch == 1 and prefix:  # No other request shares the prefix.
            continue
        shape = shape_of(kv_heads)
        for name, (suffix, spread) in SUFFIXES.items():
            work = Workload(batch, ((batch, prefix),) if prefix else (), suffix, spread)
            if not fits(work, shape):
                continue
            row = {"kv_heads": kv_heads, "batch": batch, "prefix": prefix, "suffix": name}
            row |= time_sharing(work, shape)
            copied = Workload(batch, (), prefix + suffix, spread)
            if prefix and fits(copied, shape):
                bench = Bench(copied, shape, pools=POOLS)
                row["copied_us"] = bench.time_us(bench.plan(None))
            yield row
        gc.collect()
        torch.cuda.empty_cache()


def bench_grid_trees() -> Rows:
    for kv_heads, (name, (batch, levels, suffix)) in itertools.product(KV_HEADS, TREES.items()):
        work, shape = Workload(batch, levels, suffix), shape_of(kv_heads)
        if fits(work, shape):
            row = {"kv_heads": kv_heads, "tree": name, "batch": batch}
            yield row | time_sharing(work, shape)


PARTS = {
    "cells": bench_cells,
    "trees": bench_trees,
    "quantised": bench_quantised,
    "gate": bench_gate,
    "fills": bench_fills,
    "fused": bench_fused,
    "layers": bench_layers,
    "planner": bench_planner,
    "grid": bench_grid,
    "grid_trees": bench_grid_trees,
}


def arguments(parser: argparse.ArgumentParser) -> None:
    usual = ",".join(name for name in PARTS if not name.startswith("grid"))
    parser.add_argument("--only", default=usual, help=f"of {','.join(PARTS)}")


def measure(args: argparse.Namespace, report: Report) -> None:
    report["cuda"] = torch.version.cuda
    for config in (KernelConfig(), SplitConfig(), GateConfig()):
        report.uses(type(config).__name__, dataclasses.asdict(config))
    report["ceilings"] = ceilings()
    for name in args.only.split(","):
        for row in PARTS[name]():
            report.add(name, row)


if __name__ == "__main__":
    run(__name__)
