"""Gathers blocks of a pool into a contiguous buffer, and scatters a buffer into blocks."""

import torch
import triton

from parrot.engine.kernels.block_copy_kernels import block_copy_kernel

_CHUNK = 1024  # Words of 8 bytes that a program copies at once.


def gather_blocks(pool: torch.Tensor, blocks: torch.Tensor, pieces: torch.Tensor) -> None:
    """pieces[i, r] = pool[r, blocks[i]].

    pool    int64 [rows, all blocks, words], the blocks of a row contiguous
    blocks  int32 [blocks]: indices of blocks in the pool
    pieces  int64 [blocks, rows, words], the rows of a block contiguous"""
    _copy(pool, blocks, pieces, gather=True)


def scatter_blocks(pieces: torch.Tensor, blocks: torch.Tensor, pool: torch.Tensor) -> None:
    """pool[r, blocks[i]] = pieces[i, r], with the shapes of `gather_blocks`."""
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
