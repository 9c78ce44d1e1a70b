"""Attention of many tokens of one context on a CPU with AVX512_BF16.

A tile has the scores of several consecutive tokens, in float32, for all keys up to its last token.
Hidden keys take time only in a tile's last columns. Only the process that compiles the kernels
(`build`) imports this module."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import math

import numpy as np
from numba import njit

from parrot.engine.cpu.prompt_layout import (
    HEAD_DIM,
    HEADS,
    KEYS,
    KV_HEADS,
    NEXT_THREAD,
    NEXT_UNIT,
    NUM_KEYS,
    OUT,
    PARALLEL,
    QUERIES,
    QUERY_SCALE,
    QUERY_STRIDE,
    SCRATCH,
    STATISTICS,
    THREADS,
    TILE_COLUMNS,
    TILE_ROWS,
    TOKENS,
    UNIT_TOKENS,
    VALUES,
    WIDTH,
    scratch_bytes,
)
from parrot.engine.cpu.simd import (
    LANES,
    add,
    call_in_threads,
    exp2,
    float_at,
    int64_at,
    larger,
    largest,
    load_float32,
    multiply,
    multiply_add,
    set_float,
    set_int64,
    splat,
    take_next,
    total,
)
from parrot.engine.cpu.tiles import store_rounded, tile_product

_LEAST = -math.inf
_compiled = njit(error_model="numpy", no_cpython_wrapper=True, no_cfunc_wrapper=True)
_scratch_bytes = njit(scratch_bytes)


@_compiled
def _softmax(scores, seen, count, scale, weights, statistics):
    """Compute the bfloat16 weights of `count` keys. Weights after the first `seen` keys are 0."""
    end = -(-seen // LANES) * LANES
    for i in range(seen, end):
        set_float(scores, i, np.float32(_LEAST))
    peak = splat(np.float32(_LEAST))
    for i in range(0, end, LANES):
        peak = larger(peak, load_float32(scores + i * 4))
    most = largest(peak) * scale
    scales, shift, sums = splat(scale), splat(-most), splat(np.float32(0.0))
    for i in range(0, end, LANES):
        value = exp2(multiply_add(load_float32(scores + i * 4), scales, shift))
        sums = add(sums, value)
        store_rounded(weights + i * 2, value)
    for i in range(end, count, LANES):
        store_rounded(weights + i * 2, splat(np.float32(0.0)))
    set_float(statistics, 0, most)
    set_float(statistics, 1, total(sums))


@_compiled
def _attend_tile(task, head, token, scratch):
    """Compute the results of a tile's tokens for one head."""
    heads, head_dim = int64_at(task, HEADS), int64_at(task, HEAD_DIM)
    width, stride = int64_at(task, WIDTH), int64_at(task, QUERY_STRIDE)
    queries = int64_at(task, QUERIES) + token * stride + head * head_dim * 2
    of_head = head // (heads // int64_at(task, KV_HEADS)) * width * head_dim * 2
    keys, values = int64_at(task, KEYS) + of_head, int64_at(task, VALUES) + of_head
    first = token * heads + head
    statistics, out = int64_at(task, STATISTICS), int64_at(task, OUT)
    weights = scratch + TILE_ROWS * width * 4
    tile = weights + TILE_ROWS * width * 2
    seen = int64_at(task, NUM_KEYS) - int64_at(task, TOKENS) + token + 1
    most = seen + TILE_ROWS - 1
    count = -(-most // TILE_COLUMNS) * TILE_COLUMNS
    for key in range(0, count, TILE_COLUMNS):
        tile_product(
            queries,
            stride,
            keys + key * head_dim * 2,
            TILE_COLUMNS * 4,
            head_dim // 2,
            scratch + key * 4,
            width * 4,
        )
    for row in range(TILE_ROWS):
        _softmax(
            scratch + row * width * 4,
            seen + row,
            count,
            float_at(task, 2 * QUERY_SCALE),
            weights + row * width * 2,
            statistics + (first + row * heads) * 8,
        )
    for column in range(0, head_dim, TILE_COLUMNS):
        tile_product(
            weights,
            width * 2,
            values + column * 4,
            head_dim * 4,
            (most + 1) // 2,
            tile,
            TILE_COLUMNS * 4,
        )
        for row in range(TILE_ROWS):
            index = first + row * heads
            share = splat(np.float32(1.0) / float_at(statistics, 2 * index + 1))
            for i in range(0, TILE_COLUMNS, LANES):
                value = multiply(load_float32(tile + (row * TILE_COLUMNS + i) * 4), share)
                store_rounded(out + (index * head_dim + column + i) * 2, value)


@_compiled
def attend_prompt_part(task):
    """The work of a thread: take units until no unit is left."""
    tokens, width = int64_at(task, TOKENS), int64_at(task, WIDTH)
    scratch = int64_at(task, SCRATCH)
    scratch += take_next(task + 8 * NEXT_THREAD) * _scratch_bytes(width)
    blocks = -(-tokens // UNIT_TOKENS)
    unit = take_next(task + 8 * NEXT_UNIT)
    while unit < int64_at(task, HEADS) * blocks:
        first = (blocks - 1 - unit % blocks) * UNIT_TOKENS  # Start with the longest units.
        for token in range(first, min(first + UNIT_TOKENS, tokens), TILE_ROWS):
            # The last tile starts earlier. It computes some rows again, with equal results.
            _attend_tile(task, unit // blocks, min(token, tokens - TILE_ROWS), scratch)
        unit = take_next(task + 8 * NEXT_UNIT)


@_compiled
def attend_prompt(task, part):
    """Run `attend_prompt_part`, whose address is `part`, in all threads."""
    set_int64(task, NEXT_UNIT, 0)
    set_int64(task, NEXT_THREAD, 0)
    threads = int64_at(task, THREADS)
    if threads > 1:
        call_in_threads(int64_at(task, PARALLEL), part, task, threads)
    else:
        attend_prompt_part(task)


KERNELS = {"attend_prompt": attend_prompt, "attend_prompt_part": attend_prompt_part}
