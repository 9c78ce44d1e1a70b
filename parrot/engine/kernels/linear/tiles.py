"""Tile sizes for products of few rows, tuned on an H200 (docs/internals/kernels.md)."""

from dataclasses import dataclass

import torch
import triton

FEW_ROWS = 64
"""The most rows for which these products are faster than cuBLAS."""

_SMALL = 8 << 20  # weights that are not worth the matrix unit for two rows
_ROW_INPUTS = {1: 16384, 2: 4096}  # by rows: of more, two outputs' weights overflow the registers
_ROW_BYTES = 32 << 10  # of weights in the registers of a program
_ROW_OUTPUTS = (2, 16)  # the fewest and the most of a program
_WARP_INPUTS = 256  # of a row of weights, for each thread to read 16 bytes at once
_SOME_OUTPUTS = 3072  # enough for tiles of 64
_MANY_OUTPUTS = 4096  # enough for wide tiles to occupy a GPU
_FEW_PROGRAMS = 96
_MIN_DOT = 16
_HALF = FEW_ROWS // 2


@dataclass(frozen=True, slots=True)
class Product:
    """The shape of a product of rows [rows, inputs] and weights [outputs, inputs]; with `silu` the
    weights are those of gates and of what they let through, [2 outputs, inputs].

    dtype  of the rows and weights"""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    silu: bool = False

    @property
    def is_row(self) -> bool:
        """Whether it is best computed without the matrix unit, unless it is split."""
        num_weights = self.outputs * self.inputs * (2 if self.silu else 1)
        is_small = self.rows == 1 or num_weights < _SMALL
        return is_small and self.inputs <= _ROW_INPUTS.get(self.rows, 0)

    def tile(self) -> dict[str, int]:
        """Launch arguments of the kernel that is best for it, unless it is split."""
        return self.row_tile() if self.is_row else self.matrix_tile()

    @property
    def num_splits(self) -> int:
        """Into how many parts of its inputs it is best split, if somebody sums them: so many that
        its programs occupy a GPU."""
        if self.is_row:
            return 1
        tile = self.matrix_tile()
        is_wide = triton.cdiv(self.outputs, tile["BN"]) > _FEW_PROGRAMS
        return 1 if is_wide or self.inputs % (2 * tile["BK"]) else 2

    def row_tile(self) -> dict[str, int]:
        """Launch arguments of a kernel without the matrix unit, whose programs have whole rows of
        weights: so many that a few programs fit a multiprocessor."""
        columns = triton.next_power_of_2(self.inputs)
        outputs = _ROW_BYTES // (columns * self.dtype.itemsize * (2 if self.silu else 1))
        least, most = _ROW_OUTPUTS
        outputs = min(max(outputs, least), most)
        warps = 8 if self.rows == 1 and columns >= 8 * _WARP_INPUTS else 4
        return {"ROWS": self.rows, "BN": outputs, "BK": columns, "num_warps": warps}

    def matrix_tile(self) -> dict[str, int]:
        """Launch arguments of a kernel on the matrix unit. Short outputs need more programs than
        wide tiles give; the fewer programs, the more of the weights must each have on its way."""
        choose = _tile_of_32 if self.rows <= _HALF else _tile_of_64
        outputs, columns, stages, warps = choose(self.outputs, silu=self.silu)
        if self.dtype == torch.float32:  # twice the bytes, and no matrix unit: all would not fit
            columns //= 4
        return {
            "BM": max(_MIN_DOT, triton.next_power_of_2(self.rows)),
            "BN": outputs,
            "BK": min(columns, max(_MIN_DOT, triton.next_power_of_2(self.inputs))),
            "STAGES": stages,
            "num_warps": warps,
        }


def _tile_of_32(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """Outputs and columns of a tile, stages, warps."""
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 256, 4, 2) if silu else (16, 512, 4, 2)
    if silu:
        return (128, 128, 3, 4) if num_out > 2 * _MANY_OUTPUTS else (64, 64, 6, 4)
    if num_out < _MANY_OUTPUTS:
        return 64, 128, 6, 4
    return 64, 128, (4 if num_out > 2 * _MANY_OUTPUTS else 6 if num_out > 5120 else 8), 4


def _tile_of_64(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """Every program reads x, which with more than half of the rows takes as long as the weights."""
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 64, 6, 4) if silu else (16, 256, 5, 4)
    if silu:
        return 64, 64, (4 if num_out > 2 * _MANY_OUTPUTS else 6), 4
    return (128, 128, 4, 8) if num_out > 2 * _MANY_OUTPUTS else (64, 128, 6, 4)
