"""Weights in e4m3 with the products of the Triton kernels."""

from dataclasses import dataclass

import torch

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.launch import KVView
from parrot.engine.kernels.linear.products import (
    MeasuredRows,
    Rows,
    can_rotate,
    few_rows_add_and_norm,
    few_rows_gated,
    few_rows_linear,
    few_rows_qkv,
    measured_rows,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import Product
from parrot.engine.kernels.row_codes import CodedRows, row_codes
from parrot.engine.models.fp8 import Fp8Matrix, fp8_product
from parrot.engine.models.fused_weights import Normed, is_few, rows_of
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.parallel import Ranks


@dataclass(frozen=True, slots=True)
class Fp8Weight:
    """`fused_weights.Weight` in e4m3.

    The kernels between products measure few rows for the next product, which rounds them. They
    round many rows themselves."""

    matrix: Fp8Matrix
    bias: torch.Tensor | None
    ranks: Ranks | None = None
    slot: int = 0

    @property
    def _num_out(self) -> int:
        return len(self.matrix.codes)

    def __call__(self, x: Normed) -> torch.Tensor:
        if isinstance(x, CodedRows):
            return fp8_product(x.codes, x.powers, self.matrix, self.bias, x.dtype)
        rows = rows_of(x)
        if not is_few(rows):
            return self(row_codes(rows)) if len(rows) else rows.new_empty(0, self._num_out)
        return self._few(x, rows.new_empty(len(rows), self._num_out))

    def _few(self, x: Rows, out: torch.Tensor) -> torch.Tensor:
        codes, scales = self.matrix.codes, self.matrix.scales
        measured = measured_rows(x, codes, self._num_out)
        return few_rows_linear(measured, codes, out, bias=self.bias, scales=scales)

    def summed(self, x: Normed) -> torch.Tensor:
        return self(x) if self.ranks is None else self.ranks.all_reduce(self(x))

    def can_rotate(self, shape: AttentionShape, x: Normed) -> bool:
        return can_rotate(shape, x, self.matrix.codes)

    def rotated(
        self,
        x: Normed,
        kv: KVView,
        table_rows: torch.Tensor,
        cos_sin: torch.Tensor,
        shape: AttentionShape,
    ) -> torch.Tensor:
        assert not isinstance(x, CodedRows)
        codes, scales = self.matrix.codes, self.matrix.scales
        where, measured = (kv, table_rows, cos_sin, shape), measured_rows(x, codes, self._num_out)
        return few_rows_qkv(measured, codes, *where, bias=self.bias, scales=scales)

    def gated(self, x: Normed) -> Normed:
        codes, scales, width = self.matrix.codes, self.matrix.scales, self._num_out // 2
        if isinstance(x, CodedRows) or not is_few(rows_of(x)):
            both = self(x)
            coded = CodedRows.empty(both, width)
            silu_mul(both, coded.codes, powers=coded.powers)
            return coded
        rows = rows_of(x)
        measured = measured_rows(x, codes, width, silu=True)
        out = rows.new_empty(len(rows), width)
        return few_rows_gated(measured, codes, out, bias=self.bias, scales=scales)

    def add_and_norm(
        self, x: Normed, residual: torch.Tensor, norm: RMSNorm, *, is_last: bool = False
    ) -> Normed:
        gain, eps = norm.weight, norm.eps
        if self.ranks is not None:
            return self._sum_and_norm(x, residual, norm, self.ranks)
        if isinstance(x, CodedRows) or not is_few(rows_of(x)):
            product = self(x)
            if is_last:
                return add_rms_norm(product, residual, gain, eps, torch.empty_like(residual))
            coded = CodedRows.empty(residual, self._num_out)
            add_rms_norm(product, residual, gain, eps, coded.codes, powers=coded.powers)
            return coded
        rows, codes = rows_of(x), self.matrix.codes
        if self._is_row(len(rows)):
            return few_rows_add_and_norm(
                rows, codes, residual, gain, eps, bias=self.bias, scales=self.matrix.scales
            )
        splits = 1 if self.bias is not None else num_splits(rows, codes)
        parts = rows.new_empty((splits, len(rows), self._num_out), dtype=torch.float32)
        self._few(x, parts)
        out, maxima = torch.empty_like(residual), rows.new_empty((len(rows), 1), dtype=torch.int32)
        add_rms_norm(parts, residual, gain, eps, out, powers=maxima)
        return MeasuredRows(out, maxima)

    def _is_row(self, num_rows: int) -> bool:
        """Whether this product and the next one have whole rows of weights per program."""
        sizes = self.matrix.codes.shape[1], self._num_out
        dtype = self.matrix.codes.dtype
        return all(Product(num_rows, self._num_out, size, dtype).is_row for size in sizes)

    def _sum_and_norm(
        self, x: Normed, residual: torch.Tensor, norm: RMSNorm, ranks: Ranks
    ) -> Normed:
        exchanges, few = ranks.exchanges, None
        if not isinstance(x, CodedRows) and is_few(rows_of(x)):
            few = x
        if exchanges is not None:
            splits = 1
            if few is not None and self.bias is None:
                splits = num_splits(rows_of(few), self.matrix.codes)
            part = exchanges.slot(self.slot, splits, residual)
            if part is not None and few is not None:
                self._few(few, part)
            elif part is not None:
                part[0].copy_(self(x))
            if part is not None:
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        out = torch.empty_like(residual)
        return add_rms_norm(self.summed(x), residual, norm.weight, norm.eps, out)
