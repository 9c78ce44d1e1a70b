"""Tile sizes for products of few rows, tuned on an H200 (docs/internals/kernels.md)."""

from dataclasses import dataclass

import torch
import triton

# Most rows for which these products are faster than cuBLAS.
FEW_ROWS = 64
FEW_E4M3_ROWS = 128  # With weights and rows in e4m3, and a scale for each output.

_SMALL = 8 << 20  # Below this number of weights, two rows are computed without the tensor core.
# Most inputs without the tensor core, by number of rows. With more inputs the weights of two
# outputs exceed the registers.
_ROW_INPUTS = {1: 16384, 2: 4096}
_ROW_BYTES = 32 << 10  # Bytes of weights in the registers of a program.
_ROW_OUTPUTS = (2, 16)  # Fewest and most outputs of a program without the tensor core.
_E4M3_ROW_OUTPUTS = 4  # Fewest outputs with weights in e4m3.
_WARP_INPUTS = 256  # Inputs that a warp reads at once: 16 bytes per thread.
_SOME_OUTPUTS = 3072  # From this number of outputs on, tiles of 64 outputs are used.
_MANY_OUTPUTS = 4096  # From this number of outputs on, wide tiles occupy a GPU.
_FEW_PROGRAMS = 96  # A product with at most this number of programs may be split in two.
_MIN_DOT = 16  # Smallest dimension of an operand of the tensor core.
_MIN_DOT_BYTES = 32  # Fewest bytes of inputs of an operand.
_HALF = FEW_ROWS // 2
_E4M3_TILE = 64, 128  # Outputs and columns. Weights may have a scale for 128 columns.


@dataclass(frozen=True, slots=True)
class Product:
    """The shape of a product of rows [rows, inputs] and weights [outputs, inputs] of type `dtype`.

    With weights in e4m3, the rows are in e4m3 as well. Only a single row may be of another type.

    With `silu`, the weights of gate and up are [2 outputs, inputs]."""

    rows: int
    outputs: int
    inputs: int
    dtype: torch.dtype
    silu: bool = False
    is_blocked: bool = False  # Weights in e4m3 with a scale for each block of 128 x 128.

    @property
    def most_rows(self) -> int:
        is_e4m3 = self.dtype == torch.float8_e4m3fn
        return FEW_E4M3_ROWS if is_e4m3 and not self.is_blocked else FEW_ROWS

    @property
    def is_row(self) -> bool:
        """Whether the product is faster without the tensor core, if it is not split."""
        num_weights = self.outputs * self.inputs * (2 if self.silu else 1)
        is_small = num_weights < _SMALL and self.dtype != torch.float8_e4m3fn
        is_small |= self.rows == 1 and not self.is_blocked
        return is_small and self.inputs <= _ROW_INPUTS.get(self.rows, 0)

    def tile(self) -> dict[str, int]:
        """Launch arguments of the fastest kernel, if the product is not split."""
        return self.row_tile() if self.is_row else self.matrix_tile()

    @property
    def num_splits(self) -> int:
        """The best number of splits of the inputs, if the caller sums their results.

        Two splits are better if a single one has too few programs to occupy a GPU."""
        if self.is_row:
            return 1
        tile = self.matrix_tile()
        is_wide = triton.cdiv(self.outputs, tile["BN"]) > _FEW_PROGRAMS
        return 1 if is_wide or self.inputs % (2 * tile["BK"]) else 2

    def row_tile(self) -> dict[str, int]:
        """Launch arguments of a kernel without the tensor core. A program has whole rows of
        weights."""
        # The limit on bytes lets several programs run per multiprocessor.
        columns = triton.next_power_of_2(self.inputs)
        outputs = _ROW_BYTES // (columns * self.dtype.itemsize * (2 if self.silu else 1))
        least, most = _ROW_OUTPUTS
        warps = 8 if self.rows == 1 and columns >= 8 * _WARP_INPUTS else 4
        if self.dtype == torch.float8_e4m3fn:
            least, warps = _E4M3_ROW_OUTPUTS, 4
        outputs = min(max(outputs, least), most)
        return {"ROWS": self.rows, "BN": outputs, "BK": columns, "num_warps": warps}

    def matrix_tile(self) -> dict[str, int]:
        """Launch arguments of a kernel on the tensor core."""
        # Few outputs need narrow tiles, so that there are enough programs. With fewer programs,
        # each program must have more bytes of weights in flight.
        members = max(_MIN_DOT, triton.next_power_of_2(self.rows))
        if self.dtype == torch.float8_e4m3fn:
            (outputs, columns), stages, warps = _E4M3_TILE, 4 if self.silu else 8, 4
            if members > FEW_ROWS:  # The sums of 4 warps would exceed the registers.
                stages, warps = 3 if self.silu else 8, 8
        else:
            choose = _tile_of_32 if self.rows <= _HALF else _tile_of_64
            outputs, columns, stages, warps = choose(self.outputs, silu=self.silu)
        # float32 takes twice the bytes and does not use the tensor core. Larger tiles do not fit.
        if self.dtype == torch.float32:
            columns //= 4
        least = max(_MIN_DOT, _MIN_DOT_BYTES // self.dtype.itemsize)
        return {
            "BM": members,
            "BN": outputs,
            "BK": min(columns, max(least, triton.next_power_of_2(self.inputs))),
            "STAGES": stages,
            "num_warps": warps,
        }


def _tile_of_32(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """Outputs and columns of a tile, stages and warps, for up to 32 rows."""
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 256, 4, 2) if silu else (16, 512, 4, 2)
    if silu:
        return (128, 128, 3, 4) if num_out > 2 * _MANY_OUTPUTS else (64, 64, 6, 4)
    if num_out < _MANY_OUTPUTS:
        return 64, 128, 6, 4
    return 64, 128, (4 if num_out > 2 * _MANY_OUTPUTS else 6 if num_out > 5120 else 8), 4


def _tile_of_64(num_out: int, *, silu: bool) -> tuple[int, int, int, int]:
    """`_tile_of_32` for up to 64 rows. Every program reads all of x, which also takes time."""
    if num_out < (_MANY_OUTPUTS if silu else _SOME_OUTPUTS):
        return (32, 64, 6, 4) if silu else (16, 256, 5, 4)
    if silu:
        return 64, 64, (4 if num_out > 2 * _MANY_OUTPUTS else 6), 4
    return (128, 128, 4, 8) if num_out > 2 * _MANY_OUTPUTS else (64, 128, 6, 4)
