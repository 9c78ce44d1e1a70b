"""Gather blocks that lie apart in a pool into one piece of memory, and scatter them again."""

import torch
import triton

from parrot.engine.kernels.block_copy_kernels import block_copy_kernel

_CHUNK = 1024  # words of eight bytes that a program copies at a time


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, pieces: torch.Tensor) -> None:
    """pieces[i, r] = pool[r, blocks[i]]: pool int64 [rows, all blocks, words] with contiguous
    blocks, pieces int64 [blocks, rows, words] with contiguous rows side by side, blocks int32."""
    _copy(pool, blocks, pieces, gather=True)


def scatter_blocks(pieces: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[r, blocks[i]] = pieces[i, r]; see `gather_blocks`."""
    _copy(pool, blocks, pieces, gather=False)


def _copy(pool: torch.Tensor, blocks: torch.Tensor, pieces: torch.Tensor, *, gather: bool) -> None:
    rows, _, words = pool.shape
    assert pool.dtype == pieces.dtype == torch.int64, (pool.dtype, pieces.dtype)
    assert pieces.shape == (len(blocks), rows, words), (pieces.shape, pool.shape)
    assert pool.stride()[1:] == (words, 1), pool.stride()
    assert pieces.stride()[1:] == (words, 1), pieces.stride()
    block_copy_kernel[(rows, len(blocks))](
        pool,
        pieces,
        blocks,
        pool.stride(0),
        pieces.stride(0),
        WORDS=words,
        CHUNK=min(_CHUNK, triton.next_power_of_2(words)),
        GATHER=gather,
        num_warps=4,
    )
