"""The kernel that copies blocks between a pool and a contiguous buffer."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def block_copy_kernel(
    pool,
    pieces,
    blocks,
    pool_row_stride,
    piece_stride,
    WORDS: tl.constexpr,
    CHUNK: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Copy one row of one block. Grid (rows, blocks).

    pool    int64 [rows, all blocks, WORDS], rows `pool_row_stride` words apart
    pieces  int64 [blocks, rows, WORDS], the first `piece_stride` words apart
    blocks  int32 [blocks]: indices of blocks in the pool"""
    row = tl.program_id(0).to(tl.int64)
    index = tl.program_id(1).to(tl.int64)
    block = tl.load(blocks + index).to(tl.int64)
    in_pool = pool + row * pool_row_stride + block * WORDS
    in_pieces = pieces + index * piece_stride + row * WORDS
    for start in range(0, WORDS, CHUNK):
        at = start + tl.arange(0, CHUNK)
        inside = at < WORDS
        if GATHER:
            tl.store(in_pieces + at, tl.load(in_pool + at, mask=inside), mask=inside)
        else:
            tl.store(in_pool + at, tl.load(in_pieces + at, mask=inside), mask=inside)
