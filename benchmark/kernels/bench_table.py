"""Decode attention over batch, shared prompt and suffix: with sharing, without it, and as if every
request had its own copy of the prompt.

    python -m benchmark.kernels.bench_table [--quick] [--output FILE.json]

One layer, 32 query heads of 128, bfloat16, page 64, CUDA graphs over two KV pools; microseconds.
`shared`: what the gate decides; `alone`: on the same shared pages, each request for itself (what
paged attention does); `copied`: each request has pages of its own (what the papers compare with).
Floor and error as in `bench_kernels.py`."""

import argparse
import gc
import itertools
from typing import Any

import torch

from benchmark.kernels.attention_cases import Bench, Workload, floor_us
from benchmark.kernels.bench_kernels import device_of, shape_of, time_work
from benchmark.results import Report, run
from parrot.engine.attention.gate import GateConfig
from parrot.engine.attention.tree_attention import KernelConfig
from parrot.engine.attention.work_list import SplitConfig
from parrot.engine.kernels.attention_shape import AttentionShape

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
Row = dict[str, Any]


def time_case(work: Workload, shape: AttentionShape) -> Row | None:
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


def bench_grid(quick: bool) -> list[Row]:
    rows = []
    batches, prefixes = ((16, 64), (2048, 6144)) if quick else (BATCHES, PREFIXES)
    for kv_heads, prefix, batch in itertools.product(KV_HEADS, prefixes, batches):
        if batch == 1 and prefix:  # nobody to share with
            continue
        for name, (suffix, spread) in SUFFIXES.items():
            shape = shape_of(kv_heads)
            work = Workload(batch, ((batch, prefix),) if prefix else (), suffix, spread)
            if (result := time_case(work, shape)) is None:
                continue
            row = {"kv_heads": kv_heads, "batch": batch, "prefix": prefix, "suffix": name, **result}
            if prefix:
                row |= copied_us(batch, prefix, suffix, spread, shape)
            rows.append(row)
            show(row)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def bench_trees() -> list[Row]:
    rows = []
    for kv_heads, (name, (batch, levels, suffix)) in itertools.product(KV_HEADS, TREES.items()):
        result = time_case(Workload(batch, levels, suffix), shape_of(kv_heads))
        if result is not None:
            rows.append({"kv_heads": kv_heads, "tree": name, "batch": batch, **result})
            show(rows[-1])
    return rows


def show(row: Row) -> None:
    texts = [f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()]
    print("  ".join(texts), flush=True)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--quick", action="store_true", help="a few cells only")


def measure(args: argparse.Namespace, report: Report) -> None:
    device_of(report)
    report["trees"] = bench_trees()
    report["grid"] = bench_grid(args.quick)


if __name__ == "__main__":
    run(__name__)
