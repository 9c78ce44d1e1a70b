"""Weights in e4m3 with the products of the Triton kernels."""

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.products import (
    MeasuredRows,
    Rows,
    can_rotate,
    few_rows_add_and_norm,
    few_rows_gated,
    few_rows_linear,
    few_rows_qkv,
    is_blocked,
    measured_rows,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import Product
from parrot.engine.kernels.row_codes import CodedRows, row_codes
from parrot.engine.models.fp8 import Fp8Matrix, fp8_product
from parrot.engine.models.fused_weights import LayerWeight, Normed, Where, few_rows, rows_of
from parrot.engine.models.layers import RMSNorm


@dataclass(frozen=True, slots=True)
class Fp8Weight(LayerWeight):
    """A weight in e4m3: the codes are `weight`.

    The kernels between products measure few rows for the next product, which rounds them. They
    round many rows themselves."""

    reads_e4m3: ClassVar[bool] = True

    scales: torch.Tensor = field(kw_only=True)

    @classmethod
    def of(cls, matrix: Fp8Matrix, bias: torch.Tensor | None) -> "Fp8Weight":
        return cls(matrix.codes, bias, scales=matrix.scales)

    def __call__(self, x: Normed) -> torch.Tensor:
        if isinstance(x, CodedRows):
            matrix = Fp8Matrix(self.weight, self.scales)
            return fp8_product(x.codes, x.powers, matrix, self.bias, x.dtype)
        rows = rows_of(x)
        if few_rows(x) is None and len(rows):
            return self(row_codes(rows))
        out = rows.new_empty(len(rows), len(self.weight))
        return self._few(x, out) if len(rows) else out

    def _few(self, x: Rows, out: torch.Tensor) -> torch.Tensor:
        measured = measured_rows(x, self.weight, self.scales, len(self.weight))
        return few_rows_linear(measured, self.weight, out, bias=self.bias, scales=self.scales)

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        measured = measured_rows(x, self.weight, self.scales, len(self.weight))
        return few_rows_qkv(measured, self.weight, *where, bias=self.bias, scales=self.scales)

    def gated(self, x: Normed, *, for_e4m3: bool) -> Normed:
        width = len(self.weight) // 2
        if (few := few_rows(x)) is not None:
            rows = rows_of(few)
            measured = measured_rows(few, self.weight, self.scales, width, silu=True)
            out = rows.new_empty(len(rows), width)
            return few_rows_gated(measured, self.weight, out, bias=self.bias, scales=self.scales)
        both = self(x)
        if not for_e4m3:
            return silu_mul(both, both.new_empty(len(both), width))
        coded = CodedRows.empty(both, width)
        silu_mul(both, coded.codes, powers=coded.powers)
        return coded

    def add_and_norm(
        self, x: Normed, residual: torch.Tensor, norm: RMSNorm, *, for_e4m3: bool
    ) -> Normed:
        gain, eps, few = norm.weight, norm.eps, few_rows(x)
        if self.ranks is not None or (few is None and not for_e4m3):
            return self._sum_and_norm(x, residual, norm)
        if few is None:
            coded = CodedRows.empty(residual, len(self.weight))
            add_rms_norm(self(x), residual, gain, eps, coded.codes, powers=coded.powers)
            return coded
        rows = rows_of(few)
        if self._is_row(len(rows)):
            return few_rows_add_and_norm(
                rows, self.weight, residual, gain, eps, bias=self.bias, scales=self.scales
            )
        parts = rows.new_empty(
            (self._num_splits(few), len(rows), len(self.weight)), dtype=torch.float32
        )
        self._few(few, parts)
        out, maxima = torch.empty_like(residual), rows.new_empty((len(rows), 1), dtype=torch.int32)
        add_rms_norm(parts, residual, gain, eps, out, powers=maxima)
        return MeasuredRows(out, maxima)

    def _is_row(self, num_rows: int) -> bool:
        """Whether this product and the next one have whole rows of weights per program."""
        num_out, num_in = self.weight.shape
        dtype = self.weight.dtype
        return not is_blocked(self.scales) and all(
            Product(num_rows, num_out, size, dtype).is_row for size in (num_in, num_out)
        )

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        return can_rotate(shape, x, self.weight, self.scales)

    def _num_splits(self, x: Normed) -> int:
        few = few_rows(x)
        if few is None or self.bias is not None:
            return 1
        return num_splits(rows_of(few), self.weight, self.scales)

    def _into(self, part: torch.Tensor, x: Normed) -> None:
        if (few := few_rows(x)) is not None:
            self._few(few, part)
        else:
            part[0].copy_(self(x))
