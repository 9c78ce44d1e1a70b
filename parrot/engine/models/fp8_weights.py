"""Weights in e4m3 with the products of the Triton kernels."""

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from parrot.engine.kernels.attention_shape import AttentionShape
from parrot.engine.kernels.fused import add_rms_norm, silu_mul
from parrot.engine.kernels.linear.products import (
    Rows,
    UndividedRows,
    can_rotate,
    coded_rows,
    few_rows_add_and_norm,
    few_rows_linear,
    few_rows_qkv,
    is_blocked,
    num_splits,
    parts_of,
)
from parrot.engine.kernels.linear.tiles import FEW_E4M3_ROWS, FEW_ROWS, Product
from parrot.engine.kernels.row_codes import CodedRows, Factors, row_codes
from parrot.engine.models.fp8 import Fp8Matrix, fp8_product, unscaled_product
from parrot.engine.models.fused_weights import LayerWeight, Where, num_rows, rows_of
from parrot.engine.models.layers import RMSNorm

if TYPE_CHECKING:
    from parrot.engine.kernels.linear.chain import ChainWeight

# Up to this number of rows, cuBLAS is faster without a factor per row and per output. On an H200
# the four products of a layer of Llama-3.1-8B then take 80 us instead of 114 with 160 rows, 101
# instead of 116 with 256, 165 instead of 173 with 512 and 692 instead of 676 with 2,048.
_UNSCALED_ROWS = 512


@dataclass(frozen=True, slots=True)
class Fp8Weight(LayerWeight):
    """A weight in e4m3: the codes are `weight`.

    The kernels between products round rows for the next product. The products of a single row
    round it themselves."""

    reads_e4m3: ClassVar[bool] = True

    scales: torch.Tensor = field(kw_only=True)

    @classmethod
    def of(cls, matrix: Fp8Matrix, bias: torch.Tensor | None) -> "Fp8Weight":
        return cls(matrix.codes, bias, scales=matrix.scales)

    @property
    def most_rows(self) -> int:
        return self._product(1).most_rows

    def __call__(self, x: Rows) -> torch.Tensor:
        if self.are_few(x) or not num_rows(x):
            out = _new_rows(x, len(self.weight))
            return self._few(x, out) if len(out) else out
        coded = _coded(x)
        matrix = Fp8Matrix(self.weight, self.scales)
        return fp8_product(coded.codes, coded.powers, matrix, self.bias, coded.dtype)

    def unscaled(
        self, x: Rows, dtype: torch.dtype | None = None
    ) -> tuple[torch.Tensor, Factors | None]:
        """`dtype`: the type of a product without its factors; None for the type of x."""
        is_faster = FEW_E4M3_ROWS < num_rows(x) <= _UNSCALED_ROWS
        if not is_faster or self._is_blocked or self.bias is not None:
            return self(x), None
        coded = _coded(x)
        if coded.dtype == torch.float16:  # Without factors, sums may exceed float16.
            return self(coded), None
        out = unscaled_product(coded.codes, self.weight, dtype or coded.dtype)
        return out, Factors(coded.powers, self.scales)

    def _few(self, x: Rows, out: torch.Tensor, *, silu: bool = False) -> torch.Tensor:
        coded = coded_rows(x, self.weight, self.scales, silu=silu)
        bias, scales = self.bias, self.scales
        return few_rows_linear(coded, self.weight, out, bias=bias, scales=scales, silu=silu)

    def rotated(self, x: Rows, where: Where) -> torch.Tensor:
        coded = coded_rows(x, self.weight, self.scales)
        return few_rows_qkv(coded, self.weight, *where, bias=self.bias, scales=self.scales)

    def for_chain(self) -> "ChainWeight | None":
        if self._is_blocked:
            return None
        from parrot.engine.kernels.linear.chain import CodedWeight  # On Hopper GPUs only.

        return CodedWeight(self.weight, self.scales)

    def gated(self, x: Rows, *, for_e4m3: bool) -> Rows:
        width = len(self.weight) // 2
        if self.are_few(x):
            return self._few(x, _new_rows(x, width), silu=True)
        both, factors = self.unscaled(x)
        if not for_e4m3:
            return silu_mul(both, both.new_empty(len(both), width), factors=factors)
        found = CodedRows.empty(both, width)
        silu_mul(both, found.codes, powers=found.powers, factors=factors)
        return found

    def add_and_norm(
        self, x: Rows, residual: torch.Tensor, norm: RMSNorm, *, for_e4m3: bool
    ) -> Rows:
        gain, eps, few = norm.weight, norm.eps, self.are_few(x)
        if self.ranks is not None:
            return self._sum_and_norm(x, residual, norm)
        if few and self._is_row(len(residual)):
            assert not isinstance(x, UndividedRows)
            bias, scales = self.bias, self.scales
            return few_rows_add_and_norm(
                x, self.weight, residual, gain, eps, bias=bias, scales=scales
            )
        if few:
            product, factors = self._parts(x, residual), None
        else:
            product, factors = self.unscaled(x, torch.float32)
        if not for_e4m3:
            out = torch.empty_like(residual)
            return add_rms_norm(product, residual, gain, eps, out, factors=factors)
        found = CodedRows.empty(residual, len(self.weight))
        powers = found.powers
        add_rms_norm(product, residual, gain, eps, found.codes, powers=powers, factors=factors)
        return found

    def _parts(self, x: Rows, residual: torch.Tensor) -> torch.Tensor:
        """Parts of the product of few rows, float32 [splits, rows, outputs]."""
        parts = residual.new_empty((self._num_splits(x), *residual.shape), dtype=torch.float32)
        return self._few(x, parts)

    def _is_row(self, num_rows: int) -> bool:
        """Whether this product and the next one have whole rows of weights per program."""
        product = self._product(num_rows)
        return product.is_row and replace(product, inputs=product.outputs).is_row

    def _product(self, num_rows: int) -> Product:
        (num_out, size), dtype = self.weight.shape, self.weight.dtype
        return Product(num_rows, num_out, size, dtype, is_blocked=self._is_blocked)

    @property
    def _is_blocked(self) -> bool:
        return is_blocked(self.scales)

    def can_rotate(self, shape: AttentionShape, x: Rows) -> bool:
        return can_rotate(shape, x, self.weight, self.scales)

    def _num_splits(self, x: Rows) -> int:
        # The sum of ranks adds parts of at most `FEW_ROWS` rows.
        most_rows = self.most_rows if self.ranks is None else FEW_ROWS
        if num_rows(x) > most_rows or self.bias is not None:
            return 1
        return num_splits(num_rows(x), self.weight, self.scales)


def _coded(x: Rows) -> CodedRows:
    return x if isinstance(x, CodedRows) else row_codes(rows_of(x))


def _new_rows(x: Rows, size: int) -> torch.Tensor:
    """Uninitialized rows of `size` numbers, as many as in x, in x's type before rounding."""
    rows, *_ = parts_of(x)
    dtype = x.dtype if isinstance(x, CodedRows) else rows.dtype
    return rows.new_empty((len(rows), size), dtype=dtype)
