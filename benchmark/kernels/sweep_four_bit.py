"""Time each candidate tile for products with quantised weights, for each product of a layer.

    python -m benchmark.kernels.sweep_four_bit [--models Llama-3.1-8B ...] [--rows 8 64]
        [--group 128] [--bits 4] [--least]

For the matrices of GGUF files: `--bits 8 --group 32` is Q8_0, `--bits 8 --group 16` is Q6_K, and
`--group 32 --least` is Q4_1 and Q4_K.

As in `sweep_products`, weights are not in L2, and a product starts while the previous one ends. A
tile is rows of weights, slices (1 for none), stages and warps. The floor is the time to read the
weights once at the copy rate of an H200."""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch
from triton import next_power_of_2

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import normal
from benchmark.kernels.sweep_products import (
    ALL,
    L2_BYTES,
    LAUNCHES,
    SHARED_BYTES,
    Product,
    compile_all,
    products,
)
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.kernels.linear.words import words_linear
from parrot.engine.kernels.linear.words_layout import Words, block_of, width_of
from parrot.engine.kernels.linear.words_tiles import WordsProduct

Tile = tuple[int, int, int, int]
"""Rows of weights, slices, stages, warps."""

SIZES: Sequence[Tile] = [
    *((32, 8, 2, 8), (32, 4, 2, 4), (32, 4, 3, 4), (32, 4, 4, 4), (64, 4, 3, 4), (16, 4, 3, 4)),
    *((32, 2, 3, 2), (32, 2, 4, 2), (32, 2, 5, 2), (64, 2, 3, 2), (64, 1, 3, 4), (64, 1, 4, 4)),
    *((128, 1, 2, 4), (128, 1, 3, 4), (128, 1, 4, 4), (128, 1, 3, 8), (256, 1, 3, 8)),
]
MAX_MEMBERS = 64
_ZERO = -136.0  # -128 - zero, for the zero 8.


@dataclass(frozen=True)
class Codes:
    """The quantisation format of a matrix."""

    bits: int
    group: int
    has_least: bool

    @property
    def block(self) -> int:
        return block_of(self.bits, self.group)

    def words(self, outputs: int, inputs: int, scales: torch.Tensor) -> Words:
        """Random codes with `scales` float16 [inputs / group, outputs]. The zero or the least
        number of a group is fixed."""
        shape = inputs // self.block, outputs, width_of(self.group)
        words = torch.randint(-(2**15), 2**15, shape, device="cuda").to(torch.int16)
        factors = scales.view(torch.int16).to(torch.int32)
        if self.has_least:
            factors |= factors << 16
        elif self.bits == 4:
            factors |= torch.tensor(_ZERO, device="cuda").view(torch.int32)
        return Words(words, factors, inputs, self.bits, True, self.has_least)


@dataclass(frozen=True)
class Candidate:
    product: Product
    rows: int
    codes: Codes
    tile: Tile
    splits: int

    @property
    def fits(self) -> bool:
        outputs, slices, stages, warps = self.tile
        block, group = self.codes.block, self.codes.group
        words = 2 * width_of(group)
        step = outputs * (words + 2 * 4 * (block // group)) + self.members * 2 * block
        is_even = self.num_blocks % (self.splits * slices) == 0
        is_small = slices * outputs * self.members // (32 * warps) <= 128  # sums in registers
        return is_even and is_small and step * slices * stages <= SHARED_BYTES

    @property
    def members(self) -> int:
        return min(max(8, next_power_of_2(self.rows)), MAX_MEMBERS)

    @property
    def num_blocks(self) -> int:
        return self.product.inputs // self.codes.block

    def weight(self) -> Words:
        outputs, inputs = self.product.weight_shape
        scales = torch.rand(inputs // self.codes.group, outputs, device="cuda") + 0.5
        return self.codes.words(outputs, inputs, scales.half())

    def x(self) -> torch.Tensor:
        return normal(self.rows, self.product.inputs)

    def out(self) -> torch.Tensor:
        shape = self.splits, self.rows, self.product.outputs
        dtype = torch.float32 if self.splits > 1 else torch.bfloat16
        return torch.empty(shape, device="cuda", dtype=dtype).squeeze(0)

    def run(self, x: torch.Tensor, weights: Sequence[Words], out: torch.Tensor) -> None:
        outputs, slices, stages, warps = self.tile
        tile = {"BM": self.members, "BN": outputs, "SLICES": slices}
        tile |= {"STAGES": stages, "num_warps": warps}
        with patch.object(WordsProduct, "tile", lambda _: dict(tile)):
            for weight in weights:
                words_linear(x, weight, out, silu=self.product.silu)


def candidates(product: Product, rows: int, codes: Codes) -> list[Candidate]:
    splits = (1, 2, 4, 7) if product.is_summed else (1,)
    found = [Candidate(product, rows, codes, tile, count) for tile in SIZES for count in splits]
    return [candidate for candidate in found if candidate.fits]


def bench(found: Sequence[Candidate]) -> Iterator[dict[str, object]]:
    """Time the candidates of one product and number of rows."""
    first = found[0]
    product, rows = first.product, first.rows
    num_bytes = first.weight().num_bytes
    weights = [first.weight() for _ in range(max(4, L2_BYTES // num_bytes))]
    weights = (weights * LAUNCHES)[:LAUNCHES]
    x = first.x()
    row = {"product": product.name, "rows": rows, "floor_us": num_bytes / MEMORY_RATE * 1e6}
    for candidate in found:
        call = partial(candidate.run, x, weights, candidate.out())
        us = time_graph(call, replays=5, per_run=LAUNCHES)
        yield row | {"tile": list(candidate.tile), "splits": candidate.splits, "us": us}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=ALL, default=["Llama-3.1-8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[8, 64])
    parser.add_argument("--group", type=int, default=128)
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4)
    parser.add_argument("--least", action="store_true", help="numbers have offsets")


def measure(args: argparse.Namespace, report: Report) -> None:
    codes = Codes(args.bits, args.group, args.least)
    wanted = [
        (model, candidates(product, rows, codes))
        for model in args.models
        for product in products(ALL[model], 1)
        for rows in args.rows
    ]
    compile_all([candidate for _, found in wanted for candidate in found])
    for model, found in wanted:
        for row in bench(found):
            report.add("rows", {"model": model} | row)


if __name__ == "__main__":
    run(__name__)
