"""Weights in codes with the products of the Triton kernels."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm
from parrot.engine.kernels.linear.products import Rows
from parrot.engine.kernels.linear.words import (
    words_add_and_norm,
    words_linear,
    words_numbers,
    words_qkv,
)
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.kernels.linear.words_tiles import WordsProduct
from parrot.engine.models.fused_weights import UnroundedWeight, Where, rows_of
from parrot.engine.models.layers import RMSNorm


@dataclass(frozen=True, slots=True)
class WordsWeight(UnroundedWeight):
    """A weight in codes. Its words are `weight`."""

    matrix: Words = field(kw_only=True)

    @classmethod
    def of(cls, matrix: Words, bias: torch.Tensor | None) -> "WordsWeight":
        return cls(matrix.words, bias, matrix=matrix)

    def __call__(self, x: Rows) -> torch.Tensor:
        return words_product(x, self.matrix, self.bias)

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        if not self.are_few(x):
            return False
        tile = WordsProduct.of(len(rows_of(x)), self.matrix).tile()
        return shape.head_dim % tile["BN"] == 0

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        return words_qkv(x, self.matrix, *where, bias=self.bias)

    def for_chain(self) -> Words:
        return self.matrix

    @property
    def num_outputs(self) -> int:
        return self.matrix.outputs

    def _few(self, x: Rows, out: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        return words_linear(x, self.matrix, out, bias=self.bias, silu=silu)

    def _few_and_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        splits = self._num_splits(rows)
        if splits == 1:
            gain, eps = norm.weight, norm.eps
            return words_add_and_norm(rows, self.matrix, residual, gain, eps, bias=self.bias)
        parts = rows.new_empty((splits, *residual.shape), dtype=torch.float32)
        self._few(rows, parts)
        out = torch.empty_like(residual)
        return add_rms_norm(parts, residual, norm.weight, norm.eps, out)

    def _num_splits(self, x: Rows) -> int:
        if not self.are_few(x) or self.bias is not None:
            return 1
        return WordsProduct.of(len(rows_of(x)), self.matrix).num_splits


def words_product(x: Rows, matrix: Words, bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias, for any number of rows."""
    rows = rows_of(x)
    if len(rows) > WordsProduct.of(len(rows), matrix).most_rows:
        return F.linear(rows, words_numbers(matrix, rows.dtype), bias)
    out = rows.new_empty(len(rows), matrix.outputs)
    return words_linear(x, matrix, out, bias=bias) if len(rows) else out
