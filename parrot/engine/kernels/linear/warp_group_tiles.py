"""Which products of words run on warp groups, and their tile sizes."""

from dataclasses import dataclass

import torch
import triton

from parrot.engine.kernels.linear.products import Rows, parts_of
from parrot.engine.kernels.linear.words_layout import Words

BLOCK = 128  # Inputs of a block.
OUTPUTS = 256  # Of a program.
_MIN_ROWS, _MAX_ROWS = 8, 64  # Of a program. The sums of more rows exceed the registers.
_MULTIPROCESSORS = 132  # Of an H200. A multiprocessor has one program.
_MAX_SPLITS = 8
_MIN_BLOCKS = 2  # Of a split.
_MAX_PARTS = 128  # Of the squares of a row, which a program sums.
_ALIGNMENT = 8  # Numbers in the 16 bytes to which copied rows are aligned.


@dataclass(frozen=True, slots=True)
class WarpGroupProduct:
    """The shape of a product. `outputs` are all rows of weights, also if they are gate and up."""

    rows: int
    outputs: int
    blocks: int

    @classmethod
    def of(cls, rows: int, weight: Words) -> "WarpGroupProduct":
        return cls(rows, weight.outputs, weight.num_blocks)

    @property
    def members(self) -> int:
        """Rows of a program."""
        members: int = triton.next_power_of_2(self.rows)
        return min(max(_MIN_ROWS, members), _MAX_ROWS)

    @property
    def num_splits(self) -> int:
        """The best number of splits of the inputs, if the caller sums their results.

        As many as multiprocessors have programs at the same time."""
        programs = triton.cdiv(self.outputs, OUTPUTS) * triton.cdiv(self.rows, self.members)
        most = min(_MULTIPROCESSORS // programs, self.blocks // _MIN_BLOCKS, _MAX_SPLITS)
        return -(-self.blocks // self.split_blocks(max(most, 1)))  # None is empty.

    def split_blocks(self, splits: int) -> int:
        """Blocks of a split. The last one may have fewer."""
        return -(-self.blocks // splits)


def fits_warp_groups(weight: Words) -> bool:
    """Whether a weight has codes of four bits in groups of 128, and whole tiles of 16 outputs."""
    kind = weight.bits, weight.group, weight.has_least
    return kind == (4, BLOCK, False) and weight.outputs % 16 == 0


def can_read(x: Rows) -> bool:
    """Whether rows are in bfloat16 and can be copied to shared memory."""
    rows, squares, *_ = parts_of(x)
    is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % _ALIGNMENT == 0
    has_few_parts = squares is None or squares.shape[1] <= _MAX_PARTS
    return rows.dtype == torch.bfloat16 and rows.stride(1) == 1 and is_aligned and has_few_parts
