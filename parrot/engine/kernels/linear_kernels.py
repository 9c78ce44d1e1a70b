"""Matrix products of few rows, which are bound by reading the weights. `linear` launches them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def _load_weight(at, inside, WHOLE: tl.constexpr):
    """A tile. Weights are read once: they leave the cache to what is read again."""
    if WHOLE:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_bias(at, inside):
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _load_squares(squares_ptr, member, live, PARTS: tl.constexpr):
    part = tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
    is_part = live[:, None] & (part < PARTS)
    return tl.load(squares_ptr + member[:, None] * PARTS + part, mask=is_part, other=0.0)


@triton.jit
def _gated(gate, up, KIND: tl.constexpr):
    """silu(gate) * up; both are rounded before, as separate kernels would."""
    gate = gate.to(KIND).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(KIND).to(tl.float32)


@triton.jit
def _add_to_residual(result, before, residual_at, inside, KIND: tl.constexpr):
    """The sum in float32, and its squares, rounded as it is stored: what the next layer adds to is
    in memory."""
    total = (result + before.to(tl.float32)).to(KIND)
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    return total, tl.where(inside, total * total, 0.0)


@triton.jit
def _products(
    row_at,
    up_row_at,
    x_row_at,
    inside,
    live,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BOTH: tl.constexpr,
    ALL_INSIDE: tl.constexpr,
):
    """BN rows of weights times BM of x, [BN, BM] in float32; BOTH: and BN others. The weights are
    the tall operand of the matrix unit, so few rows of x waste little of it."""
    result = tl.zeros([BN, BM], dtype=tl.float32)
    other = tl.zeros([BN, BM], dtype=tl.float32)
    offset = tl.arange(0, BK)[None, :]
    whole: tl.constexpr = ALL_INSIDE & (K % BK == 0)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        column = first + offset
        x = tl.load(x_row_at + column, mask=live[:, None] & (column < K), other=0.0)
        tile = inside[:, None] & (column < K)
        weight = _load_weight(row_at + column, tile, whole)
        result = tl.dot(weight, tl.trans(x), result, input_precision="ieee")
        if BOTH:
            weight = _load_weight(up_row_at + column, tile, whole)
            other = tl.dot(weight, tl.trans(x), other, input_precision="ieee")
    return result, other


@triton.jit
def few_rows_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    squares_ptr,
    residual_ptr,
    gain_ptr,
    squares_out_ptr,
    eps,
    num_rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block of BN outputs, part of SPLIT inputs): out = x weight^T (+ bias) for up to BM
    rows; each part has an out of its own.

    PARTS      x is first divided by its root mean square; squares [rows, PARTS]
    SILU       weight is [gate | up] with 2 N rows, and out = silu(gate) * up
    ADD        residual += out, rounded; out = residual * gain, squares_out [rows, programs]
    DEPENDENT  the kernel before, which wrote all but the parameters, may still run"""
    program = tl.program_id(0)
    row = program * BN + tl.arange(0, BN)
    member = tl.arange(0, BM)
    inside = row < N
    live = member < num_rows
    both = inside[:, None] & live[None, :]
    first = tl.program_id(1) * SPLIT
    row_at = weight_ptr + row.to(tl.int64)[:, None] * K + first
    up_row_at = row_at + tl.full([], N, tl.int64) * K
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x + first
    if DEPENDENT:
        gdc_wait()
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)  # nobody waits for them yet
    if ADD:
        place = member.to(tl.int64)[None, :] * N + row[:, None]
        before = tl.load(residual_ptr + place, mask=both, other=0.0)
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0)
    result, up = _products(
        row_at, up_row_at, x_row_at, inside, live, SPLIT, BM, BN, BK, STAGES, SILU, N % BN == 0
    )
    if DEPENDENT:
        gdc_launch_dependents()
    if PARTS > 0:
        scale = tl.rsqrt(tl.sum(squares, 1) / K + eps)
        result *= scale[None, :]
        up *= scale[None, :]
    if BIAS:
        result += _load_bias(bias_ptr + row, inside)
    if BIAS and SILU:
        up += _load_bias(bias_ptr + N + row, inside)
    kind = out_ptr.dtype.element_ty
    if SILU:
        result = _gated(result, up, kind)
    if ADD:
        result, parts = _add_to_residual(result, before, residual_ptr + place, both, kind)
        part_squares = tl.sum(parts, 0)
        tl.store(squares_out_ptr + member * tl.num_programs(0) + program, part_squares, mask=live)
        result *= gain.to(tl.float32)[:, None]
    out_ptr += tl.program_id(1) * num_rows * N
    out_at = out_ptr + member.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(out_at, result.to(kind), mask=both)


@triton.jit
def _fetch_rows(at, tile, bias_at, inside, BIAS: tl.constexpr):
    """Rows of weights, read once, and their biases."""
    weight = tl.load(at, mask=tile, other=0.0, eviction_policy="evict_first")
    bias = inside.to(tl.float32) * 0.0
    if BIAS:
        bias = tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
    return weight, bias


@triton.jit
def _row_sums(weight, bias, x, scale):
    return tl.sum(weight.to(tl.float32) * x[None, :], 1) * scale + bias


@triton.jit
def row_linear_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    squares_ptr,
    residual_ptr,
    gain_ptr,
    squares_out_ptr,
    eps,
    num_rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`few_rows_linear_kernel` for ROWS rows (`num_rows`) and few weights, without the matrix unit.

    A program's weights are all on their way to its registers before the kernel before has ended;
    then x is read, which takes about as long as the launch of a kernel. The next kernel may come at
    once, too, and fetch its own. BK: K or the next power of two."""
    program = tl.program_id(0)
    row = program * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    inside = row < N
    at = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    tile = inside[:, None] & (column < K)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    weight, bias = _fetch_rows(at, tile, bias_ptr + row if BIAS else at, inside, BIAS)
    if SILU:
        up_at = at + tl.full([], N, tl.int64) * K
        up_bias_at = bias_ptr + N + row if BIAS else at
        up_weight, up_bias = _fetch_rows(up_at, tile, up_bias_at, inside, BIAS)
    if ADD:
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    kind = out_ptr.dtype.element_ty
    for member in tl.range(0, ROWS, num_stages=1):
        x = tl.load(x_ptr + member * stride_x + column, mask=column < K, other=0.0).to(tl.float32)
        place = member * N + row
        if ADD:
            before = tl.load(residual_ptr + place, mask=inside, other=0.0)
        scale = 1.0
        if PARTS > 0:
            part = tl.arange(0, triton.next_power_of_2(PARTS))
            squares_at = squares_ptr + member * PARTS + part
            squares = tl.load(squares_at, mask=part < PARTS, other=0.0)
            scale = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        result = _row_sums(weight, bias, x, scale)
        if SILU:
            result = _gated(result, _row_sums(up_weight, up_bias, x, scale), kind)
        if ADD:
            result, parts = _add_to_residual(result, before, residual_ptr + place, inside, kind)
            part_squares = tl.sum(parts, 0)
            tl.store(squares_out_ptr + member * tl.num_programs(0) + program, part_squares)
            result *= gain
        tl.store(out_ptr + place, result.to(kind), mask=inside)


@triton.jit
def few_rows_qkv_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    squares_ptr,
    q_ptr,
    positions,
    table_rows,
    tables,
    cos_sin,
    k_cache,
    v_cache,
    eps,
    num_rows,
    stride_x,
    stride_page,
    stride_table,
    K: tl.constexpr,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (head, BN of its D outputs): as above, with `rope_and_store_kernel` behind it.

    The outputs are BN // 2 of the head's first half and those of its second half that are rotated
    with them. q [rows, H, D]; k and v go to the cache, but those of rows without a table."""
    HALF: tl.constexpr = BN // 2
    head = tl.program_id(0) // (D // BN)
    dim = tl.program_id(0) % (D // BN) * HALF + tl.arange(0, HALF)
    index = tl.arange(0, BN)
    row = head * D + tl.program_id(0) % (D // BN) * HALF + index % HALF + index // HALF * (D // 2)
    member = tl.arange(0, BM)
    inside = index < BN
    live = member < num_rows
    table_row = tl.load(table_rows + member, mask=live, other=-1)
    placed = table_row >= 0
    position = tl.load(positions + member, mask=placed, other=0)
    angle_at = cos_sin + position[None, :] * D + dim[:, None]
    cos = tl.load(angle_at, mask=placed[None, :], other=0.0)
    sin = tl.load(angle_at + D // 2, mask=placed[None, :], other=0.0)
    page = tl.load(tables + table_row * stride_table + position // PAGE, mask=placed, other=0)
    if DEPENDENT:
        gdc_wait()
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)
    row_at = weight_ptr + row.to(tl.int64)[:, None] * K
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x
    result, _ = _products(
        row_at, row_at, x_row_at, inside, live, K, BM, BN, BK, STAGES, False, True
    )
    if DEPENDENT:
        gdc_launch_dependents()
    if PARTS > 0:
        result *= tl.rsqrt(tl.sum(squares, 1) / K + eps)[None, :]
    if BIAS:
        result += _load_bias(bias_ptr + row, inside)
    # Rounded between, as separate kernels would.
    kind = q_ptr.dtype.element_ty
    halves = tl.reshape(result.to(kind).to(tl.float32), [2, HALF, BM])
    y1, y2 = tl.split(tl.permute(halves, (1, 2, 0)))
    r1 = y1 * cos - y2 * sin
    r2 = y2 * cos + y1 * sin
    if head < H:
        q_at = q_ptr + (member.to(tl.int64)[None, :] * H + head) * D + dim[:, None]
        tl.store(q_at, r1.to(kind), mask=placed[None, :])
        tl.store(q_at + D // 2, r2.to(kind), mask=placed[None, :])
    else:
        kv_head = (head - H) % HKV
        place = page.to(tl.int64) * stride_page + (kv_head * PAGE + position % PAGE) * D
        offset = place[None, :] + dim[:, None]
        if head < H + HKV:
            tl.store(k_cache + offset, r1.to(kind), mask=placed[None, :])
            tl.store(k_cache + offset + D // 2, r2.to(kind), mask=placed[None, :])
        else:
            tl.store(v_cache + offset, y1.to(kind), mask=placed[None, :])
            tl.store(v_cache + offset + D // 2, y2.to(kind), mask=placed[None, :])
