"""Launches the products of words on warp groups."""

import torch
import triton
from triton.experimental.gluon.language import NVMMASharedLayout
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from parrot.engine.kernels.linear.chain_tiles import COPIED_FACTORS, COPIED_WORDS, WIDTH
from parrot.engine.kernels.linear.products import Rows, parts_of
from parrot.engine.kernels.linear.warp_group_kernels import COPIED_X, warp_group_kernel
from parrot.engine.kernels.linear.warp_group_tiles import (
    BLOCK,
    OUTPUTS,
    WarpGroupProduct,
    can_read,
    fits_warp_groups,
)
from parrot.engine.kernels.linear.words_layout import Words

# Registers of a thread when a program starts, of five groups of four warps. The groups that
# multiply then take registers of the group to which the copying warp belongs.
MAX_REGISTERS = 96
_STAGES, _STAGES_OF_WHOLE = 4, 6  # Blocks in a ring, for parts of products and for whole ones.


def warp_group_linear(
    x: Rows,
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
    product = WarpGroupProduct.of(num_rows, weight)
    grid = triton.cdiv(weight.outputs, OUTPUTS), splits, triton.cdiv(num_rows, product.members)
    warp_group_kernel[grid](
        _blocks_of(rows, product.members),
        words_tiles(weight, halved=silu),
        _tiles(weight.factors, COPIED_FACTORS.value, halved=silu),
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
        STAGES=_STAGES_OF_WHOLE if splits == 1 else _STAGES,
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
    return TensorDescriptor(rows, shape, strides, [members, BLOCK], COPIED_X.value)


def words_tiles(weight: Words, *, halved: bool) -> TensorDescriptor:
    """See `_tiles`."""
    assert weight.words.shape[2] == WIDTH.value, weight.words.shape
    return _tiles(weight.words, COPIED_WORDS.value, halved=halved)


def _tiles(array: torch.Tensor, layout: NVMMASharedLayout, *, halved: bool) -> TensorDescriptor:
    """Words [blocks, outputs, width], or factors without the last dimension, with outputs as
    [outputs / 16, 2, 8].

    The second of two sets of 8 outputs follows the first one. `halved`: it is in the second half of
    the outputs, and the first one in the first half."""
    blocks, outputs, *width = array.shape
    assert array.is_contiguous()
    first, second = (8, outputs // 2) if halved else (16, 8)
    numbers = array.stride(1)  # Of an output.
    strides = [numbers * count for count in (outputs, first, second, 1)] + [1] * len(width)
    shape, block = [blocks, outputs // 16, 2, 8, *width], [1, OUTPUTS // 16, 2, 8, *width]
    return TensorDescriptor(array, shape, strides, block, layout)
