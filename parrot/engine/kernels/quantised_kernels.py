"""Kernels for KV in e4m3 with a power of two per row (`attention.quantised`).

They convert codes and numbers, run `attend_items` over codes, and convert pages for long fills.

The matrix products of attention use codes without their powers. The power of a key multiplies its
column of scores. The exponent of a value is added to its column of base-2 scores before the online
softmax. So the product of weights and values needs no further factor, and the weights are in
float16's range. Only the sum of the weights must remove the exponent again."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.attention_kernels import (
    NO_MAXIMUM,
    capped,
    hide,
    in_span,
    item_rows,
    load_item,
    load_rows,
    page_ids,
    row_slots,
    store_rows,
    window_begin,
    window_starts,
)
from parrot.engine.kernels.e4m3 import float32_of, inverse_of, power_of

_ONE = tl.constexpr(127)  # The exponent of 1.
# Weights are at most 2 ** 8, so that float16 keeps more bits of small weights.
_HEADROOM = tl.constexpr(8.0)

_FLOAT16_OF_PAIRS: tl.constexpr = tl.constexpr("""
{
    .reg .b32 sorted;
    .reg .b16 even, odd;
    prmt.b32 sorted, $2, 0, 0x3120;
    mov.b32 {even, odd}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, even;
    cvt.rn.f16x2.e4m3x2 $1, odd;
}
""")


@triton.jit
def numbers_of_pairs(pairs, IN_FLOAT32: tl.constexpr):
    """The even and the odd numbers of int16 pairs of codes, exact in float16 or float32."""
    # Codes are read as pairs, because operands of the tensor core can only be transposed in units
    # of two bytes. The conversion of four numbers takes three instructions.
    if IN_FLOAT32:
        wide = pairs.to(tl.int32)
        even = float32_of(wide)
        odd = float32_of(wide >> 8)
    else:
        even, odd = tl.inline_asm_elementwise(
            _FLOAT16_OF_PAIRS, "=r,=r,r", [pairs], dtype=(tl.float16, tl.float16),
            is_pure=True, pack=2,
        )  # fmt: skip
    return even, odd


@triton.jit
def numbers_of(codes, IN_FLOAT32: tl.constexpr):
    """The numbers of uint8 codes, in float16 or float32."""
    if IN_FLOAT32:
        numbers = float32_of(codes.to(tl.int32))
    else:
        numbers = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    return numbers


@triton.jit
def weigh_codes(
    scores,
    k_exponents,
    v_exponents,
    maximum,
    first,
    row_start,
    row_end,
    offs_n,
    scale_log2,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax over products of q and codes of keys.

    Returns the weights for codes of values, the weights for the values themselves (for the sum),
    the factor for earlier weights, and the new maximum."""
    k_scale = power_of(k_exponents) * scale_log2
    shift = (v_exponents - _ONE).to(tl.float32)
    if SOFTCAP > 0:
        scores = capped(scores * k_scale[None, :], SOFTCAP) + shift[None, :]
    else:
        scores = scores * k_scale[None, :] + shift[None, :]
    if MASKED:
        scores = hide(scores, first, row_start, row_end, offs_n, WINDOW)
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
    """`page_ids`, limited to the one entry after the request's pages that may be prefetched."""
    if PAGE % BN == 0:
        pages = tl.load(table + tl.minimum(first, end) // PAGE)
    else:
        pages = tl.load(table + tl.minimum(first + offs_n, end) // PAGE)
    return pages


@triton.jit
def _first_rows(
    pages, kv_head, first, offs_n, HKV: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr
):
    """The rows of the tile of keys at `first` in a pool [pages * HKV * PAGE, ...].

    Only the row of the first key if tiles do not span pages, else the row of each key."""
    rows = (pages.to(tl.int64) * HKV + kv_head) * PAGE
    rows += first % PAGE if PAGE % BN == 0 else (first + offs_n) % PAGE
    return rows


@triton.jit
def _load_exponents(exponents, rows, offs_n, PAGE: tl.constexpr, BN: tl.constexpr):
    # No mask is necessary: keys after the end read some byte of the pool, and their scores are
    # masked.
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
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`attend_items` for k and v in int16 pairs of codes [pages, H // G, PAGE, D // 2]."""
    # Exponents are loaded one tile ahead, because they are not part of the pipelined copies to
    # shared memory.
    HKV: tl.constexpr = H // G
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    q_first, q_count, table_row, kv_first, kv_end, slot_first = load_item(item)
    own = tl.load(item + 6) != 0
    if q_count == 0:  # Padding of a CUDA graph.
        if DEPENDENT:
            gdc_wait()
        return
    table = tables + table_row * stride_table
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
    pair = tl.arange(0, D // 2)
    member, head, live, token, row_end, position = item_rows(
        positions, token_order, q_first, q_count, kv_end, own, kv_head, G, BM
    )
    end = tl.minimum(kv_end, position + q_count)
    slot = row_slots(slot_of, slot_first, member, live, q_count)
    row_start = row_end
    begin = kv_first
    if WINDOW > 0:
        row_start = window_starts(positions, token, live, WINDOW)
        begin = tl.min(row_start, 0)
        kv_first = window_begin(row_start, kv_first, BN)
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
        # Values outside of the span may be NaN, and NaN times a weight of 0 is NaN.
        v_pairs = tl.load(
            _pairs_at(v_ptr, rows, offs_n, pair, D, PAGE, BN),
            mask=in_span(first + offs_n, begin, end, PAGE, BN, WINDOW)[:, None],
            other=0,
        )
        k_even, k_odd = numbers_of_pairs(k_pairs, IN_FLOAT32)
        v_even, v_odd = numbers_of_pairs(v_pairs, IN_FLOAT32)
        rows = _first_rows(next_pages, kv_head, first + BN, offs_n, HKV, PAGE, BN)
        next_k_exponents = _load_exponents(k_exponents_ptr, rows, offs_n, PAGE, BN)
        next_v_exponents = _load_exponents(v_exponents_ptr, rows, offs_n, PAGE, BN)
        scores = tl.dot(q_even, tl.trans(k_even), input_precision="ieee")
        scores = tl.dot(q_odd, tl.trans(k_odd), scores, input_precision="ieee")
        weights, addend, decay, maximum = weigh_codes(
            scores, k_exponents, v_exponents, maximum, first, row_start, row_end, offs_n,
            scale_log2, True, WINDOW, SOFTCAP,
        )  # fmt: skip
        # The sum over the keys of a tile needs all warps, so it is done once after the loop.
        total = total * decay[:, None] + addend
        weights = weights.to(v_even.dtype)
        even = tl.dot(weights, v_even, even * decay[:, None], input_precision="ieee")
        odd = tl.dot(weights, v_odd, odd * decay[:, None], input_precision="ieee")
        # Triton does not pipeline a loop that passes a value through unchanged. So each iteration
        # loads the pages of the second next tile, instead of passing on two tiles' pages.
        next_pages = _next_pages(table, first + 2 * BN, end, offs_n, PAGE, BN)
        k_exponents = next_k_exponents
        v_exponents = next_v_exponents
    if DEPENDENT:
        gdc_launch_dependents()
    acc = _join_pairs(even, odd, BM, D)
    store_rows(acc, maximum, tl.sum(total, 1), slot_first, slot, token, head, live, offs_d,
               out_ptr, partial_out, partial_lse, H, D)  # fmt: skip


@triton.jit
def convert_pages_kernel(
    k_ptr,
    v_ptr,
    k_exponents,
    v_exponents,
    pages,
    k_out,
    v_out,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (i, block of rows): out[i] = the numbers of the rows [ROWS, D] of page `pages[i]`."""
    page = tl.load(pages + tl.program_id(0))
    if page < 0:  # Padding of a CUDA graph.
        return
    offs_r = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offs_r < ROWS
    row = page.to(tl.int64) * ROWS + offs_r
    place = tl.program_id(0).to(tl.int64) * ROWS + offs_r
    offs_d = tl.arange(0, D)
    source = row[:, None] * D + offs_d[None, :]
    target = place[:, None] * D + offs_d[None, :]
    k_codes = tl.load(k_ptr + source, mask=inside[:, None], other=0)
    v_codes = tl.load(v_ptr + source, mask=inside[:, None], other=0)
    k_power = power_of(tl.load(k_exponents + row, mask=inside, other=0).to(tl.int32))
    v_power = power_of(tl.load(v_exponents + row, mask=inside, other=0).to(tl.int32))
    kind = k_out.dtype.element_ty
    k = numbers_of(k_codes, kind == tl.float32).to(tl.float32) * k_power[:, None]
    v = numbers_of(v_codes, kind == tl.float32).to(tl.float32) * v_power[:, None]
    tl.store(k_out + target, k.to(kind), mask=inside[:, None])
    tl.store(v_out + target, v.to(kind), mask=inside[:, None])
