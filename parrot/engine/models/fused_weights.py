"""Weights with the products of the Triton kernels."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.products import (
    UndividedRows,
    few_rows_add_and_norm,
    few_rows_linear,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.models.layers import Linear, PlainLinear, RMSNorm
from parrot.engine.models.parallel import Ranks, SummedLinear

Normed = torch.Tensor | UndividedRows

OUT_SLOT, DOWN_SLOT, EMBEDDING_SLOT = range(3)


@dataclass(frozen=True, slots=True)
class Weight:
    """A weight with its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ranks: Ranks | None = None  # Ranks whose products are summed; None for a whole weight.
    slot: int = 0  # The slot of symmetric memory for the sum.

    @classmethod
    def of(cls, linear: Linear, slot: int = 0) -> "Weight":
        if isinstance(linear, SummedLinear):
            return replace(cls.of(linear.linear), ranks=linear.ranks, slot=slot)
        assert isinstance(linear, PlainLinear), "fused kernels need weights as they are"
        return cls(linear.weight, linear.bias)

    def __call__(self, x: Normed) -> torch.Tensor:
        if isinstance(x, UndividedRows) or _is_few(x):
            out = _rows(x).new_empty(len(_rows(x)), len(self.weight))
            return few_rows_linear(x, self.weight, out, bias=self.bias)
        return F.linear(x, self.weight, self.bias)

    def summed(self, x: torch.Tensor) -> torch.Tensor:
        """The product, summed over the ranks."""
        return self(x) if self.ranks is None else self.ranks.all_reduce(self(x))

    def gated(self, x: Normed) -> torch.Tensor:
        """silu(gate) * up, for a weight [gate | up]."""
        out = _rows(x).new_empty(len(_rows(x)), len(self.weight) // 2)
        if isinstance(x, UndividedRows) or _is_few(x):
            return few_rows_linear(x, self.weight, out, bias=self.bias, silu=True)
        return silu_mul(F.linear(x, self.weight, self.bias), out)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Normed:
        """residual += the product, in place. Returns the norm of the residual."""
        if self.ranks is None and _is_few(x) and x.dtype != torch.float16:
            return few_rows_add_and_norm(
                x, self.weight, residual, norm.weight, norm.eps, bias=self.bias
            )
        if self.ranks is not None and (exchanges := self.ranks.exchanges) is not None:
            splits = num_splits(x, self.weight) if self.bias is None and _is_few(x) else 1
            part = exchanges.slot(self.slot, splits, residual)
            if part is not None:
                self._into(part, x)
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        product = self.summed(x)
        out = torch.empty_like(residual)
        return add_rms_norm(product, residual, norm.weight, norm.eps, out)

    def _into(self, part: torch.Tensor, x: torch.Tensor) -> None:
        """Write the product to `part` [splits, rows, outputs], split by inputs."""
        if _is_few(x):
            few_rows_linear(x, self.weight, part, bias=self.bias)
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=part[0])
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=part[0])


def _rows(x: Normed) -> torch.Tensor:
    return x.rows if isinstance(x, UndividedRows) else x


def _is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= FEW_ROWS
