"""Time each candidate tile for products of few rows, for each product of a layer, on one GPU.

    python -m benchmark.kernels.sweep_products [--models Llama-3.1-8B ...] [--ranks 2] [--rows 1 64]
        [--e4m3]

The products are those of one rank with tensor parallelism. Weights are not in L2, and a product
starts while the previous one ends, as in a step. All cores compile candidates; only one is timed at
a time. `splits` is the number of parts of the inputs, which the ranks' sum adds up; 0 is cuBLAS.
With `--e4m3` the weights are in e4m3, and so are rows for the tensor core. The floor is the time to
read the weights once at the copy rate of an H200."""

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from triton import next_power_of_2

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import normal
from benchmark.kernels.layers import MODELS, Model
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.kernels.linear import tiles
from parrot.engine.kernels.linear.products import Rows, few_rows_linear
from parrot.engine.kernels.row_codes import row_codes

ALL = {**MODELS, "Llama-3.1-70B": Model(8192, 80, 64, 8, 28672, 128256)}
SHARED_BYTES = 225 << 10
L2_BYTES = 400 << 20  # Bytes of rotating weights: several times the size of L2.
LAUNCHES = 24

Tile = tuple[int, int, int, int]
"""Outputs, columns, stages, warps. Without stages and columns: whole rows of weights, without the
tensor core."""

PLAIN: Sequence[Tile] = [
    *((16, 256, 5, 4), (16, 512, 4, 2), (32, 128, 5, 4), (32, 128, 8, 4), (32, 256, 4, 4)),
    *((64, 128, 4, 4), (64, 128, 6, 4), (64, 128, 8, 4), (64, 64, 6, 4), (64, 64, 8, 4)),
    *((128, 64, 4, 8), (128, 128, 3, 8), (128, 128, 4, 8), (128, 128, 4, 4)),
]
E4M3: Sequence[Tile] = [
    *((16, 512, 4, 2), (32, 256, 6, 4), (64, 128, 6, 4), (64, 128, 8, 4), (64, 256, 4, 4)),
    *((64, 256, 6, 4), (64, 256, 8, 4), (64, 512, 3, 4), (64, 512, 4, 4), (128, 128, 4, 4)),
    *((128, 128, 6, 4), (128, 128, 6, 8), (128, 256, 3, 8), (128, 256, 4, 8), (32, 512, 4, 4)),
]
E4M3_SILU: Sequence[Tile] = [
    *((64, 128, 4, 4), (64, 128, 6, 4), (64, 256, 3, 4), (64, 256, 4, 4)),
    *((64, 128, 8, 4), (64, 256, 5, 4), (128, 128, 4, 4), (128, 128, 4, 8), (128, 128, 6, 8)),
    *((128, 256, 2, 8), (128, 256, 3, 8)),
]
SILU: Sequence[Tile] = [
    *((32, 64, 6, 4), (32, 128, 4, 4), (32, 128, 5, 4), (64, 64, 4, 4), (64, 64, 6, 4)),
    *((64, 128, 3, 4), (128, 64, 3, 8), (128, 128, 3, 4), (128, 128, 2, 8)),
]
ROW: Sequence[Tile] = [
    *((outputs, 0, 0, warps) for outputs in (2, 4, 8, 16) for warps in (4, 8)),
    *((1, 0, 0, 8), (8, 0, 0, 16)),
]
MAX_REGISTERS = 128  # Registers of a thread for weights.


@dataclass(frozen=True)
class Product:
    name: str
    outputs: int
    inputs: int
    silu: bool = False
    is_summed: bool = False

    @property
    def weight_shape(self) -> tuple[int, int]:
        return (2 if self.silu else 1) * self.outputs, self.inputs


@dataclass(frozen=True)
class Candidate:
    product: Product
    rows: int
    tile: Tile
    splits: int
    e4m3: bool = False

    @property
    def fits(self) -> bool:
        outputs, columns, stages, warps = self.tile
        weight_rows = (2 if self.product.silu else 1) * outputs
        if not stages:
            num_bytes = weight_rows * next_power_of_2(self.product.inputs) * self.item_size
            registers = num_bytes / 4 / (32 * warps)
            return self.splits == self.rows == 1 and registers <= MAX_REGISTERS
        row_bytes = self.item_size * (weight_rows + max(16, self.rows))
        is_even = self.product.inputs % (self.splits * columns) == 0
        return is_even and stages * row_bytes * columns <= SHARED_BYTES

    @property
    def item_size(self) -> int:
        return 1 if self.e4m3 else 2

    def weight(self) -> torch.Tensor:
        numbers = normal(*self.product.weight_shape)
        return numbers.to(torch.float8_e4m3fn) if self.e4m3 else numbers

    def x(self) -> Rows:
        rows = normal(self.rows, self.product.inputs)
        return row_codes(rows) if self.e4m3 and self.tile[2] else rows

    def run(self, x: Rows, weights: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        outputs, columns, stages, warps = self.tile
        if stages:
            tile = {"BM": max(16, self.rows), "BN": outputs, "BK": columns, "STAGES": stages}
        else:
            tile = {"ROWS": 1, "BN": outputs, "BK": next_power_of_2(self.product.inputs)}
        tile["num_warps"] = warps
        kind = "matrix_tile" if stages else "row_tile"
        with (
            patch.object(tiles.Product, kind, lambda *_, **__: dict(tile)),
            patch.object(tiles.Product, "is_row", not stages),
        ):
            scales = self._scales() if self.e4m3 else None
            for weight in weights:
                few_rows_linear(x, weight, out, silu=self.product.silu, scales=scales)

    def _scales(self) -> torch.Tensor:
        return torch.ones(self.product.weight_shape[0], device="cuda")

    def out(self) -> torch.Tensor:
        return normal(self.splits, self.rows, self.product.outputs).squeeze(0)


def products(model: Model, ranks: int) -> list[Product]:
    heads, kv_heads, inner = model.heads // ranks, model.kv_heads // ranks, model.inner // ranks
    return [
        Product("qkv", (heads + 2 * kv_heads) * 128, model.hidden),
        Product("out", model.hidden, heads * 128, is_summed=True),
        Product("gate and up", inner, model.hidden, silu=True),
        Product("down", model.hidden, inner, is_summed=True),
    ]


def candidates(product: Product, rows: int, *, e4m3: bool = False) -> list[Candidate]:
    splits = (1, 2, 4) if product.is_summed else (1,)
    matrix = (E4M3_SILU if e4m3 else SILU) if product.silu else (E4M3 if e4m3 else PLAIN)
    found = [
        Candidate(product, rows, tile, count, e4m3) for tile in (*matrix, *ROW) for count in splits
    ]
    return [candidate for candidate in found if candidate.fits]


def compile_all(found: Sequence[Any]) -> None:
    """Compile candidates of a sweep, with the methods of `Candidate`, on all cores."""
    count = min(len(found), os.cpu_count() or 1)
    with multiprocessing.get_context("spawn").Pool(count) as pool:
        pool.map(_compile, [found[i::count] for i in range(count)])


def _compile(part: Sequence[Any]) -> None:
    for candidate in part:
        candidate.run(candidate.x(), [candidate.weight()], candidate.out())
    torch.cuda.synchronize()


def bench(found: Sequence[Candidate]) -> Iterator[dict[str, object]]:
    """Time the candidates of one product and number of rows."""
    first = found[0]
    product, rows = first.product, first.rows
    num_bytes = first.item_size * product.weight_shape[0] * product.inputs
    weights = [first.weight() for _ in range(max(4, L2_BYTES // num_bytes))]
    weights = (weights * LAUNCHES)[:LAUNCHES]
    plain = normal(rows, product.inputs)
    row = {"product": product.name, "rows": rows, "floor_us": num_bytes / MEMORY_RATE * 1e6}

    def cublas() -> None:
        for weight in weights:
            F.linear(plain, weight)

    if not first.e4m3:
        yield row | {"tile": None, "splits": 0, "us": time_graph(cublas, per_run=LAUNCHES)}
    for candidate in found:
        call = partial(candidate.run, candidate.x(), weights, candidate.out())
        us = time_graph(call, replays=5, per_run=LAUNCHES)
        yield row | {"tile": list(candidate.tile), "splits": candidate.splits, "us": us}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=ALL, default=["Llama-3.1-8B"])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 32, 64])
    parser.add_argument("--e4m3", action="store_true")


def measure(args: argparse.Namespace, report: Report) -> None:
    wanted = [
        (model, candidates(product, rows, e4m3=args.e4m3))
        for model in args.models
        for product in products(ALL[model], args.ranks)
        for rows in args.rows
    ]
    compile_all([candidate for _, found in wanted for candidate in found])
    for model, found in wanted:
        for row in bench(found):
            report.add("rows", {"model": model, "ranks": args.ranks} | row)


if __name__ == "__main__":
    run(__name__)
