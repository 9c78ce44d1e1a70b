"""Products of one or two rows without the tensor core. `products` launches them.

A program loads all its weights to registers, then waits for the end of the previous kernel, and
then reads x. The next kernel may start as soon as all programs have started. It loads its own
weights meanwhile."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.e4m3 import coded
from parrot.engine.kernels.linear.parts import (
    add_to_residual,
    gated,
    head_and_outputs,
    places,
    rotate_and_store,
)


@triton.jit
def _fetch_rows(at, tile, bias_at, scale_at, inside, BIAS: tl.constexpr, E4M3: tl.constexpr):
    """Load rows of weights, which are read once, their biases and their scales."""
    weight = tl.load(at, mask=tile, other=0.0, eviction_policy="evict_first")
    bias = inside.to(tl.float32) * 0.0
    scale = bias + 1.0
    if BIAS:
        bias = tl.load(bias_at, mask=inside, other=0.0).to(tl.float32)
    if E4M3:
        scale = tl.load(scale_at, mask=inside, other=0.0)
    return weight, bias, scale


@triton.jit
def _load_x(
    at,
    inside,
    squares_ptr,
    powers_ptr,
    member,
    eps,
    K: tl.constexpr,
    PARTS: tl.constexpr,
    E4M3: tl.constexpr,
):
    """A row of x in float32, and the factor of its products: 1 over its root mean square, if PARTS.

    E4M3  a row in another type is divided by its root mean square, and rounded to e4m3"""
    x = tl.load(at, mask=inside, other=0.0)
    factor = tl.full([], 1.0, tl.float32)
    if PARTS > 0:
        factor = _row_scale(squares_ptr, member, eps, K, PARTS)
    if E4M3 and x.dtype == tl.float8e4nv:
        factor = tl.load(powers_ptr + member)
    elif E4M3:
        # Rounded as separate kernels would round.
        x, factor = coded((x.to(tl.float32) * factor).to(x.dtype))
    return x.to(tl.float32), factor


@triton.jit
def _row_sums(weight, bias, scale, x, factor):
    return tl.sum(weight.to(tl.float32) * x[None, :], 1) * (scale * factor) + bias


@triton.jit
def _row_scale(squares_ptr, member, eps, K: tl.constexpr, PARTS: tl.constexpr):
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    squares = tl.load(squares_ptr + member * PARTS + part, mask=part < PARTS, other=0.0)
    return tl.rsqrt(tl.sum(squares, 0) / K + eps)


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
    scales_ptr,
    powers_ptr,
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
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`few_rows_linear_kernel` for ROWS rows (= `num_rows`). BK is the next power of two of K.

    With E4M3, x may be in another type."""
    program = tl.program_id(0)
    row = program * BN + tl.arange(0, BN)
    column = tl.arange(0, BK)
    inside = row < N
    at = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    tile = inside[:, None] & (column < K)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    bias_at = bias_ptr + row if BIAS else at
    scale_at = scales_ptr + row if E4M3 else at
    weight, bias, scale = _fetch_rows(at, tile, bias_at, scale_at, inside, BIAS, E4M3)
    if SILU:
        up_at = at + tl.full([], N, tl.int64) * K
        up_bias_at = bias_at + N if BIAS else at
        up_scale_at = scale_at + N if E4M3 else at
        up_weight, up_bias, up_scale = _fetch_rows(
            up_at, tile, up_bias_at, up_scale_at, inside, BIAS, E4M3
        )
    if ADD:
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0).to(tl.float32)
    if DEPENDENT:
        gdc_wait()
    kind = out_ptr.dtype.element_ty
    for member in tl.range(0, ROWS, num_stages=1):
        x_at = x_ptr + member * stride_x + column
        x, factor = _load_x(x_at, column < K, squares_ptr, powers_ptr, member, eps, K, PARTS, E4M3)
        place = member * N + row
        if ADD:
            before = tl.load(residual_ptr + place, mask=inside, other=0.0)
        result = _row_sums(weight, bias, scale, x, factor)
        if SILU:
            result = gated(result, _row_sums(up_weight, up_bias, up_scale, x, factor), kind)
        if ADD:
            result, parts = add_to_residual(result, before, residual_ptr + place, inside, kind)
            part_squares = tl.sum(parts, 0)
            tl.store(squares_out_ptr + member * tl.num_programs(0) + program, part_squares)
            result *= gain
        tl.store(out_ptr + place, result.to(kind), mask=inside)


@triton.jit
def row_qkv_kernel(
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
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    E4M3: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`few_rows_qkv_kernel` for ROWS rows (= `num_rows`), computed like `row_linear_kernel`."""
    head, dim, row = head_and_outputs(D, BN)
    inside = row >= 0
    member = tl.arange(0, ROWS)
    column = tl.arange(0, BK)
    at = weight_ptr + row.to(tl.int64)[:, None] * K + column[None, :]
    tile = inside[:, None] & (column < K)[None, :]
    if DEPENDENT:
        gdc_launch_dependents()
    bias_at = bias_ptr + row if BIAS else at
    scale_at = scales_ptr + row if E4M3 else at
    weight, bias, scale = _fetch_rows(at, tile, bias_at, scale_at, inside, BIAS, E4M3)
    placed, place, cos, sin = places(
        member,
        member >= 0,
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
    if DEPENDENT:
        gdc_wait()
    result = tl.zeros([BN, ROWS], dtype=tl.float32)
    for index in tl.static_range(ROWS):
        x_at = x_ptr + index * stride_x + column
        x, factor = _load_x(x_at, column < K, squares_ptr, powers_ptr, index, eps, K, PARTS, E4M3)
        sums = _row_sums(weight, bias, scale, x, factor)
        result = tl.where((member == index)[None, :], sums[:, None], result)
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
