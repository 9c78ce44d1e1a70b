"""Attention with many rows over whole pages, which the bulk copy engine (TMA) reads."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl

from parrot.engine.kernels.attention_kernels import (
    NO_MAXIMUM,
    attend,
    item_rows,
    load_item,
    load_rows,
    row_slots,
    store_partials,
    store_rows,
    window_begin,
    window_starts,
)
from parrot.engine.kernels.quantised_kernels import numbers_of, weigh_codes


@triton.jit
def _exponents_at(k_exponents, v_exponents, BN: tl.constexpr):
    """The addresses of the exponents of a tile's keys, then of its values, for row 0."""
    # With one load for both, each thread loads one exponent. In the layout of scores each thread
    # would load dozens.
    both = tl.arange(0, 2 * BN)
    return tl.where(both < BN, k_exponents + both, v_exponents + (both - BN))


@triton.jit
def _first_tile(
    table,
    kv_first,
    kv_head,
    exponents_at,
    HKV: tl.constexpr,
    PAGE: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    """The page of the key `kv_first`, and the exponents of its tile."""
    page = tl.load(table + kv_first // PAGE)
    exponents = 0
    if QUANTISED:
        exponents = tl.load(exponents_at + (page * HKV + kv_head) * PAGE + kv_first % PAGE)
    return page, exponents


@triton.jit
def _load_tile(rows, row, QUANTISED: tl.constexpr, IN_FLOAT32: tl.constexpr):
    """A tile [BN, D] of one KV head's keys or values."""
    tile = rows.load([row, 0])
    if QUANTISED:
        tile = numbers_of(tile, IN_FLOAT32)
    elif IN_FLOAT32:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def _attend_tile(
    q,
    k,
    v,
    exponents,
    acc,
    maximum,
    total,
    first,
    row_start,
    row_end,
    offs_n,
    scale_log2,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    QUANTISED: tl.constexpr,
):
    if QUANTISED:
        both = tl.reshape(exponents.to(tl.int32), [2, BN])
        k_exponents, v_exponents = tl.split(tl.permute(both, (1, 0)))
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights, addend, decay, maximum = weigh_codes(
            scores, k_exponents, v_exponents, maximum, first, row_start, row_end, offs_n,
            scale_log2, MASKED, WINDOW, SOFTCAP,
        )  # fmt: skip
        total = total * decay + tl.sum(addend, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    else:
        acc, maximum, total = attend(
            q, k, v, acc, maximum, total, first, row_start, row_end, offs_n, scale_log2,
            MASKED, WINDOW, SOFTCAP,
        )  # fmt: skip
    return acc, maximum, total


@triton.jit
def attend_tiles(
    q_ptr,
    k_rows,
    v_rows,
    k_exponents_ptr,
    v_exponents_ptr,
    tables,
    positions,
    token_order,
    items,
    slot_of,
    out_ptr,
    partial_out,
    partial_lse,
    scale_log2,
    stride_q,
    stride_table,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    OWN: tl.constexpr,
    QUANTISED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """`attend_items` for items with many rows over whole pages. BN must divide PAGE.

    k_rows, v_rows  tensor descriptors [pages * kv_heads * PAGE, D] with blocks [BN, D]
    OWN             the items are fills, whose last tiles need the causal mask; otherwise all rows
                    attend to all keys, which end with a page
    QUANTISED       the descriptors are of codes; exponents are loaded one tile ahead"""
    # A tile is one block of a descriptor, so one thread requests it. This saves the registers and
    # the arithmetic of pointers, and twice as many tiles are in flight per multiprocessor.
    HKV: tl.constexpr = H // G
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    q_first, q_count, table_row, kv_first, kv_end, slot_first = load_item(item)
    if q_count == 0:  # Padding of a CUDA graph.
        return
    table = tables + table_row * stride_table
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    exponents_at = 0
    if QUANTISED:
        exponents_at = _exponents_at(k_exponents_ptr, v_exponents_ptr, BN)
    page, exponents = _first_tile(table, kv_first, kv_head, exponents_at, HKV, PAGE, QUANTISED)
    member, head, live, token, row_end, position = item_rows(
        positions, token_order, q_first, q_count, kv_end, OWN, kv_head, G, BM
    )
    row_start = row_end
    if WINDOW > 0:
        row_start = window_starts(positions, token, live, WINDOW)
        kv_first = window_begin(row_start, kv_first, BN)
        page, exponents = _first_tile(table, kv_first, kv_head, exponents_at, HKV, PAGE, QUANTISED)
    q = load_rows(q_ptr, token, head, live, offs_d, stride_q, D, UPCAST)
    IN_FLOAT32: tl.constexpr = q.dtype == tl.float32
    if QUANTISED and not IN_FLOAT32:
        q = q.to(tl.float16)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    maximum = tl.zeros([BM], dtype=tl.float32) + NO_MAXIMUM
    total = tl.zeros([BM], dtype=tl.float32)
    whole = kv_end
    if OWN:
        shortest = tl.minimum(kv_end, position + 1)
        whole = kv_first + tl.maximum(shortest - kv_first, 0) // BN * BN
    for first in tl.range(kv_first, whole, BN, num_stages=STAGES):
        next_page = tl.load(table + (first + BN) // PAGE)
        row = (page * HKV + kv_head) * PAGE + first % PAGE
        k = _load_tile(k_rows, row, QUANTISED, IN_FLOAT32)
        v = _load_tile(v_rows, row, QUANTISED, IN_FLOAT32)
        next_exponents = exponents
        if QUANTISED:
            next_row = (next_page * HKV + kv_head) * PAGE + (first + BN) % PAGE
            next_exponents = tl.load(exponents_at + next_row)
        acc, maximum, total = _attend_tile(
            q, k, v, exponents, acc, maximum, total, first, row_start, row_end, offs_n,
            scale_log2, BN, WINDOW > 0, WINDOW, SOFTCAP, QUANTISED,
        )  # fmt: skip
        page = next_page
        exponents = next_exponents
    if OWN:
        end = tl.minimum(kv_end, position + q_count)
        for first in tl.range(whole, end, BN, num_stages=1):
            page = tl.load(table + first // PAGE)
            row = (page * HKV + kv_head) * PAGE + first % PAGE
            k = _load_tile(k_rows, row, QUANTISED, IN_FLOAT32)
            # Values after the end may be NaN, and NaN times a weight of 0 is NaN.
            inside = (first + offs_n)[:, None] < end
            v = tl.where(inside, _load_tile(v_rows, row, QUANTISED, IN_FLOAT32), 0.0).to(k.dtype)
            if QUANTISED:
                exponents = tl.load(exponents_at + row)
            acc, maximum, total = _attend_tile(
                q, k, v, exponents, acc, maximum, total, first, row_start, row_end, offs_n,
                scale_log2, BN, True, WINDOW, SOFTCAP, QUANTISED,
            )  # fmt: skip
    slot = row_slots(slot_of, slot_first, member, live, q_count)
    if OWN:
        store_rows(acc, maximum, total, slot_first, slot, q_first + member, head, live, offs_d,
                   out_ptr, partial_out, partial_lse, H, D)  # fmt: skip
    else:
        store_partials(acc, maximum, total, slot, head, live, offs_d,
                       partial_out, partial_lse, H, D)  # fmt: skip
