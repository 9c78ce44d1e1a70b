"""The attention kernels, launched by `tree_attention` (docs/internals/kernels.md).

`attend_items` reads KV through pointers and supports all spans and page sizes. `attend_tiles`
(`tile_kernels`) reads whole pages with the bulk copy engine, for shared spans with many rows and
for fills. `merge_partials` merges the partial results of tokens that several items cover."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

# Finite replacements for minus infinity. A masked score is far below the initial maximum, so a row
# without visible keys sums to 0 instead of NaN.
NO_SCORE = tl.constexpr(-1.0e30)
NO_MAXIMUM = tl.constexpr(-1.0e20)
NO_POSITION = tl.constexpr(1 << 30)


@triton.jit
def load_item(item):
    """The first six columns of an item (`work_list`)."""
    return (
        tl.load(item),
        tl.load(item + 1),
        tl.load(item + 2),
        tl.load(item + 3),
        tl.load(item + 4),
        tl.load(item + 5),
    )


@triton.jit
def row_slots(slot_of, slot_first, member, live, q_count):
    """The slot of each row's partial result. Load it early, so that the store does not wait."""
    is_partial = live & (member < tl.where(slot_first < 0, 0, q_count))
    return tl.load(slot_of + slot_first + member, mask=is_partial, other=0)


@triton.jit
def load_rows(q_ptr, token, head, live, offs_d, stride_q, D: tl.constexpr, UPCAST: tl.constexpr):
    offset = token.to(tl.int64) * stride_q + head * D
    q = tl.load(q_ptr + offset[:, None] + offs_d[None, :], mask=live[:, None], other=0.0)
    if UPCAST:
        q = q.to(tl.float32)
    return q


@triton.jit
def item_rows(
    positions,
    token_order,
    q_first,
    q_count,
    kv_end,
    own,
    kv_head,
    G: tl.constexpr,
    BM: tl.constexpr,
):
    """The rows of a tile: the tokens of an item times the G query heads of a KV head.

    Returns per row: the index of its token in the item, its head, whether it is a real row, its row
    of q (consecutive for own spans, from `token_order` for shared spans), and the end of its
    visible keys. Also returns the position of the item's first token."""
    offs_m = tl.arange(0, BM)
    member = offs_m // G
    live = (member < q_count) & (offs_m < (BM // G) * G)
    is_listed = live & (member < tl.where(own, 0, q_count))
    listed = tl.load(token_order + q_first + member, mask=is_listed, other=0)
    token = tl.where(own, q_first + member, listed)
    position = tl.load(positions + q_first, mask=own, other=NO_POSITION)
    row_end = tl.minimum(kv_end, position + 1 + member)
    return member, kv_head * G + offs_m % G, live, token, row_end, position


@triton.jit
def page_ids(table, first, offs_n, PAGE: tl.constexpr, BN: tl.constexpr):
    """The pages of the tile of keys at `first`: one id, or one per key if tiles span pages."""
    if PAGE % BN == 0:
        pages = tl.load(table + first // PAGE)
    else:
        pages = tl.load(table + (first + offs_n) // PAGE)
    return pages


@triton.jit
def window_starts(positions, token, live, WINDOW: tl.constexpr):
    """The first key of each row's window."""
    return tl.load(positions + token, mask=live, other=NO_POSITION) + 1 - WINDOW


@triton.jit
def window_begin(row_start, kv_first, BN: tl.constexpr):
    """The first key of the first tile of an item that is in a row's window."""
    return kv_first + tl.maximum(tl.min(row_start, 0) - kv_first, 0) // BN * BN


@triton.jit
def in_span(keys, begin, end, PAGE: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr):
    """Which keys of a tile are before `end` and, if tiles span pages, not before `begin`."""
    inside = keys < end
    if WINDOW > 0 and PAGE % BN != 0:
        inside = inside & (keys >= begin)
    return inside


@triton.jit
def capped(scores, SOFTCAP: tl.constexpr):
    """SOFTCAP * tanh(scores / SOFTCAP)."""
    # 2.885 = 2 / ln(2), so that 2 ** (2.885 * x) is e ** (2 * x).
    return SOFTCAP - 2.0 * SOFTCAP / (tl.exp2(scores * (2.8853900817779268 / SOFTCAP)) + 1.0)


@triton.jit
def hide(scores, first, row_start, row_end, offs_n, WINDOW: tl.constexpr):
    """Mask the keys that a row does not see."""
    keys = (first + offs_n)[None, :]
    seen = keys < row_end[:, None]
    if WINDOW > 0:
        seen = seen & (keys >= row_start[:, None])
    return tl.where(seen, scores, NO_SCORE)


@triton.jit
def weigh(scores, maximum, total, scale_log2):
    """The weights of a tile of scores, and the factor of the earlier weights.

    Also returns the new maximum and the new sum of weights."""
    new_maximum = tl.maximum(maximum, tl.max(scores, 1) * scale_log2)
    weights = tl.exp2(scores * scale_log2 - new_maximum[:, None])
    decay = tl.exp2(maximum - new_maximum)
    return weights, decay, new_maximum, total * decay + tl.sum(weights, 1)


@triton.jit
def attend(
    q,
    k,
    v,
    acc,
    maximum,
    total,
    first,
    row_start,
    row_end,
    offs_n,
    scale_log2,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
):
    """One step of the online softmax in base 2 over a tile of keys."""
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if SOFTCAP > 0:
        scores = capped(scores * scale_log2, SOFTCAP)
    if MASKED:
        scores = hide(scores, first, row_start, row_end, offs_n, WINDOW)
    if SOFTCAP > 0:
        weights, decay, maximum, total = weigh(scores, maximum, total, 1.0)
    else:
        weights, decay, maximum, total = weigh(scores, maximum, total, scale_log2)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return acc, maximum, total


@triton.jit
def sum_and_lse(maximum, total):
    """The divisors of partial results, and their log2 of sums. Rows may have no visible keys."""
    safe_total = tl.where(total > 0.0, total, 1.0)
    return safe_total, tl.where(total > 0.0, maximum + tl.log2(safe_total), NO_SCORE)


@triton.jit
def store_partials(
    acc,
    maximum,
    total,
    slot,
    head,
    live,
    offs_d,
    partial_out,
    partial_lse,
    H: tl.constexpr,
    D: tl.constexpr,
):
    safe_total, lse = sum_and_lse(maximum, total)
    row = slot.to(tl.int64) * H + head
    partial_at = partial_out + row[:, None] * D + offs_d[None, :]
    tl.store(partial_at, acc / safe_total[:, None], mask=live[:, None])
    tl.store(partial_lse + row, lse, mask=live)


@triton.jit
def store_rows(
    acc,
    maximum,
    total,
    slot_first,
    slot,
    token,
    head,
    live,
    offs_d,
    out_ptr,
    partial_out,
    partial_lse,
    H: tl.constexpr,
    D: tl.constexpr,
):
    """Write the output if no other item covers these tokens, else the partial results."""
    if slot_first < 0:
        out_row = token.to(tl.int64) * H + head
        out_at = out_ptr + out_row[:, None] * D + offs_d[None, :]
        result = (acc / total[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_at, result, mask=live[:, None])
    else:
        store_partials(acc, maximum, total, slot, head, live, offs_d,
                        partial_out, partial_lse, H, D)  # fmt: skip


@triton.jit
def _load_keys(
    cache,
    pages,
    first,
    begin,
    end,
    offs_n,
    offs_d,
    stride_page,
    STRIDE_TOKEN: tl.constexpr,
    PAGE: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    UPCAST: tl.constexpr,
):
    """A tile [BN, D] of one KV head's keys or values. With MASKED, keys from `end` on are 0.

    With WINDOW, keys in other pages than `begin` and before it are 0: other contexts may have
    written NaN to these pages."""
    if PAGE % BN == 0:
        base = cache + pages.to(tl.int64) * stride_page + (first % PAGE) * STRIDE_TOKEN
        pointers = base + offs_n[:, None] * STRIDE_TOKEN + offs_d[None, :]
    else:
        in_page = (first + offs_n) % PAGE
        key_offset = pages.to(tl.int64) * stride_page + in_page * STRIDE_TOKEN
        pointers = cache + key_offset[:, None] + offs_d[None, :]
    if MASKED:
        inside = in_span(first + offs_n, begin, end, PAGE, BN, WINDOW)
        tile = tl.load(pointers, mask=inside[:, None], other=0.0)
    else:
        tile = tl.load(pointers)
    if UPCAST:
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def attend_items(
    q_ptr,
    k_ptr,
    v_ptr,
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
    stride_page,
    stride_table,
    STRIDE_HEAD: tl.constexpr,
    STRIDE_TOKEN: tl.constexpr,
    G: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    STAGES: tl.constexpr,
    ALL_MASKED: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    UPCAST: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (kv head, item): softmax(q k^T) v over the item's span, for the heads of its tokens.

    ALL_MASKED  one loop with masks, for short spans; else whole tiles first, then the rest
    WINDOW      keys that a row attends to; 0 for all. ALL_MASKED must be true for a window
    SOFTCAP     the cap of scores in base 2; 0 for none
    EARLY       the next kernel may start at once; else after the loop
    DEPENDENT   the previous kernel, which writes q and the newest KV, may still run

    An own span ends at the position of its tokens. The kernel reads the positions, so a plan stays
    valid while its sequences grow."""
    # Dependent loads take most of the time of a short item. So the fields of an item are loaded
    # together, then pages, positions and tokens, and each page id one iteration before its tile.
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * 8
    q_first, q_count, table_row, kv_first, kv_end, slot_first = load_item(item)
    own = tl.load(item + 6) != 0
    if DEPENDENT and EARLY:
        gdc_launch_dependents()
    if q_count == 0:  # Padding of a CUDA graph.
        if DEPENDENT:
            gdc_wait()
        return
    table = tables + table_row * stride_table
    offs_n = tl.arange(0, BN)
    offs_d = tl.arange(0, D)
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
    if DEPENDENT:
        gdc_wait()
    q = load_rows(q_ptr, token, head, live, offs_d, stride_q, D, UPCAST)
    keys = k_ptr + kv_head.to(tl.int64) * STRIDE_HEAD
    values = v_ptr + kv_head.to(tl.int64) * STRIDE_HEAD

    acc = tl.zeros([BM, D], dtype=tl.float32)
    maximum = tl.zeros([BM], dtype=tl.float32) + NO_MAXIMUM
    total = tl.zeros([BM], dtype=tl.float32)
    whole = kv_first
    if not ALL_MASKED:
        shortest = tl.minimum(kv_end, position + 1)
        whole = kv_first + tl.maximum(shortest - kv_first, 0) // BN * BN
        for first in tl.range(kv_first, whole, BN, num_stages=STAGES):
            next_pages = page_ids(table, first + BN, offs_n, PAGE, BN)
            k = _load_keys(keys, pages, first, begin, end, offs_n, offs_d, stride_page,
                           STRIDE_TOKEN, PAGE, BN, False, WINDOW, UPCAST)  # fmt: skip
            v = _load_keys(values, pages, first, begin, end, offs_n, offs_d, stride_page,
                           STRIDE_TOKEN, PAGE, BN, False, WINDOW, UPCAST)  # fmt: skip
            acc, maximum, total = attend(
                q, k, v, acc, maximum, total, first, row_start, row_end, offs_n, scale_log2,
                False, WINDOW, SOFTCAP,
            )  # fmt: skip
            pages = next_pages
    for first in tl.range(whole, end, BN, num_stages=STAGES):
        next_pages = page_ids(table, first + BN, offs_n, PAGE, BN)
        k = _load_keys(keys, pages, first, begin, end, offs_n, offs_d, stride_page,
                       STRIDE_TOKEN, PAGE, BN, True, WINDOW, UPCAST)  # fmt: skip
        v = _load_keys(values, pages, first, begin, end, offs_n, offs_d, stride_page,
                       STRIDE_TOKEN, PAGE, BN, True, WINDOW, UPCAST)  # fmt: skip
        acc, maximum, total = attend(
            q, k, v, acc, maximum, total, first, row_start, row_end, offs_n, scale_log2,
            True, WINDOW, SOFTCAP,
        )  # fmt: skip
        pages = next_pages
    if DEPENDENT and not EARLY:
        gdc_launch_dependents()
    store_rows(acc, maximum, total, slot_first, slot, token, head, live, offs_d,
                out_ptr, partial_out, partial_lse, H, D)  # fmt: skip


@triton.jit
def _merged(
    partial_out,
    partial_lse,
    start,
    end,
    head,
    offs_d,
    H: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """The mean of the partial results [start, end) of a head, weighted by exp2(lse). float32 [D].

    SLOTS of them are loaded at once."""
    acc = tl.zeros([D], dtype=tl.float32)
    maximum = tl.full([], NO_MAXIMUM, dtype=tl.float32)
    total = tl.full([], 0.0, dtype=tl.float32)
    for first in tl.range(start, end, SLOTS):
        slot = first + tl.arange(0, SLOTS)
        live = slot < end
        row = slot.to(tl.int64) * H + head
        lse = tl.load(partial_lse + row, mask=live, other=NO_SCORE)
        part = tl.load(
            partial_out + row[:, None] * D + offs_d[None, :], mask=live[:, None], other=0.0
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp2(lse - new_maximum)
        decay = tl.exp2(maximum - new_maximum)
        acc = acc * decay + tl.sum(weights[:, None] * part, 0)
        total = total * decay + tl.sum(weights, 0)
        maximum = new_maximum
    return acc / total


@triton.jit
def merge_partials(
    partial_out,
    partial_lse,
    slot_indptr,
    out_ptr,
    H: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    HEADS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, block of HEADS heads): merge the token's partial results into `out`.

    SLOTS      partial results loaded at once; those of a token are consecutive
    EARLY      the next kernel may start before the previous one has ended
    DEPENDENT  the previous kernel, which writes the partial results, may still run

    Tokens without slots were written directly and are skipped."""
    token = tl.program_id(0)
    start = tl.load(slot_indptr + token)
    end = tl.load(slot_indptr + token + 1)
    if DEPENDENT:
        if EARLY:
            gdc_launch_dependents()
        gdc_wait()
        if not EARLY:
            gdc_launch_dependents()
    if start >= end:
        return
    offs_d = tl.arange(0, D)
    for index in tl.static_range(HEADS):
        head = tl.program_id(1) * HEADS + index
        merged = _merged(partial_out, partial_lse, start, end, head, offs_d, H, D, SLOTS)
        row = token.to(tl.int64) * H + head
        tl.store(out_ptr + row * D + offs_d, merged.to(out_ptr.dtype.element_ty))
