"""Launches the products of words on warp groups, and chooses their shapes."""

from dataclasses import dataclass

import torch
import triton
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from parrot.engine.kernels.linear.products import UndividedRows, parts_of
from parrot.engine.kernels.linear.warp_group_kernels import (
    BLOCK,
    COPIED_FACTORS,
    COPIED_WORDS,
    COPIED_X,
    OUTPUTS,
    WIDTH,
    warp_group_kernel,
)
from parrot.engine.kernels.linear.words_layout import Words

_BLOCK, _OUTPUTS, _WIDTH = (int(size.value) for size in (BLOCK, OUTPUTS, WIDTH))

_MIN_ROWS, _MAX_ROWS = 8, 64  # Of a program. The sums of more rows exceed the registers.
_MULTIPROCESSORS = 132  # Of an H200. A multiprocessor has one program.
_MAX_SPLITS = 8
_MIN_BLOCKS = 2  # Of a split.
# Registers of a thread when a program starts, of five groups of four warps. The groups that
# multiply then take registers of the group to which the copying warp belongs.
MAX_REGISTERS = 96
_STAGES = {False: 4, True: 6}  # Blocks in a ring, by whether a product is whole.
_MAX_PARTS = 128  # Of the squares of a row, which a program sums.
_ALIGNMENT = 8  # Numbers in the 16 bytes to which copied rows are aligned.


@dataclass(frozen=True, slots=True)
class WarpGroupProduct:
    """The shape of a product. `outputs` are all rows of weights, those of gate and up together."""

    rows: int
    outputs: int
    blocks: int  # Of 128 inputs.

    @property
    def members(self) -> int:
        """Rows of a program."""
        members: int = triton.next_power_of_2(self.rows)
        return min(max(_MIN_ROWS, members), _MAX_ROWS)

    @property
    def num_splits(self) -> int:
        """The best number of splits of the inputs, if the caller sums their results.

        As many as multiprocessors have programs at the same time."""
        programs = triton.cdiv(self.outputs, _OUTPUTS) * triton.cdiv(self.rows, self.members)
        most = min(_MULTIPROCESSORS // programs, self.blocks // _MIN_BLOCKS, _MAX_SPLITS)
        return -(-self.blocks // self.split_blocks(max(most, 1)))  # None is empty.

    def split_blocks(self, splits: int) -> int:
        """Blocks of a split. The last one may have fewer."""
        return -(-self.blocks // splits)


def fits_warp_groups(weight: Words) -> bool:
    """Whether a weight has codes of four bits in groups of 128, and whole tiles of 16 outputs."""
    kind = weight.bits, weight.group, weight.has_least
    return kind == (4, _BLOCK, False) and weight.outputs % 16 == 0


def can_read(x: torch.Tensor | UndividedRows) -> bool:
    """Whether rows can be copied to shared memory."""
    rows, squares, *_ = parts_of(x)
    is_aligned = rows.data_ptr() % 16 == 0 and rows.stride(0) % _ALIGNMENT == 0
    has_few_parts = squares is None or squares.shape[1] <= _MAX_PARTS
    return rows.dtype == torch.bfloat16 and rows.stride(1) == 1 and is_aligned and has_few_parts


def warp_group_linear(
    x: torch.Tensor | UndividedRows,
    weight: Words,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    silu: bool = False,
) -> torch.Tensor:
    """out [rows, n] = x [rows, k] weight^T + bias, with x in bfloat16.

    With `silu`, weight is [gate | up] with 2 n rows, and out = silu(gate) * up. With out
    [splits, rows, n], each split gets the product of a part of k; the caller sums them."""
    rows, squares, eps, _ = parts_of(x)
    (num_rows, num_out), size = out.shape[-2:], rows.shape[1]
    splits = out.numel() // (num_rows * num_out)
    assert fits_warp_groups(weight)
    assert can_read(x), (rows.dtype, rows.stride())
    assert len(rows) == num_rows, (rows.shape, out.shape)
    assert (weight.outputs, weight.inputs) == ((2 if silu else 1) * num_out, size), out.shape
    assert splits == 1 or not silu, "parts of a product"
    assert not silu or num_out % 8 == 0, num_out
    assert out.is_contiguous()
    assert num_rows * num_out < 2**31, out.shape
    product = WarpGroupProduct(num_rows, weight.outputs, weight.num_blocks)
    grid = triton.cdiv(weight.outputs, _OUTPUTS), splits, triton.cdiv(num_rows, product.members)
    warp_group_kernel[grid](
        _blocks_of(rows, product.members),
        words_tiles(weight, halved=silu),
        _factor_tiles(weight, halved=silu),
        squares,
        bias,
        out,
        eps,
        num_rows,
        product.split_blocks(splits),
        N=num_out,
        K=size,
        BLOCKS=weight.num_blocks,
        ROWS=product.members,
        STAGES=_STAGES[splits == 1],
        HALF=weight.has_half_scales,
        SHIFT=weight.shift,
        SILU=silu,
        PARTS=0 if squares is None else squares.shape[1],
        num_warps=4,
        maxnreg=MAX_REGISTERS,
        launch_pdl=True,
    )
    return out


def _blocks_of(rows: torch.Tensor, members: int) -> TensorDescriptor:
    """Blocks of `members` rows and 128 inputs."""
    shape, strides = list(rows.shape), list(rows.stride())
    return TensorDescriptor(rows, shape, strides, [members, _BLOCK], COPIED_X.value)


def words_tiles(weight: Words, *, halved: bool) -> TensorDescriptor:
    """Words as [blocks, outputs / 16, 2, 8, words].

    The second of two sets of 8 outputs follows the first one. `halved`: it is in the second half of
    the outputs, and the first one in the first half."""
    words = weight.words
    blocks, outputs, width = words.shape
    assert words.is_contiguous()
    assert width == _WIDTH, width
    first, second = (8, outputs // 2) if halved else (16, 8)
    shape = [blocks, outputs // 16, 2, 8, width]
    strides = [outputs * width, first * width, second * width, width, 1]
    block = [1, _OUTPUTS // 16, 2, 8, width]
    return TensorDescriptor(words, shape, strides, block, COPIED_WORDS.value)


def _factor_tiles(weight: Words, *, halved: bool) -> TensorDescriptor:
    """`words_tiles` of factors, without the last dimension."""
    factors = weight.factors
    blocks, outputs = factors.shape
    assert factors.is_contiguous()
    first, second = (8, outputs // 2) if halved else (16, 8)
    shape, strides = [blocks, outputs // 16, 2, 8], [outputs, first, second, 1]
    block = [1, _OUTPUTS // 16, 2, 8]
    return TensorDescriptor(factors, shape, strides, block, COPIED_FACTORS.value)
