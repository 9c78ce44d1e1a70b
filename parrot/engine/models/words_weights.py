"""Weights in codes with the products of the Triton kernels."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_parts, add_rms_norm
from parrot.engine.kernels.launch import is_hopper
from parrot.engine.kernels.linear.products import Rows, UndividedRows
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.kernels.linear.warp_group_tiles import (
    WarpGroupProduct,
    can_read,
    fits_warp_groups,
)
from parrot.engine.kernels.linear.words import (
    words_add_and_norm,
    words_linear,
    words_numbers,
    words_qkv,
)
from parrot.engine.kernels.linear.words_layout import Words
from parrot.engine.kernels.linear.words_tiles import WordsProduct
from parrot.engine.kernels.row_codes import Factors
from parrot.engine.models.fused_weights import UnroundedWeight, Where, rows_of
from parrot.engine.models.layers import RMSNorm

_FEW_GROUPED_ROWS = 128  # `most_rows` on warp groups.


@dataclass(frozen=True, slots=True)
class WordsWeight(UnroundedWeight):
    """A weight in codes. Its words are `weight`."""

    matrix: Words = field(kw_only=True)

    @classmethod
    def of(cls, matrix: Words, bias: torch.Tensor | None) -> "WordsWeight":
        return cls(matrix.words, bias, matrix=matrix)

    def __call__(self, x: Rows) -> torch.Tensor:
        return words_product(x, self.matrix, self.bias)

    def unscaled(self, x: Rows) -> tuple[torch.Tensor, Factors | None]:
        grouped = _on_warp_groups(x, self.matrix) if self.are_few(x) else None
        if grouped is None or grouped.num_splits == 1:
            return self(x), None
        return self._parts(x, grouped.num_splits), None

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        num_rows = len(rows_of(x))
        if not 0 < num_rows <= FEW_ROWS or _on_warp_groups(x, self.matrix) is not None:
            return False
        tile = WordsProduct.of(num_rows, self.matrix).tile()
        return shape.head_dim % tile["BN"] == 0

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        return words_qkv(x, self.matrix, *where, bias=self.bias)

    def for_chain(self) -> Words:
        return self.matrix

    @property
    def num_outputs(self) -> int:
        return self.matrix.outputs

    @property
    def most_rows(self) -> int:
        is_grouped = self.ranks is None and _has_warp_groups(self.matrix)
        return _FEW_GROUPED_ROWS if is_grouped else FEW_ROWS

    def _few(self, x: Rows, out: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        return _product(x, self.matrix, out, bias=self.bias, silu=silu)

    def _few_and_norm(self, rows: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Rows:
        gain, eps = norm.weight, norm.eps
        grouped = _on_warp_groups(rows, self.matrix)
        splits = self._num_splits(rows) if grouped is None else grouped.num_splits
        if grouped is None and splits == 1:
            return words_add_and_norm(rows, self.matrix, residual, gain, eps, bias=self.bias)
        parts = self._parts(rows, splits)
        if grouped is not None and len(rows) <= FEW_ROWS:  # Products of more rows do not divide.
            return UndividedRows(*add_parts(parts, residual, gain), eps)
        return add_rms_norm(parts, residual, gain, eps, torch.empty_like(residual))

    def _parts(self, x: Rows, splits: int) -> torch.Tensor:
        """Parts of the product, float32 [splits, rows, outputs]."""
        rows = rows_of(x)
        shape = splits, len(rows), self.num_outputs
        return self._few(x, rows.new_empty(shape, dtype=torch.float32))

    def _num_splits(self, x: Rows) -> int:
        if not self.are_few(x) or self.bias is not None:
            return 1
        grouped = _on_warp_groups(x, self.matrix)
        return (grouped or WordsProduct.of(len(rows_of(x)), self.matrix)).num_splits


def _has_warp_groups(matrix: Words) -> bool:
    """Whether the device has warp groups, and they support the matrix."""
    return is_hopper(matrix.words.device) and fits_warp_groups(matrix)


def _on_warp_groups(x: Rows, matrix: Words) -> WarpGroupProduct | None:
    """The shape of the product on warp groups; None if they do not support it."""
    if not _has_warp_groups(matrix) or not can_read(x):
        return None
    return WarpGroupProduct.of(len(rows_of(x)), matrix)


def _product(
    x: Rows,
    matrix: Words,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """Write the product of any number of rows to `out`. See `words_linear`."""
    grouped, is_whole = _on_warp_groups(x, matrix), out.dim() == 2
    # A whole product with few outputs has few programs on warp groups.
    if grouped is None or (is_whole and grouped.num_splits > 1 and not silu):
        return words_linear(x, matrix, out, bias=bias, silu=silu)
    from parrot.engine.kernels.linear.warp_groups import warp_group_linear  # On Hopper GPUs only.

    return warp_group_linear(x, matrix, out, bias=bias, silu=silu)


def words_product(x: Rows, matrix: Words, bias: torch.Tensor | None) -> torch.Tensor:
    """x weight^T + bias, for any number of rows."""
    rows = rows_of(x)
    if len(rows) > matrix.most_rows:
        return F.linear(rows, words_numbers(matrix, rows.dtype), bias)
    out = rows.new_empty(len(rows), matrix.outputs)
    return _product(x, matrix, out, bias=bias) if len(rows) else out
