"""Tile sizes for products with weights in codes.

They were tuned on an H200 for codes of four bits with whole zeros in groups of 128, which
`warp_groups` multiplies on such a GPU now. For codes of eight bits, they were tuned for up to eight
rows, and for heads of 128,256 and 151,936 outputs. Other codes use them unmeasured.
"""

from dataclasses import dataclass

import triton

from parrot.engine.kernels.linear.words_layout import (
    LARGEST_BLOCK,
    MANY_OUTPUTS,
    MOST_OUTPUTS,
    Words,
)

_MIN_ROWS = 8  # Smallest dimension of an operand of the tensor core.
_MAX_ROWS = 64  # Rows of a program.
_SLICED_ROWS = 16  # Up to this number of rows, each warp may have its own blocks.
_MANY_INPUTS = 8192  # From this number of inputs on, also a narrow product is split.
_SHORT_BLOCK = 32  # Inputs of a block with codes of eight bits in groups of 16.
_FEW_PROGRAMS = 132  # A product with at most this number of programs may be split.


@dataclass(frozen=True, slots=True)
class WordsProduct:
    """The shape of a product. `outputs` are all rows of weights, also if they are gate and up."""

    rows: int
    outputs: int
    blocks: int  # In all splits.
    splits: int = 1
    block: int = LARGEST_BLOCK  # Inputs of a block.
    group: int = LARGEST_BLOCK  # Inputs with one scale.
    has_least: bool = False

    @classmethod
    def of(cls, rows: int, weight: Words, splits: int = 1) -> "WordsProduct":
        return cls(
            rows,
            weight.outputs,
            weight.num_blocks,
            splits,
            weight.block,
            weight.group,
            weight.has_least,
        )

    @property
    def num_splits(self) -> int:
        """The best number of splits of the inputs, if the caller sums their results."""
        # Fewer blocks for a program shorten its chain of dependent products.
        if self._is_sliced and not self._is_long:
            return 1
        if triton.cdiv(self.outputs, 32 if self._is_sliced else 128) > _FEW_PROGRAMS:
            return 1
        choices: tuple[int, ...] = (4, 2)
        if self._is_long and not self._is_sliced:
            choices = (7, 4, 2) if self._members > _SLICED_ROWS else (8, 7, 4, 2)
        return next((count for count in choices if self.blocks % count == 0), 1)

    def tile(self) -> dict[str, int]:
        """Launch arguments."""
        outputs, slices, stages, warps = self._sizes()
        return {
            "BM": self._members,
            "BN": outputs,
            "SLICES": slices,
            "STAGES": stages,
            "num_warps": warps,
        }

    @property
    def _members(self) -> int:
        """Rows of a program."""
        members: int = triton.next_power_of_2(self.rows)
        return min(max(_MIN_ROWS, members), _MAX_ROWS)

    @property
    def _is_simple(self) -> bool:
        return self.group >= LARGEST_BLOCK and not self.has_least

    @property
    def _is_sliced(self) -> bool:
        # With 16 rows and one scale for a block, whole programs for each block are faster.
        return self._members <= (_MIN_ROWS if self._is_simple else _SLICED_ROWS)

    @property
    def _is_long(self) -> bool:
        return self.blocks * self.block >= _MANY_INPUTS

    def _sizes(self) -> tuple[int, int, int, int]:
        """Rows of weights, slices, stages and warps."""
        if self.outputs >= MOST_OUTPUTS and not self.has_least:
            return 128, 1, 5, 4
        is_wide = self.outputs > MANY_OUTPUTS
        if not self._is_sliced:
            # With the sums of x, a tile of 128 outputs would not fit in the registers.
            is_tall = (is_wide or (self.splits > 1 and self._is_long)) and not self.has_least
            return (128, 1, 3, 4) if is_tall else (64, 1, 4, 4)
        if self.block <= _SHORT_BLOCK:
            # Steps over short blocks move few bytes, so more of them must be in flight.
            return 32, 4, 6 if is_wide or self.splits > 1 else 4, 4
        if is_wide:
            return 32, 4, 3, 4
        if self.splits > 1:
            return 32, 4, 3 if self._members == _SLICED_ROWS else 4, 4
        # Such a product has few programs. Smaller blocks need more warps for as many steps.
        is_one_wave = triton.cdiv(self.outputs, 32) <= _FEW_PROGRAMS
        slices = 4 if is_one_wave or self._members == _SLICED_ROWS else 2
        slices = slices * LARGEST_BLOCK // self.block
        return 32, slices, 4, slices
