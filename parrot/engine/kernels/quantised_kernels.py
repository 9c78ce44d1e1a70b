"""`attend_items` and `attend_tiles` of `attention_kernels`, which see, over KV in e4m3 with a power
of two for each token and head (`e4m3_kernels`).

The powers are no part of the matrix products. That of a key multiplies its column of scores. That
of a value becomes part of its column of weights: the online softmax runs over scores in base 2 plus
the value's exponent, so that weights times values need no other factor and the weights are as large
as float16 likes them; only the sum of the weights takes the exponent out again."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.attention_kernels import (
    NO_MAXIMUM,
    NO_POSITION,
    NO_SCORE,
    load_item,
    load_rows,
    page_ids,
    row_slots,
    row_tokens,
    store_partials,
    store_rows,
)
from parrot.engine.kernels.e4m3_kernels import (
    inverse_of,
    numbers_of,
    numbers_of_pairs,
    power_of,
)

_ONE = tl.constexpr(127)  # the exponent of 1
_HEADROOM = tl.constexpr(8.0)
"""Weights are up to 2 to this, so that float16 has more room for small ones."""


@triton.jit
def _weigh(
    scores,
    k_exponents,
    v_exponents,
    maximum,
    first,
    row_end,
    offs_n,
    scale_log2,
    MASKED: tl.constexpr,
):
    """Weights for values as they are stored, from products with keys as they are stored; the same
    for the values themselves, to be summed; and what earlier weights are worth by now."""
    k_scale = power_of(k_exponents) * scale_log2
    shift = (v_exponents - _ONE).to(tl.float32)
    scores = scores * k_scale[None, :] + shift[None, :]
    if MASKED:
        scores = tl.where((first + offs_n)[None, :] < row_end[:, None], scores, NO_SCORE)
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) - _HEADROOM)
    weights = tl.exp2(scores - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    return weights, weights * inverse_of(v_exponents)[None, :], decay, new_maximum


@triton.jit
def _split_pairs(x, ROWS: tl.constexpr, D: tl.constexpr):
    return tl.split(tl.reshape(x, [ROWS, D // 2, 2]))


@triton.jit
def _join_pairs(even, odd, ROWS: tl.constexpr, D: tl.constexpr):
    return tl.reshape(tl.join(even, odd), [ROWS, D])


@triton.jit
def _next_pages(table, first, end, offs_n, PAGE: tl.constexpr, BN: tl.constexpr):
    """`page_ids`, but none past the one entry of the table that may be read ahead."""
    if PAGE % BN == 0:
        pages = tl.load(table + tl.minimum(first, end) // PAGE)
    else:
        pages = tl.load(table + tl.minimum(first + offs_n, end) // PAGE)
    return pages


@triton.jit
def _first_rows(
    pages, kv_head, first, offs_n, HKV: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr
):
    """The rows of the tile of keys at `first` in a pool [pages * HKV * PAGE, ...]: where the tile
    is in one page only the first one's, else each key's."""
    rows = (pages.to(tl.int64) * HKV + kv_head) * PAGE
    rows += first % PAGE if PAGE % BN == 0 else (first + offs_n) % PAGE
    return rows


@triton.jit
def _load_exponents(exponents, rows, offs_n, PAGE: tl.constexpr, BN: tl.constexpr):
    """Without a mask: those behind the end are some byte of the pool, and masked scores need no
    exponent."""
    at = exponents + rows
    if PAGE % BN == 0:
        at += offs_n
    return tl.load(at).to(tl.int32)


@triton.jit
def _pairs_at(cache, rows, offs_n, pair, D: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr):
    if PAGE % BN == 0:
        at = cache + rows * (D // 2) + (offs_n[:, None] * (D // 2) + pair[None, :])
    else:
        at = cache + (rows[:, None] * (D // 2) + pair[None, :])
    return at


@triton.jit
def attend_quantised_items(
    q_ptr,
    k_ptr,
    v_ptr,
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
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`attend_items`; k and v are int16, pairs of codes, [pages, H // G, PAGE, D // 2].

    Exponents are fetched a tile ahead, as they do not take part in the copies to shared memory."""
    HKV: tl.constexpr = H // G
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    q_first, q_count, table_row, kv_first, kv_end, slot_first = load_item(item)
    own = tl.load(item + 6) != 0
    if q_count == 0:  # padding of a captured grid
        if DEPENDENT:
            gdc_wait()
        return
    table = tables + table_row * stride_table
    offs_m = tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    member = offs_m // G
    head = kv_head * G + offs_m % G
    live = (member < q_count) & (offs_m < (BM // G) * G)
    token = row_tokens(token_order, q_first, own, member, live, q_count)
    position = tl.load(positions + q_first, mask=own, other=NO_POSITION)
    row_end = tl.minimum(kv_end, position + 1 + member)
    end = tl.minimum(kv_end, position + q_count)
    slot = row_slots(slot_of, slot_first, member, live, q_count)
    pages = page_ids(table, kv_first, offs_n, PAGE, BN)
    next_pages = _next_pages(table, kv_first + BN, end, offs_n, PAGE, BN)
    if DEPENDENT:
        gdc_wait()
    q = load_rows(q_ptr, token, head, live, offs_d, stride_q, D, UPCAST)
    IN_FLOAT32: tl.constexpr = q.dtype == tl.float32
    if not IN_FLOAT32:
        q = q.to(tl.float16)
    q_even, q_odd = _split_pairs(q, BM, D)
    rows = _first_rows(pages, kv_head, kv_first, offs_n, HKV, PAGE, BN)
    k_exponents = _load_exponents(k_exponents_ptr, rows, offs_n, PAGE, BN)
    v_exponents = _load_exponents(v_exponents_ptr, rows, offs_n, PAGE, BN)

    even = tl.zeros([BM, D // 2], dtype=tl.float32)
    odd = tl.zeros([BM, D // 2], dtype=tl.float32)
    maximum = tl.zeros([BM], dtype=tl.float32) + NO_MAXIMUM
    total = tl.zeros([BM, BN], dtype=tl.float32)
    for first in tl.range(kv_first, end, BN, num_stages=STAGES):
        k_pairs = tl.load(_pairs_at(k_ptr, rows, offs_n, pair, D, PAGE, BN))
        # What lies past the end may be NaN, and zero weights do not stop a NaN.
        v_pairs = tl.load(
            _pairs_at(v_ptr, rows, offs_n, pair, D, PAGE, BN),
            mask=(first + offs_n)[:, None] < end,
            other=0,
        )
        k_even, k_odd = numbers_of_pairs(k_pairs, IN_FLOAT32)
        v_even, v_odd = numbers_of_pairs(v_pairs, IN_FLOAT32)
        rows = _first_rows(next_pages, kv_head, first + BN, offs_n, HKV, PAGE, BN)
        next_k_exponents = _load_exponents(k_exponents_ptr, rows, offs_n, PAGE, BN)
        next_v_exponents = _load_exponents(v_exponents_ptr, rows, offs_n, PAGE, BN)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
        weights, addend, decay, maximum = _weigh(
            scores, k_exponents, v_exponents, maximum, first, row_end, offs_n, scale_log2, True
        )
        # Summed over the keys of a tile only in the end: that takes all warps.
        total = total * decay[:, None] + addend
        weights = weights.to(v_even.dtype)
        even = tl.dot(weights, v_even, even * decay[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * decay[:, None], input_precision="ieee")
        # (What a turn leaves to the next must not be what it was given itself, as two turns' pages
        # would be: such loops are not pipelined.)
        next_pages = _next_pages(table, first + 2 * BN, end, offs_n, PAGE, BN)
        k_exponents = next_k_exponents
        v_exponents = next_v_exponents
    if DEPENDENT:
        gdc_launch_dependents()
    acc = _join_pairs(even, odd, BM, D)
    store_rows(acc, maximum, tl.sum(total, 1), slot_first, slot, token, head, live, offs_d,
               out_ptr, partial_out, partial_lse, H, D)  # fmt: skip


@triton.jit
def _exponents_at(k_exponents, v_exponents, BN: tl.constexpr):
    """Where the exponents of a tile's keys, then of its values, are for row 0. One load for both
    gives each thread one of them; the layout of scores has each thread load dozens."""
    both = tl.arange(0, 2 * BN)
    return tl.where(both < BN, k_exponents + both, v_exponents + (both - BN))


@triton.jit
def _split_exponents(exponents, BN: tl.constexpr):
    return tl.split(tl.permute(tl.reshape(exponents.to(tl.int32), [2, BN]), (1, 0)))


@triton.jit
def attend_quantised_tiles(
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
    UPCAST: tl.constexpr,
):
    """`attend_tiles`; the descriptors are of uint8 codes. Exponents are fetched a tile ahead."""
    HKV: tl.constexpr = H // G
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    q_first, q_count, table_row, kv_first, kv_end, slot_first = load_item(item)
    if q_count == 0:  # padding of a captured grid
        return
    table = tables + table_row * stride_table
    offs_m = tl.arange(0, BM)
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    member = offs_m // G
    head = kv_head * G + offs_m % G
    live = (member < q_count) & (offs_m < (BM // G) * G)
    page = tl.load(table + kv_first // PAGE)
    row = (page * HKV + kv_head) * PAGE + kv_first % PAGE
    exponents_at = _exponents_at(k_exponents_ptr, v_exponents_ptr, BN)
    exponents = tl.load(exponents_at + row)
    token = row_tokens(token_order, q_first, OWN, member, live, q_count)
    q = load_rows(q_ptr, token, head, live, offs_d, stride_q, D, UPCAST)
    IN_FLOAT32: tl.constexpr = q.dtype == tl.float32
    if not IN_FLOAT32:
        q = q.to(tl.float16)
    acc = tl.zeros([BM, D], dtype=tl.float32)
    maximum = tl.zeros([BM], dtype=tl.float32) + NO_MAXIMUM
    total = tl.zeros([BM], dtype=tl.float32)
    row_end = kv_end + member * 0
    whole = kv_end
    if OWN:
        position = tl.load(positions + q_first)
        row_end = tl.minimum(kv_end, position + 1 + member)
        shortest = tl.minimum(kv_end, position + 1)
        whole = kv_first + tl.maximum(shortest - kv_first, 0) // BN * BN
    for first in tl.range(kv_first, whole, BN, num_stages=STAGES):
        next_page = tl.load(table + (first + BN) // PAGE)
        row = (page * HKV + kv_head) * PAGE + first % PAGE
        k = numbers_of(k_rows.load([row, 0]), IN_FLOAT32)
        v = numbers_of(v_rows.load([row, 0]), IN_FLOAT32)
        next_row = (next_page * HKV + kv_head) * PAGE + (first + BN) % PAGE
        next_exponents = tl.load(exponents_at + next_row)
        k_exponents, v_exponents = _split_exponents(exponents, BN)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        weights, addend, decay, maximum = _weigh(
            scores, k_exponents, v_exponents, maximum, first, row_end, offs_n, scale_log2, False
        )
        total = total * decay + tl.sum(addend, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        page = next_page
        exponents = next_exponents
    if OWN:
        end = tl.minimum(kv_end, position + q_count)
        for first in tl.range(whole, end, BN, num_stages=1):
            page = tl.load(table + first // PAGE)
            row = (page * HKV + kv_head) * PAGE + first % PAGE
            k = numbers_of(k_rows.load([row, 0]), IN_FLOAT32)
            v = numbers_of(v_rows.load([row, 0]), IN_FLOAT32)
            # What lies past the end may be NaN, and zero weights do not stop a NaN.
            inside = first + offs_n < end
            v = tl.where(inside[:, None], v, 0.0).to(k.dtype)
            k_exponents, v_exponents = _split_exponents(tl.load(exponents_at + row), BN)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee")
            weights, addend, decay, maximum = _weigh(
                scores, k_exponents, v_exponents, maximum, first, row_end, offs_n, scale_log2, True
            )
            total = total * decay + tl.sum(addend, 1)
            acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    slot = row_slots(slot_of, slot_first, member, live, q_count)
    if OWN:
        store_rows(acc, maximum, total, slot_first, slot, q_first + member, head, live, offs_d,
                   out_ptr, partial_out, partial_lse, H, D)  # fmt: skip
    else:
        store_partials(acc, maximum, total, slot, head, live, offs_d,
                       partial_out, partial_lse, H, D)  # fmt: skip
