"""Weights with the products of the Triton kernels. `fp8_weights` has those in e4m3."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.products import (
    Rows,
    UndividedRows,
    can_rotate,
    few_rows_add_and_norm,
    few_rows_linear,
    few_rows_qkv,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.kernels.row_codes import CodedRows
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.parallel import Ranks

Normed = Rows | CodedRows

OUT_SLOT, DOWN_SLOT, EMBEDDING_SLOT = range(3)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight with its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ranks: Ranks | None = None  # Ranks whose products are summed; None for a whole weight.
    slot: int = 0  # The slot of symmetric memory for the sum.

    def __call__(self, x: Normed) -> torch.Tensor:
        rows = rows_of(x)
        if isinstance(x, UndividedRows) or is_few(rows):
            out = rows.new_empty(len(rows), len(self.weight))
            few = x if isinstance(x, UndividedRows) else rows
            return few_rows_linear(few, self.weight, out, bias=self.bias)
        return F.linear(rows, self.weight, self.bias)

    def summed(self, x: Normed) -> torch.Tensor:
        """The product, summed over the ranks."""
        return self(x) if self.ranks is None else self.ranks.all_reduce(self(x))

    def can_rotate(self, shape: AttentionShape, x: Normed) -> bool:
        """Whether `rotated` supports these rows and heads."""
        return can_rotate(shape, x, self.weight)

    def rotated(
        self,
        x: Normed,
        kv: KVView,
        table_rows: torch.Tensor,
        cos_sin: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        """See `few_rows_qkv`, for a weight [q | k | v]."""
        assert not isinstance(x, CodedRows)
        return few_rows_qkv(x, self.weight, kv, table_rows, cos_sin, shape, bias=self.bias)

    def gated(self, x: Normed) -> torch.Tensor:
        """silu(gate) * up, for a weight [gate | up]."""
        rows = rows_of(x)
        out = rows.new_empty(len(rows), len(self.weight) // 2)
        if isinstance(x, UndividedRows) or is_few(rows):
            few = x if isinstance(x, UndividedRows) else rows
            return few_rows_linear(few, self.weight, out, bias=self.bias, silu=True)
        return silu_mul(F.linear(rows, self.weight, self.bias), out)

    def add_and_norm(
        self, x: Normed, residual: torch.Tensor, norm: RMSNorm, *, is_last: bool = False
    ) -> Rows:
        """residual += the product, in place. Returns the norm of the residual.

        `is_last`: the head of the model reads it, whose weight is not in e4m3."""
        x = rows_of(x)
        if self.ranks is None and is_few(x) and x.dtype != torch.float16:
            return few_rows_add_and_norm(
                x, self.weight, residual, norm.weight, norm.eps, bias=self.bias
            )
        if self.ranks is not None and (exchanges := self.ranks.exchanges) is not None:
            splits = num_splits(x, self.weight) if self.bias is None and is_few(x) else 1
            part = exchanges.slot(self.slot, splits, residual)
            if part is not None:
                self._into(part, x)
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        product = self.summed(x)
        out = torch.empty_like(residual)
        return add_rms_norm(product, residual, norm.weight, norm.eps, out)

    def _into(self, part: torch.Tensor, x: torch.Tensor) -> None:
        """Write the product to `part` [splits, rows, outputs], split by inputs."""
        if is_few(x):
            few_rows_linear(x, self.weight, part, bias=self.bias)
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=part[0])
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=part[0])


def rows_of(x: Normed) -> torch.Tensor:
    """The rows of x, which are not in e4m3."""
    assert not isinstance(x, CodedRows)
    return x if isinstance(x, torch.Tensor) else x.rows


def is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= FEW_ROWS
