"""Tile sizes for products with weights of four bits."""

from dataclasses import dataclass

import triton

from parrot.engine.kernels.linear.four_bit_words import FourBitWords

MOST_ROWS = 512  # With more rows, a product with the dequantised weight is faster.

_MIN_ROWS = 8  # Smallest dimension of an operand of the tensor core.
_SLICED_ROWS = 16  # Up to this number of rows, each warp has its own blocks.
_MANY_OUTPUTS = 8192
_MAX_ROWS = 64  # Rows of a program.
_FEW_PROGRAMS = 132  # A product with at most this number of programs may be split.


@dataclass(frozen=True, slots=True)
class FourBitProduct:
    """The shape of a product. `outputs` are all rows of weights, those of gate and up together."""

    rows: int
    outputs: int
    blocks: int  # Of 128 inputs, in a split.
    silu: bool = False

    @classmethod
    def of(
        cls, rows: int, weight: FourBitWords, *, silu: bool = False, splits: int = 1
    ) -> "FourBitProduct":
        return cls(rows, weight.outputs, weight.num_blocks // splits, silu)

    @property
    def num_splits(self) -> int:
        """The best number of splits of the inputs, if the caller sums their results."""
        programs = triton.cdiv(self.outputs, self.tile()["BN"])
        for splits in (4, 2):
            if programs * splits // 2 <= _FEW_PROGRAMS and self.blocks % splits == 0:
                return splits
        return 1

    def tile(self) -> dict[str, int]:
        """Launch arguments."""
        members = min(max(_MIN_ROWS, triton.next_power_of_2(self.rows)), _MAX_ROWS)
        outputs, slices, unroll, stages, warps = self._sizes(members)
        return {
            "BM": members,
            "BN": outputs,
            "SLICES": slices,
            "UNROLL": 1 if self.blocks % unroll else unroll,
            "STAGES": stages,
            "num_warps": warps,
        }

    def _sizes(self, members: int) -> tuple[int, int, int, int, int]:
        """Rows of weights, slices, blocks of a step of the loop, stages and warps."""
        if members <= _SLICED_ROWS:
            return 32, 8, 1, 3, 8
        outputs = 128 if self.outputs > _MANY_OUTPUTS else 64
        return outputs, 1, 2, 3, outputs // 32
