"""The weights of decoder layers, and their matrix products without attention."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from benchmark.kernels import MEMORY_RATE
from benchmark.kernels.attention_cases import PAGE, normal
from parrot.engine.kernels.attention_shape import AttentionShape, HeadNorm
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.products import (
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_linear,
)


@dataclass(frozen=True)
class Model:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int  # of the MLP
    vocab: int
    qk_norm: bool = False

    @property
    def shape(self) -> AttentionShape:
        return AttentionShape(self.heads, self.kv_heads, 128, PAGE)


MODELS = {
    "Llama-2-13B": Model(5120, 40, 40, 40, 13824, 32000),
    "Llama-3.1-8B": Model(4096, 32, 32, 8, 14336, 128256),
    "Llama-2-7B": Model(4096, 32, 32, 32, 11008, 32000),
    "Qwen3-0.6B": Model(1024, 28, 16, 8, 3072, 151936, qk_norm=True),
}


class Layer:
    def __init__(self, model: Model) -> None:
        width = (model.heads + 2 * model.kv_heads) * 128
        self.qkv = normal(width, model.hidden, std=0.02)
        self.o = normal(model.hidden, model.heads * 128, std=0.02)
        self.gate_up = normal(2 * model.inner, model.hidden, std=0.02)
        self.down = normal(model.hidden, model.inner, std=0.02)
        self.norms = [normal(model.hidden, std=0.02) + 1 for _ in range(2)]
        self.qk_norm = None
        if model.qk_norm:
            self.qk_norm = HeadNorm(normal(128, std=0.02), normal(128, std=0.02), 1e-6)

    @property
    def nbytes(self) -> int:
        return sum(w.nbytes for w in (self.qkv, self.o, self.gate_up, self.down))


class LayerProducts:
    """The matrix products of consecutive layers with norms, residuals and SiLU, but without
    attention: our kernels, and cuBLAS with one kernel for the operations between products. The
    weights are larger than the L2 cache."""

    def __init__(self, model: Model, rows: int) -> None:
        self.layers = [Layer(model) for _ in range(6 if model.hidden > 1024 else model.layers)]
        self.floor_us = self.layers[0].nbytes / MEMORY_RATE * 1e6
        self.x, self.normed, self.residual = (normal(rows, model.hidden) for _ in range(3))
        self.qkv = normal(rows, len(self.layers[0].qkv))
        self.attended, self.inner = normal(rows, model.heads * 128), normal(rows, model.inner)

    def ours(self) -> None:
        first = self.layers[0].norms[0]
        x = add_rms_norm(self.x, self.residual, first, 1e-5, self.normed, add=False)
        normed: torch.Tensor | UndividedRows = x
        following = [*self.layers[1:], self.layers[0]]
        for layer, next_layer in zip(self.layers, following, strict=True):
            few_rows_linear(normed, layer.qkv, self.qkv)
            normed = few_rows_add_and_norm(
                self.attended, layer.o, self.residual, layer.norms[1], 1e-5
            )
            few_rows_linear(normed, layer.gate_up, self.inner, silu=True)
            normed = few_rows_add_and_norm(
                self.inner, layer.down, self.residual, next_layer.norms[0], 1e-5
            )

    def cublas(self) -> None:
        x = self.x
        for layer in self.layers:
            F.linear(add_rms_norm(x, self.residual, layer.norms[0], 1e-5, self.normed), layer.qkv)
            x = F.linear(self.attended, layer.o)
            add_rms_norm(x, self.residual, layer.norms[1], 1e-5, self.normed)
            inner = silu_mul(F.linear(self.normed, layer.gate_up), self.inner)
            x = F.linear(inner, layer.down)
