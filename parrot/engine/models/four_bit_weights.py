"""Weights of four bits with the products of the Triton kernels."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.four_bit import (
    four_bit_add_and_norm,
    four_bit_linear,
    four_bit_numbers,
    four_bit_qkv,
)
from parrot.engine.kernels.linear.four_bit_tiles import FourBitProduct
from parrot.engine.kernels.linear.four_bit_words import FourBitWords
from parrot.engine.kernels.linear.products import Rows, UndividedRows
from parrot.engine.models.fused_weights import (
    LayerWeight,
    Normed,
    Where,
    few_rows,
    rows_of,
    unmeasured_few_rows,
)
from parrot.engine.models.layers import RMSNorm


@dataclass(frozen=True, slots=True)
class FourBitWeight(LayerWeight):
    """A weight of four bits. Its words are `weight`."""

    reads_e4m3: ClassVar[bool] = False

    matrix: FourBitWords = field(kw_only=True)

    @classmethod
    def of(cls, matrix: FourBitWords, bias: torch.Tensor | None) -> "FourBitWeight":
        return cls(matrix.words, bias, matrix=matrix)

    def __call__(self, x: Normed) -> torch.Tensor:
        few = unmeasured_few_rows(x)
        return four_bit_product(rows_of(x) if few is None else few, self.matrix, self.bias)

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        if few_rows(x) is None:
            return False
        tile = FourBitProduct.of(len(rows_of(x)), self.matrix).tile()
        return shape.head_dim % tile["BN"] == 0

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        return four_bit_qkv(x, self.matrix, *where, bias=self.bias)

    def gated(self, x: Normed, *, for_e4m3: bool) -> torch.Tensor:
        rows, few = rows_of(x), unmeasured_few_rows(x)
        out = rows.new_empty(len(rows), self.matrix.outputs // 2)
        if few is not None:
            return four_bit_linear(few, self.matrix, out, bias=self.bias, silu=True)
        return silu_mul(self(x), out)

    def add_and_norm(
        self, x: Normed, residual: torch.Tensor, norm: RMSNorm, *, for_e4m3: bool
    ) -> Rows:
        rows = rows_of(x)
        is_whole = self.ranks is None and few_rows(x) is not None
        if not is_whole or rows.dtype == torch.float16 or for_e4m3:
            return self._sum_and_norm(rows, residual, norm)
        splits = self._num_splits(rows)
        if splits == 1:
            gain, eps = norm.weight, norm.eps
            return four_bit_add_and_norm(rows, self.matrix, residual, gain, eps, bias=self.bias)
        parts = rows.new_empty((splits, *residual.shape), dtype=torch.float32)
        four_bit_linear(rows, self.matrix, parts)
        out = torch.empty_like(residual)
        return add_rms_norm(parts, residual, norm.weight, norm.eps, out)

    def _num_splits(self, x: Normed) -> int:
        if few_rows(x) is None or self.bias is not None:
            return 1
        return FourBitProduct.of(len(rows_of(x)), self.matrix).num_splits

    def _into(self, part: torch.Tensor, x: Normed) -> None:
        rows = rows_of(x)
        if few_rows(x) is not None:
            four_bit_linear(rows, self.matrix, part, bias=self.bias)
        else:
            part[0].copy_(self(rows))


def four_bit_product(
    x: torch.Tensor | UndividedRows, matrix: FourBitWords, bias: torch.Tensor | None
) -> torch.Tensor:
    """x weight^T + bias, for any number of rows."""
    rows = rows_of(x)
    if len(rows) > FourBitProduct.of(len(rows), matrix).most_rows:
        return F.linear(rows, four_bit_numbers(matrix, rows.dtype), bias)
    out = rows.new_empty(len(rows), matrix.outputs)
    return four_bit_linear(x, matrix, out, bias=bias) if len(rows) else out
