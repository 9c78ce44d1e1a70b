"""Weights with the products of the Triton kernels. `fp8_weights` has those in e4m3."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.products import (
    Rows,
    can_rotate,
    few_rows_add_and_norm,
    few_rows_linear,
    few_rows_qkv,
    num_splits,
    parts_of,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.kernels.row_codes import CodedRows, Factors
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.parallel import Ranks

if TYPE_CHECKING:
    from parrot.engine.kernels.linear.chain import ChainWeight

# The KV, the rows of block tables, the angles and the heads that `few_rows_qkv` needs.
Where = tuple[KVView, torch.Tensor, torch.Tensor, AttentionShape]

OUT_SLOT, DOWN_SLOT, EMBEDDING_SLOT = range(3)


@dataclass(frozen=True, slots=True)
class LayerWeight(ABC):
    """A weight of a layer [outputs, inputs] with its products.

    `for_e4m3` of a method: the next product is with a weight in e4m3 (`reads_e4m3`)."""

    reads_e4m3: ClassVar[bool]

    weight: torch.Tensor
    bias: torch.Tensor | None
    # Ranks whose products are summed; None for a whole weight.
    ranks: Ranks | None = field(default=None, kw_only=True)
    slot: int = field(default=0, kw_only=True)  # The slot of symmetric memory for the sum.

    @abstractmethod
    def __call__(self, x: Rows) -> torch.Tensor: ...

    @abstractmethod
    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        """See `few_rows_qkv`, for a weight [q | k | v]."""

    @abstractmethod
    def gated(self, x: Rows, *, for_e4m3: bool) -> Rows:
        """silu(gate) * up, for a weight [gate | up]."""

    @abstractmethod
    def add_and_norm(
        self, x: Rows, residual: torch.Tensor, norm: RMSNorm, *, for_e4m3: bool
    ) -> Rows:
        """residual += the product, in place. Returns the norm of the residual."""

    @abstractmethod
    def _few(self, x: Rows, out: torch.Tensor) -> torch.Tensor:
        """Write the product of few rows to `out` [rows, outputs], or [splits, rows, outputs] split
        by inputs. Returns `out`."""

    def _many(self, x: Rows, out: torch.Tensor) -> None:
        """Write the product of more rows to `out` [rows, outputs]."""
        out.copy_(self(x))

    def unscaled(self, x: Rows) -> tuple[torch.Tensor, Factors | None]:
        """The product, and the factors that it has yet to be multiplied by.

        Or parts of the product, float32 [parts, rows, outputs]."""
        return self(x), None

    def for_chain(self) -> "ChainWeight | None":
        """The weight for one kernel between two attentions; None without such a kernel."""
        return None

    @property
    def num_outputs(self) -> int:
        return len(self.weight)

    @property
    def most_rows(self) -> int:
        """The limit of the products of few rows."""
        return FEW_ROWS

    def are_few(self, x: Rows) -> bool:
        """Whether the products of few rows can read x."""
        return 0 < num_rows(x) <= self.most_rows

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        """Whether `rotated` supports these rows and heads."""
        return can_rotate(shape, x, self.weight)

    def summed(self, x: Rows) -> torch.Tensor:
        """The product, summed over the ranks."""
        return self(x) if self.ranks is None else self.ranks.all_reduce(self(x))

    def _sum_and_norm(self, x: Rows, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        """`add_and_norm` for any number of rows and ranks."""
        if self.ranks is not None and (exchanges := self.ranks.exchanges) is not None:
            part = exchanges.slot(self.slot, self._num_splits(x), residual)
            if part is not None:
                if self.are_few(x):
                    self._few(x, part)
                else:
                    self._many(x, part[0])
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        out = torch.empty_like(residual)
        return add_rms_norm(self.summed(x), residual, norm.weight, norm.eps, out)

    def _num_splits(self, x: Rows) -> int:
        is_one = not self.are_few(x) or self.bias is not None
        return 1 if is_one else num_splits(num_rows(x), self.weight)


class UnroundedWeight(LayerWeight):
    """A weight whose products read rows in the model's type."""

    __slots__ = ()
    reads_e4m3: ClassVar[bool] = False

    def gated(self, x: Rows, *, for_e4m3: bool) -> torch.Tensor:
        rows = rows_of(x)
        out = rows.new_empty(len(rows), self.num_outputs // 2)
        return self._few(x, out, silu=True) if self.are_few(x) else silu_mul(self(x), out)

    def add_and_norm(
        self, x: Rows, residual: torch.Tensor, norm: RMSNorm, *, for_e4m3: bool
    ) -> Rows:
        rows = rows_of(x)
        is_whole = self.ranks is None and self.are_few(x)
        # Products in e4m3 round rows after their division by the root mean square.
        if is_whole and rows.dtype != torch.float16 and not for_e4m3:
            return self._few_and_norm(rows, residual, norm)
        return self._sum_and_norm(rows, residual, norm)

    @abstractmethod
    def _few(self, x: Rows, out: torch.Tensor, *, silu: bool = False) -> torch.Tensor: ...

    @abstractmethod
    def _few_and_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        """`add_and_norm` for few rows and a whole weight."""


@dataclass(frozen=True, slots=True)
class Weight(UnroundedWeight):
    """A weight in the model's type."""

    def __call__(self, x: Rows) -> torch.Tensor:
        rows = rows_of(x)
        if not self.are_few(x):
            return F.linear(rows, self.weight, self.bias)
        out = rows.new_empty(len(rows), len(self.weight))
        return self._few(x, out)

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        return few_rows_qkv(x, self.weight, *where, bias=self.bias)

    def _few(self, x: Rows, out: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        return few_rows_linear(x, self.weight, out, bias=self.bias, silu=silu)

    def _few_and_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        gain, eps = norm.weight, norm.eps
        return few_rows_add_and_norm(rows, self.weight, residual, gain, eps, bias=self.bias)

    def _many(self, x: Rows, out: torch.Tensor) -> None:
        if self.bias is None:
            torch.mm(rows_of(x), self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, rows_of(x), self.weight.t(), out=out)


def num_rows(x: Rows) -> int:
    return len(parts_of(x)[0])


def rows_of(x: Rows) -> torch.Tensor:
    """The rows of x, which are not in e4m3."""
    assert not isinstance(x, CodedRows)
    return x if isinstance(x, torch.Tensor) else x.rows
