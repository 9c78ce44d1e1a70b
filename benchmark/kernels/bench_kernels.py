"""Time the CUDA kernels against the floors of the device and against FlashInfer.

    python -m benchmark.kernels.bench_kernels [--only cells,trees,...] [--output FILE.json]

One layer at a time, in CUDA graphs, in bfloat16, over rotating KV pools. FlashInfer's figures are
those of benchmark/results/baseline_flashinfer-0.6.13.json: the same cells on the same kind of
device, page 64, the better of its decode and its cascade."""

import argparse
import dataclasses
import gc
import itertools
import statistics
import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmark.kernels.attention_cases import (
    MATRIX_RATE,
    MEMORY_RATE,
    Bench,
    Workload,
    fill_step,
    floor_us,
    step_rows,
)
from benchmark.kernels.timing import ceilings, time_graph
from benchmark.results import Report, load, run
from parrot.engine.attention.context_tree import GateConfig
from parrot.engine.attention.tree_attention import (
    KernelConfig,
    PlanBuffers,
    TreeAttention,
)
from parrot.engine.attention.work_list import SplitConfig, WorkList, plan_work
from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store, silu_mul
from parrot.engine.kernels.linear import (
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_linear,
)

PAGE = 64
SHARE_ALL = GateConfig(memory_rate=1.0, l2_bytes=0, partial_rate=1.0e30, launch_s=0.0)
Row = dict[str, Any]
Rows = list[Row]
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
MAX_POOL_BYTES = 40 * 2**30  # a case that needs more is left out


def shape_of(kv_heads: int, heads: int = 32, dim: int = 128) -> AttentionShape:
    return AttentionShape(heads, kv_heads, dim, PAGE)


def time_work(bench: Bench, work: WorkList, config: KernelConfig | None = None) -> float:
    """Microseconds of one layer, over the pools in turn."""
    attention, plan = bench.prepare(work, config or KernelConfig())

    def run() -> None:
        for _ in range(4):
            for layer in bench.layers:
                attention.run(bench.q, layer, plan, bench.out)

    return time_graph(run, per_run=4 * len(bench.layers), replays=15)


def time_case(work: Workload, shape: AttentionShape, gate: GateConfig | None) -> dict[str, Any]:
    bench = Bench(work, shape)
    plan = bench.plan(gate, SplitConfig())
    times = [time_work(bench, plan) for _ in range(2)]
    attention, buffers = bench.prepare(plan, KernelConfig())
    bench.out.fill_(float("nan"))
    attention.run(bench.q, bench.layers[0], buffers, bench.out)
    floor = floor_us(work, shape)
    return {
        "us": min(times),
        "us_again": max(times),
        "floor_us": floor,
        "over_floor": min(times) / floor,
        "unique_tb_s": work.unique_tokens * shape.kv_token_bytes / min(times) / 1e6,
        "error": bench.error(bench.layers[0]),
        "items": [len(plan.narrow), len(plan.shared)],
    }


def bench_cells() -> Rows:
    """The cells of FlashInfer's table: one shared prompt of 6144 tokens."""
    known = load("baseline_flashinfer-0.6.13.json")
    rows = []
    for kv_heads in (8, 32):
        for batch in (16, 64, 128):
            for suffix in (200, 800):
                work = Workload(batch, ((batch, 6144),), suffix)
                row = time_case(work, shape_of(kv_heads), GateConfig())
                cell = f"hkv{kv_heads}_b{batch}_s{suffix}"
                best = min(known[f"{cell}_flat_us"], known[f"{cell}_cascade_us"])
                rows.append({"cell": cell, **row, "flashinfer_us": best})
                rows[-1]["over_flashinfer"] = best / row["us"]
    return rows


def bench_trees() -> Rows:
    """Several roots and levels, and batches with nothing to share."""
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
    return [
        {"case": name, **time_case(work, shape_of(kv_heads, heads), GateConfig())}
        for name, (work, heads, kv_heads) in cases.items()
    ]


def bench_gate() -> Rows:
    """Where sharing begins to win: one prompt, suffixes of 200 tokens, shared and not."""
    rows = []
    for kv_heads in (8, 32):
        for batch in (2, 4, 8, 16, 32, 64):
            for prefix in (128, 256, 512, 1024, 2048, 4096):
                work, shape = Workload(batch, ((batch, prefix),), 200), shape_of(kv_heads)
                bench = Bench(work, shape, pools=6 if prefix * batch < 16384 else 3)
                plans = [
                    bench.plan(gate, SplitConfig()) for gate in (SHARE_ALL, None, GateConfig())
                ]
                shared, alone = (time_work(bench, plan) for plan in plans[:2])
                row = {"kv_heads": kv_heads, "batch": batch, "prefix": prefix}
                row |= {"shared_us": shared, "alone_us": alone}
                rows.append({**row, "gate_shares": plans[2].num_shared_tokens > 0})
    return rows


def bench_fills() -> Rows:
    """Fills: (tokens, cached tokens before them, sequences, kv heads)."""
    rows = []
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
            work = plan_work(step, shape, gate, SplitConfig())
            plan = PlanBuffers(work, q.device)
            attention = TreeAttention(shape, work.num_slots, q.device)
            out = torch.empty_like(q)
            row[name] = time_graph(partial(attention.run, q, layer, plan, out), replays=10)
        row["tflop_s"] = operations / row["us"] / 1e6
        if start == 0:
            row |= _time_sdpa(q.view(sequences, tokens, 32, 128).transpose(1, 2))
        rows.append(row)
    return rows


def _time_sdpa(q: torch.Tensor) -> dict[str, float]:
    """Torch's dense causal attention on inputs of the same size, all heads unshared."""
    k, v = torch.randn_like(q), torch.randn_like(q)
    backends = {"cudnn_us": SDPBackend.CUDNN_ATTENTION, "torch_us": SDPBackend.FLASH_ATTENTION}
    times = {}
    for name, backend in backends.items():
        with sdpa_kernel(backend):
            call = partial(F.scaled_dot_product_attention, q, k, v, is_causal=True)
            times[name] = time_graph(call, replays=10)
    return times


def bench_fused() -> Rows:
    """Llama-3.1-8B's sizes. The floor is bytes over the copy rate."""
    rows = []
    shape = shape_of(8)
    for tokens in (1, 64, 256, 2048):
        x, residual, out = (_normal(tokens, 4096) for _ in range(3))
        weight = _normal(4096)
        call = partial(add_rms_norm, x, residual, weight, 1e-5, out)
        rows.append(_fused_row("add_rms_norm", tokens, call, 4 * x.nbytes))
        gate_up, half = _normal(tokens, 2 * 14336), _normal(tokens, 14336)
        call = partial(silu_mul, gate_up, half)
        rows.append(_fused_row("silu_mul", tokens, call, 3 * half.nbytes))
        _, layer, _ = fill_step(tokens, 0, 1, shape)
        qkv = _normal(tokens, 48 * 128)
        cos_sin = torch.rand(8192, 128, device="cuda")
        table_rows = torch.zeros(tokens, dtype=torch.int32, device="cuda")
        call = partial(rope_and_store, qkv, layer, table_rows, cos_sin, shape)
        rows.append(_fused_row("rope_and_store", tokens, call, 2 * qkv.nbytes))
    return rows


# hidden, outputs of qkv, inputs of the output projection, inner size of the MLP
LAYER_SHAPES = {
    "Llama-2-13B": (5120, 15360, 5120, 13824),
    "Llama-3.1-8B": (4096, 6144, 4096, 14336),
    "Llama-2-7B": (4096, 12288, 4096, 11008),
    "Qwen3-0.6B": (1024, 4096, 2048, 3072),
}


class LayerProducts:
    """The matrix products of layers, one after the other, with norms, residual and SiLU, but
    without attention: ours, and cuBLAS with a kernel for what lies between. More weights than the
    cache holds."""

    def __init__(self, shape: tuple[int, int, int, int], rows: int, num_layers: int) -> None:
        hidden, qkv, heads, inner = shape
        sizes = ((qkv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
        self.layers = [
            (*(_normal(*size) * 0.02 for size in sizes), _normal(hidden), _normal(hidden))
            for _ in range(num_layers)
        ]
        self.x, self.normed = _normal(rows, hidden), _normal(rows, hidden)
        self.residual, self.qkv = _normal(rows, hidden), _normal(rows, qkv)
        self.attended, self.inner = _normal(rows, heads), _normal(rows, inner)

    def floor_us(self) -> float:
        return sum(weight.nbytes for weight in self.layers[0]) / MEMORY_RATE * 1e6

    def ours(self) -> None:
        first = self.layers[0][4]
        x = add_rms_norm(self.x, self.residual, first, 1e-5, self.normed, add=False)
        normed: torch.Tensor | UndividedRows = x
        following = [layer[4] for layer in (*self.layers[1:], self.layers[0])]
        for (qkv, out, gate_up, down, _, norm), next_norm in zip(
            self.layers, following, strict=True
        ):
            few_rows_linear(normed, qkv, self.qkv)
            normed = few_rows_add_and_norm(self.attended, out, self.residual, norm, 1e-5)
            few_rows_linear(normed, gate_up, self.inner, silu=True)
            normed = few_rows_add_and_norm(self.inner, down, self.residual, next_norm, 1e-5)

    def cublas(self) -> None:
        x = self.x
        for qkv, out, gate_up, down, first, second in self.layers:
            F.linear(add_rms_norm(x, self.residual, first, 1e-5, self.normed), qkv)
            x = F.linear(self.attended, out)
            add_rms_norm(x, self.residual, second, 1e-5, self.normed)
            x = F.linear(silu_mul(F.linear(self.normed, gate_up), self.inner), down)


def bench_layers() -> Rows:
    rows = []
    for name, shape in LAYER_SHAPES.items():
        num_layers = 6 if shape[0] > 1024 else 28
        for num_rows in (1, 8, 16, 32, 48, 64):
            layers = LayerProducts(shape, num_rows, num_layers)
            us, cublas_us = (
                time_graph(run, per_run=num_layers) for run in (layers.ours, layers.cublas)
            )
            row = {"model": name, "rows": num_rows, "us": us, "cublas_us": cublas_us}
            rows.append({**row, "floor_us": layers.floor_us()})
            del layers
            torch.cuda.empty_cache()
    return rows


def _fused_row(name: str, tokens: int, call: partial[Any], moved: int) -> dict[str, Any]:
    def run() -> None:
        for _ in range(20):
            call()

    us = time_graph(run, per_run=20)
    return {"kernel": name, "tokens": tokens, "us": us, "floor_us": moved / MEMORY_RATE * 1e6}


def bench_planner() -> Rows:
    """Microseconds of a fresh plan on this machine's CPU."""
    rows = []
    for batch in (16, 64, 128, 256):
        for roots in (1, 4, batch):
            work = Workload(batch, ((batch // roots, 6144),) if roots < batch else (), 200)
            step, _ = step_rows(work, PAGE)
            times = []
            for _ in range(100):
                start = time.perf_counter()
                plan_work(step, shape_of(8), GateConfig(), SplitConfig())
                times.append(time.perf_counter() - start)
            rows.append({"batch": batch, "roots": roots, "us": statistics.median(times) * 1e6})
    return rows


def time_sharing(work: Workload, shape: AttentionShape) -> Row | None:
    """With sharing as the gate decides and without it, on the same pages; None if the pools are
    too large for the device."""
    if POOLS * work.unique_tokens * shape.kv_token_bytes > MAX_POOL_BYTES:
        return None
    bench = Bench(work, shape, pools=POOLS)
    plans = {
        "shared_us": bench.plan(GateConfig(), SplitConfig()),
        "alone_us": bench.plan(None, SplitConfig()),
    }
    row: Row = {name: time_work(bench, plan) for name, plan in plans.items()}
    attention, buffers = bench.prepare(plans["shared_us"], KernelConfig())
    bench.out.fill_(float("nan"))
    attention.run(bench.q, bench.layers[0], buffers, bench.out)
    floor = floor_us(work, shape)
    return {
        "floor_us": floor,
        **row,
        "over_floor": row["shared_us"] / floor,
        "speedup": row["alone_us"] / row["shared_us"],
        "gate_shares": plans["shared_us"].num_shared_tokens > 0,
        "error": bench.error(bench.layers[0]),
    }


def copied_us(batch: int, prefix: int, suffix: int, spread: int, shape: AttentionShape) -> Row:
    """The same contexts without a common page."""
    work = Workload(batch, (), prefix + suffix, spread)
    if POOLS * work.unique_tokens * shape.kv_token_bytes > MAX_POOL_BYTES:
        return {}
    bench = Bench(work, shape, pools=POOLS)
    return {"copied_us": time_work(bench, bench.plan(None, SplitConfig()))}


def bench_grid() -> Rows:
    """Batch, shared prompt and suffix: with sharing, without it on the same pages (what paged
    attention does), and with pages of each request's own (what papers compare with)."""
    rows = []
    for kv_heads, prefix, batch in itertools.product(KV_HEADS, PREFIXES, BATCHES):
        if batch == 1 and prefix:  # nobody to share with
            continue
        for name, (suffix, spread) in SUFFIXES.items():
            shape = shape_of(kv_heads)
            work = Workload(batch, ((batch, prefix),) if prefix else (), suffix, spread)
            if (result := time_sharing(work, shape)) is None:
                continue
            row = {"kv_heads": kv_heads, "batch": batch, "prefix": prefix, "suffix": name, **result}
            if prefix:
                row |= copied_us(batch, prefix, suffix, spread, shape)
            rows.append(row)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def bench_grid_trees() -> Rows:
    rows = []
    for kv_heads, (name, (batch, levels, suffix)) in itertools.product(KV_HEADS, TREES.items()):
        result = time_sharing(Workload(batch, levels, suffix), shape_of(kv_heads))
        if result is not None:
            rows.append({"kv_heads": kv_heads, "tree": name, "batch": batch, **result})
    return rows


def _normal(*size: int) -> torch.Tensor:
    return torch.randn(size, device="cuda").to(torch.bfloat16)


PARTS = {
    "cells": bench_cells,
    "trees": bench_trees,
    "gate": bench_gate,
    "fills": bench_fills,
    "fused": bench_fused,
    "layers": bench_layers,
    "planner": bench_planner,
    "grid": bench_grid,
    "grid_trees": bench_grid_trees,
}


def show(name: str, rows: Rows) -> None:
    print(f"== {name}")
    for row in rows:
        texts = [f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()]
        print("  " + "  ".join(texts), flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    usual = ",".join(name for name in PARTS if not name.startswith("grid"))
    parser.add_argument("--only", default=usual, help=f"of {','.join(PARTS)}")


def measure(args: argparse.Namespace, report: Report) -> None:
    report["cuda"] = torch.version.cuda
    for config in (KernelConfig(), SplitConfig(), GateConfig()):
        report.uses(type(config).__name__, dataclasses.asdict(config))
    report["ceilings"] = ceilings()
    show("ceilings", [report["ceilings"]])
    for name in args.only.split(","):
        report[name] = PARTS[name]()
        show(name, report[name])


if __name__ == "__main__":
    run(__name__)
