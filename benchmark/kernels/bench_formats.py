"""Time the matrix products of a layer, and of heads, with weights in each format.

    python -m benchmark.kernels.bench_formats [--models Llama-3.1-8B ...] [--rows 1 8 64]
        [--output FILE.json]

The products run with their norms, residuals and SiLU in one CUDA graph, in consecutive layers whose
weights are larger than L2. Attention is left out, since it is the same for all formats. A head is
the matrix that computes logits; it runs four times in one CUDA graph. The floor is the time to read
the weights once at the copy rate of an H200, or the time of the products on its tensor cores,
whichever is longer."""

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from math import prod

import torch

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import normal
from benchmark.kernels.layers import MODELS, Model
from benchmark.kernels.sweep_four_bit import Codes
from benchmark.kernels.sweep_products import products
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.kernels.launch import E4M3_RATE, MATRIX_RATE
from parrot.engine.kernels.linear.products import Rows
from parrot.engine.models.fp8 import BLOCK, Fp8Matrix
from parrot.engine.models.fp8_weights import Fp8Weight
from parrot.engine.models.fused_weights import LayerWeight, Weight
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.words_weights import WordsWeight

_NUM_LAYERS = 6  # More bytes than L2 in each format.
_NUM_HEADS = 4  # Calls of a head in one graph.
_STD = 0.02  # Standard deviation of weights.


def plain(outputs: int, inputs: int) -> Weight:
    return Weight(normal(outputs, inputs, std=_STD), None)


def in_e4m3(outputs: int, inputs: int) -> Fp8Weight:
    return Fp8Weight.of(Fp8Matrix.of(normal(outputs, inputs, std=_STD).float()), None)


def in_blocks(outputs: int, inputs: int) -> Fp8Weight:
    codes = normal(outputs, inputs).to(torch.float8_e4m3fn)
    scales = torch.full((outputs // BLOCK, inputs // BLOCK), _STD, device="cuda")
    return Fp8Weight.of(Fp8Matrix(codes, scales), None)


def in_codes(
    outputs: int, inputs: int, *, bits: int, group: int, has_least: bool = False
) -> WordsWeight:
    scales = torch.full((inputs // group, outputs), _STD / 2**bits, device="cuda").half()
    return WordsWeight.of(Codes(bits, group, has_least).words(outputs, inputs, scales), None)


MakeWeight = Callable[[int, int], LayerWeight]

FORMATS: dict[str, MakeWeight] = {
    "bfloat16": plain,
    "e4m3, a factor per row": in_e4m3,
    "e4m3, a factor per block": in_blocks,
    "four bits, groups of 128 (AWQ, GPTQ)": partial(in_codes, bits=4, group=128),
    "four bits, groups of 32 (Q4_0)": partial(in_codes, bits=4, group=32),
    "four bits with offsets (Q4_1, Q4_K)": partial(in_codes, bits=4, group=32, has_least=True),
    "eight bits, groups of 32 (Q8_0)": partial(in_codes, bits=8, group=32),
    "eight bits with offsets (Q5_K)": partial(in_codes, bits=8, group=32, has_least=True),
    "eight bits, groups of 16 (Q6_K)": partial(in_codes, bits=8, group=16),
}

# Heads [tokens of the vocabulary, width], and their formats.
HEADS = {"Llama-3.1-8B": (128_256, 4096), "Qwen3-0.6B": (151_936, 1024)}
HEAD_FORMATS: dict[str, MakeWeight] = {
    "bfloat16": plain,
    "eight bits, groups of 64 (`head_dtype: int8`)": partial(in_codes, bits=8, group=64),
    "eight bits, groups of 32 (Q8_0)": partial(in_codes, bits=8, group=32),
    "eight bits, groups of 16 (Q6_K)": partial(in_codes, bits=8, group=16),
}


@dataclass(frozen=True)
class FormatLayer:
    qkv: LayerWeight
    out: LayerWeight
    gate_up: LayerWeight
    down: LayerWeight

    @classmethod
    def of(cls, model: Model, make: MakeWeight) -> "FormatLayer":
        return cls(*(make(*product.weight_shape) for product in products(model, 1)))

    @property
    def weights(self) -> tuple[LayerWeight, ...]:
        return self.qkv, self.out, self.gate_up, self.down

    def run(self, x: Rows, attended: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        """The layer's products. Returns the input of the next layer's qkv."""
        self.qkv(x)
        return self.after_attention(attended, residual, norm)

    def after_attention(
        self, attended: torch.Tensor, residual: torch.Tensor, norm: RMSNorm
    ) -> Rows:
        """`run` without qkv."""
        for_e4m3 = self.qkv.reads_e4m3
        x = self.out.add_and_norm(attended, residual, norm, for_e4m3=for_e4m3)
        hidden = self.gate_up.gated(x, for_e4m3=for_e4m3)
        return self.down.add_and_norm(hidden, residual, norm, for_e4m3=for_e4m3)


def num_bytes(weight: LayerWeight) -> int:
    if isinstance(weight, WordsWeight):
        return weight.matrix.num_bytes
    if isinstance(weight, Fp8Weight):
        return weight.weight.nbytes + weight.scales.nbytes
    return weight.weight.nbytes


def run_layers(
    layers: Sequence[FormatLayer],
    x: Rows,
    attended: torch.Tensor,
    residual: torch.Tensor,
    norm: RMSNorm,
) -> None:
    for layer in layers:
        x = layer.run(x, attended, residual, norm)


def with_floor(
    rows: int, us: float, num_weights: int, weight_bytes: int, rate: float
) -> dict[str, float]:
    """A row of the report. `rate`: operations per second."""
    floor_us = max(weight_bytes / MEMORY_RATE, 2 * num_weights * rows / rate) * 1e6
    return {"bits": 8 * weight_bytes / num_weights, "rows": rows, "us": us, "floor_us": floor_us}


def bench(model: Model, row_counts: Sequence[int], make: MakeWeight) -> Iterator[dict[str, float]]:
    """Time layers with each number of rows."""
    layers = [FormatLayer.of(model, make) for _ in range(_NUM_LAYERS)]
    layer_bytes = sum(map(num_bytes, layers[0].weights))
    count = sum(prod(product.weight_shape) for product in products(model, 1))
    rate = E4M3_RATE if layers[0].qkv.reads_e4m3 else MATRIX_RATE
    norm = RMSNorm(normal(model.hidden, std=_STD) + 1, 1e-5)
    for rows in row_counts:
        attended, residual = normal(rows, model.heads * 128), normal(rows, model.hidden)
        first = normal(rows, model.hidden)
        call = partial(run_layers, layers, first, attended, residual, norm)
        us = time_graph(call, per_run=_NUM_LAYERS)
        yield with_floor(rows, us, count, layer_bytes, rate)


def run_head(weight: LayerWeight, x: torch.Tensor) -> None:
    for _ in range(_NUM_HEADS):
        weight(x)


def bench_head(
    shape: tuple[int, int], row_counts: Sequence[int], make: MakeWeight
) -> Iterator[dict[str, float]]:
    """Time a head with each number of rows."""
    weight = make(*shape)
    for rows in row_counts:
        calls = partial(run_head, weight, normal(rows, shape[1]))
        us = time_graph(calls, per_run=_NUM_HEADS)
        yield with_floor(rows, us, prod(shape), num_bytes(weight), MATRIX_RATE)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--models", nargs="+", choices=MODELS, default=["Llama-3.1-8B"])
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 8, 64, 256, 2048])
    parser.add_argument("--head-rows", nargs="+", type=int, default=[1, 8, 16, 64, 128, 256])


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in args.models:
        report.uses(model, asdict(MODELS[model]))
        for name, make in FORMATS.items():
            for row in bench(MODELS[model], args.rows, make):
                report.add("rows", {"model": model, "format": name} | row)
    for model, shape in HEADS.items():
        for name, make in HEAD_FORMATS.items():
            for row in bench_head(shape, args.head_rows, make):
                report.add("heads", {"model": model, "format": name} | row)


if __name__ == "__main__":
    run(__name__)
