"""Weights with the products of the Triton kernels."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.products import (
    MeasuredRows,
    Rows,
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_gated,
    few_rows_linear,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.models.fp8 import Fp8Linear, fp8_product
from parrot.engine.models.layers import Linear, PlainLinear, RMSNorm
from parrot.engine.models.parallel import Ranks, SummedLinear

OUT_SLOT, DOWN_SLOT, EMBEDDING_SLOT = range(3)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight with its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    scales: torch.Tensor | None = None  # Of a weight in e4m3 (`Fp8Matrix`).
    ranks: Ranks | None = None  # Ranks whose products are summed; None for a whole weight.
    slot: int = 0  # The slot of symmetric memory for the sum.

    @classmethod
    def of(cls, linear: Linear, slot: int = 0) -> "Weight":
        if isinstance(linear, SummedLinear):
            return replace(cls.of(linear.linear), ranks=linear.ranks, slot=slot)
        if isinstance(linear, Fp8Linear):
            return cls(linear.matrix.codes, linear.bias, linear.matrix.scales)
        assert isinstance(linear, PlainLinear), "fused kernels need weights as they are"
        return cls(linear.weight, linear.bias)

    def __call__(self, x: Rows) -> torch.Tensor:
        rows = rows_of(x)
        if isinstance(x, UndividedRows) or _is_few(rows):
            out = rows.new_empty(len(rows), len(self.weight))
            return few_rows_linear(x, self.weight, out, bias=self.bias, scales=self.scales)
        return self._product(rows)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        """The product of many rows."""
        if self.scales is None:
            return F.linear(x, self.weight, self.bias)
        return fp8_product(x, self.weight, self.scales, self.bias)

    def summed(self, x: Rows) -> torch.Tensor:
        """The product, summed over the ranks."""
        return self(x) if self.ranks is None else self.ranks.all_reduce(self(x))

    def gated(self, x: Rows) -> torch.Tensor | MeasuredRows:
        """silu(gate) * up, for a weight [gate | up]."""
        rows = rows_of(x)
        out = rows.new_empty(len(rows), len(self.weight) // 2)
        if isinstance(x, UndividedRows) or _is_few(rows):
            return few_rows_gated(x, self.weight, out, bias=self.bias, scales=self.scales)
        return silu_mul(self._product(rows), out)

    def add_and_norm(
        self, x: torch.Tensor | MeasuredRows, residual: torch.Tensor, norm: RMSNorm
    ) -> Rows:
        """residual += the product, in place. Returns the norm of the residual."""
        rows = rows_of(x)
        if self.ranks is None and _is_few(rows) and rows.dtype != torch.float16:
            gain, eps = norm.weight, norm.eps
            return few_rows_add_and_norm(
                x, self.weight, residual, gain, eps, bias=self.bias, scales=self.scales
            )
        if self.ranks is not None and (exchanges := self.ranks.exchanges) is not None:
            splits = num_splits(rows, self.weight) if self.bias is None and _is_few(rows) else 1
            part = exchanges.slot(self.slot, splits, residual)
            if part is not None:
                self._into(part, x)
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        product = self.summed(x)
        out = torch.empty_like(residual)
        return add_rms_norm(product, residual, norm.weight, norm.eps, out)

    def _into(self, part: torch.Tensor, x: torch.Tensor | MeasuredRows) -> None:
        """Write the product to `part` [splits, rows, outputs], split by inputs."""
        rows = rows_of(x)
        if _is_few(rows):
            few_rows_linear(x, self.weight, part, bias=self.bias, scales=self.scales)
        elif self.scales is not None:
            part[0].copy_(self._product(rows))
        elif self.bias is None:
            torch.mm(rows, self.weight.t(), out=part[0])
        else:
            torch.addmm(self.bias, rows, self.weight.t(), out=part[0])


def rows_of(x: Rows) -> torch.Tensor:
    return x if isinstance(x, torch.Tensor) else x.rows


def _is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= FEW_ROWS
