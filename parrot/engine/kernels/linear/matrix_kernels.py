"""Products of few rows on the tensor core, bound by reading weights. `products` launches them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.linear.parts import (
    add_to_residual,
    gated,
    head_and_outputs,
    places,
    rotate_and_store,
)


@triton.jit
def _load_weight(at, inside, WHOLE: tl.constexpr):
    """A tile of weights, which are read once. Their cache lines are evicted first."""
    if WHOLE:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def _load_column(at, inside):
    """A number for each output, float32 [BN, 1]."""
    return tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None]


@triton.jit
def _load_scale(at, inside, E4M3: tl.constexpr):
    """The scales of outputs, float32 [BN, 1]; 1 without E4M3."""
    scale = tl.full([inside.shape[0], 1], 1.0, tl.float32)
    if E4M3:
        scale = _load_column(at, inside)
    return scale


@triton.jit
def _add_block(result, weight, x, scales_at, column, inside):
    """Add the product of 128 inputs times the scale of their block of weights."""
    product = tl.dot(weight, tl.trans(x), input_precision="ieee")
    return result + product * _load_column(scales_at + column // 128, inside)


@triton.jit
def _load_powers(powers_ptr, member, live, BM: tl.constexpr, E4M3: tl.constexpr):
    """The powers of two of rows in e4m3; 1 without E4M3."""
    power = tl.full([BM], 1.0, tl.float32)
    if E4M3:
        power = tl.load(powers_ptr + member, mask=live, other=0.0)
    return power


@triton.jit
def _load_squares(squares_ptr, member, live, PARTS: tl.constexpr):
    part = tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
    is_part = live[:, None] & (part < PARTS)
    return tl.load(squares_ptr + member[:, None] * PARTS + part, mask=is_part, other=0.0)


@triton.jit
def _products(
    row_at,
    up_row_at,
    x_row_at,
    inside,
    live,
    scales_at,
    up_scales_at,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    BOTH: tl.constexpr,
    ALL_INSIDE: tl.constexpr,
    BLOCKED: tl.constexpr,
):
    """BN rows of weights times BM rows of x, float32 [BN, BM].

    BOTH     the same for BN other rows
    BLOCKED  blocks of 128 inputs have scales at `scales_at` of each row; BK is 128"""
    # The weights are the tall operand of the tensor core, so few rows of x waste little of it.
    result = tl.zeros([BN, BM], dtype=tl.float32)
    other = tl.zeros([BN, BM], dtype=tl.float32)
    offset = tl.arange(0, BK)[None, :]
    whole: tl.constexpr = ALL_INSIDE & (K % BK == 0)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        column = first + offset
        x = tl.load(x_row_at + column, mask=live[:, None] & (column < K), other=0.0)
        tile = inside[:, None] & (column < K)
        weight = _load_weight(row_at + column, tile, whole)
        if BLOCKED:
            result = _add_block(result, weight, x, scales_at, first, inside)
        else:
            result = tl.dot(weight, tl.trans(x), result, input_precision="ieee")
        if BOTH:
            weight = _load_weight(up_row_at + column, tile, whole)
            if BLOCKED:
                other = _add_block(other, weight, x, up_scales_at, first, inside)
            else:
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
    scales_ptr,
    powers_ptr,
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
    E4M3: tl.constexpr,
    BLOCKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block of BN outputs, split of SPLIT inputs): out = x weight^T (+ bias) for up to BM
    rows. Each split has its own out.

    PARTS      divide x by its root mean square first; squares [rows, PARTS]
    SILU       weight is [gate | up] with 2 N rows, and out = silu(gate) * up
    ADD        residual += out, rounded; out = residual * gain, squares_out [rows, programs]
    E4M3       weights are e4m3 times scales [N or 2 N], and x is e4m3 times powers [rows]
    BLOCKED    scales are [rows of weights / 128, K / 128] (e4m3 only)
    DEPENDENT  the previous kernel, which writes all inputs except parameters, may still run"""
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
    HAS_SCALES: tl.constexpr = E4M3 and not BLOCKED
    scale = _load_scale(scales_ptr + row if HAS_SCALES else row, inside, HAS_SCALES)
    up_scale = _load_scale(scales_ptr + N + row if HAS_SCALES else row, inside, HAS_SCALES and SILU)
    scales_at = scales_ptr + row // 128 * (K // 128) + first // 128 if BLOCKED else row
    up_scales_at = scales_at + N // 128 * (K // 128) if BLOCKED else row
    if DEPENDENT:
        gdc_wait()
    power = _load_powers(powers_ptr, member, live, BM, E4M3)
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)  # Used after the product.
    if ADD:
        place = member.to(tl.int64)[None, :] * N + row[:, None]
        before = tl.load(residual_ptr + place, mask=both, other=0.0)
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0)
    result, up = _products(
        row_at,
        up_row_at,
        x_row_at,
        inside,
        live,
        scales_at,
        up_scales_at,
        SPLIT,
        BM,
        BN,
        BK,
        STAGES,
        SILU,
        N % BN == 0,
        BLOCKED,
    )
    if DEPENDENT:
        gdc_launch_dependents()
    if PARTS > 0:
        power *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    result *= scale * power[None, :]
    up *= up_scale * power[None, :]
    if BIAS:
        result += _load_column(bias_ptr + row, inside)
    if BIAS and SILU:
        up += _load_column(bias_ptr + N + row, inside)
    kind = out_ptr.dtype.element_ty
    if SILU:
        result = gated(result, up, kind)
    if ADD:
        result, parts = add_to_residual(result, before, residual_ptr + place, both, kind)
        part_squares = tl.sum(parts, 0)
        tl.store(squares_out_ptr + member * tl.num_programs(0) + program, part_squares, mask=live)
        result *= gain.to(tl.float32)[:, None]
    out_ptr += tl.program_id(1) * num_rows * N
    out_at = out_ptr + member.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(out_at, result.to(kind), mask=both)


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
    scales_ptr,
    powers_ptr,
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
    E4M3: tl.constexpr,
    BLOCKED: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (head, BN of its D outputs): `few_rows_linear_kernel`, then `rope_and_store_kernel`.

    q is [rows, H, D]. k and v of rows with a block table are written to the cache."""
    head, dim, row = head_and_outputs(D, BN)
    member = tl.arange(0, BM)
    inside = row >= 0
    live = member < num_rows
    placed, place, cos, sin = places(
        member,
        live,
        dim,
        positions,
        table_rows,
        tables,
        cos_sin,
        stride_page,
        stride_table,
        D,
        PAGE,
    )
    row_at = weight_ptr + row.to(tl.int64)[:, None] * K
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x
    HAS_SCALES: tl.constexpr = E4M3 and not BLOCKED
    scale = _load_scale(scales_ptr + row if HAS_SCALES else row, inside, HAS_SCALES)
    scales_at = scales_ptr + row // 128 * (K // 128) if BLOCKED else row
    if DEPENDENT:
        gdc_wait()
    power = _load_powers(powers_ptr, member, live, BM, E4M3)
    if PARTS > 0:
        squares = _load_squares(squares_ptr, member, live, PARTS)
    result, _ = _products(
        row_at, row_at, x_row_at, inside, live, scales_at, scales_at,
        K, BM, BN, BK, STAGES, False, True, BLOCKED,
    )  # fmt: skip
    if DEPENDENT:
        gdc_launch_dependents()
    if PARTS > 0:
        power *= tl.rsqrt(tl.sum(squares, 1) / K + eps)
    result *= scale * power[None, :]
    if BIAS:
        result += _load_column(bias_ptr + row, inside)
    rotate_and_store(
        result,
        q_ptr,
        k_cache,
        v_cache,
        head,
        dim,
        member,
        placed,
        place,
        cos,
        sin,
        H,
        HKV,
        D,
        PAGE,
    )
