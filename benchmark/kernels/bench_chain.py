"""Time the products between two attentions as one kernel and as one kernel each.

    python -m benchmark.kernels.bench_chain [--models M ...] [--output FILE.json]

The products are out, gate and up, down and the next layer's qkv, for one row, in consecutive layers
without attention, with weights in e4m3 and in four bits. The floor is the time to read the weights
once at the copy rate of an H200."""

import argparse
from dataclasses import asdict
from functools import partial

import torch

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import PAGE, normal
from benchmark.kernels.bench_formats import FORMATS, FormatLayer, MakeWeight, num_bytes
from benchmark.kernels.layers import MODELS, Model
from benchmark.kernels.timing import time_graph
from benchmark.results import Report, run
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.chain import Heads, RowChain
from parrot.engine.models.fused_chain import chain_layer
from parrot.engine.models.fused_layer import FusedLayer
from parrot.engine.models.fused_weights import Where
from parrot.engine.models.layers import RMSNorm

_NUM_LAYERS = 6  # More bytes than L2.
_NAMES = ("e4m3, a factor per row", "four bits, groups of 128 (AWQ, GPTQ)")


class Layers:
    """Consecutive layers without attention. The first one's qkv follows the last one."""

    def __init__(self, model: Model, make: MakeWeight) -> None:
        self.layers = [FormatLayer.of(model, make) for _ in range(_NUM_LAYERS)]
        self.norm = RMSNorm(normal(model.hidden, std=0.02) + 1, 1e-5)
        self.shape = model.shape
        pages = torch.zeros(1, model.kv_heads, PAGE, 128, device="cuda").bfloat16()
        zeros = torch.zeros(1, dtype=torch.int32, device="cuda")
        kv = KVView(pages, torch.zeros_like(pages), zeros[:, None], zeros)
        cos_sin = torch.rand(PAGE, 128, device="cuda")
        self.where: Where = (kv, zeros, cos_sin, self.shape)
        self.attended = normal(1, model.heads * 128)

    def separately(self, residual: torch.Tensor) -> torch.Tensor:
        """All layers with one kernel per product. Returns the last q."""
        for index, layer in enumerate(self.layers):
            following = self.layers[(index + 1) % _NUM_LAYERS]
            x = layer.after_attention(self.attended, residual, self.norm)
            q = following.qkv.rotated(x, self.where)
        return q

    def chain(self) -> RowChain:
        cos_sin, shape = self.where[2:]
        fused = [
            FusedLayer(
                layer.qkv, layer.out, layer.gate_up, layer.down, self.norm, self.norm, None, cos_sin
            )
            for layer in self.layers
        ]
        followers = [*fused[1:], fused[0]]
        layers = [chain_layer(*pair, self.norm) for pair in zip(fused, followers, strict=True)]
        return RowChain(layers, Heads(shape.num_heads, shape.num_kv_heads, shape.head_dim))

    def at_once(self, chain: RowChain, residual: torch.Tensor) -> torch.Tensor:
        step = chain.start(residual)
        kv, table_rows, *_ = self.where
        for index in range(_NUM_LAYERS):
            q = step.run(index, self.attended, kv, table_rows)
        return q


def bench(model: Model, make: MakeWeight) -> dict[str, float]:
    layers = Layers(model, make)
    chain = layers.chain()
    residual = normal(1, model.hidden)
    found, expected = residual.clone(), residual.clone()
    q, expected_q = layers.at_once(chain, found), layers.separately(expected)
    one_each = partial(layers.separately, residual.clone())
    one = partial(layers.at_once, chain, residual.clone())
    return {
        "floor_us": sum(map(num_bytes, layers.layers[0].weights)) / MEMORY_RATE * 1e6,
        "kernel_per_product_us": time_graph(one_each, per_run=_NUM_LAYERS),
        "one_kernel_us": time_graph(one, per_run=_NUM_LAYERS),
        "residual_difference": _difference(found, expected),
        "q_difference": _difference(q, expected_q),
    }


def _difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to the norm of what is expected."""
    return float((found.float() - expected.float()).norm() / expected.float().norm())


def arguments(parser: argparse.ArgumentParser) -> None:
    models = ["Llama-3.1-8B", "Llama-2-7B", "Llama-2-13B"]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=models)


def measure(args: argparse.Namespace, report: Report) -> None:
    for model in args.models:
        report.uses(model, asdict(MODELS[model]))
        for name in _NAMES:
            row = bench(MODELS[model], FORMATS[name])
            report.add("rows", {"model": model, "format": name} | row)


if __name__ == "__main__":
    run(__name__)
