"""The kernels between the matrix products of a layer. `fused` launches them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator, assignment"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.e4m3 import (
    bits_of,
    coded,
    codes_of,
    exponent_of,
    float8_of,
    inverse_of,
    power_of,
)
from parrot.engine.kernels.linear.parts import add_to_residual
from parrot.engine.kernels.quantised_kernels import numbers_of


@triton.jit
def _scaled(value, power, scales_at, inside):
    """Numbers of a product times the power of their row and the scales of their outputs, rounded to
    the product's type."""
    scales = tl.load(scales_at, mask=inside, other=0.0)
    return (value.to(tl.float32) * (power * scales)).to(value.dtype)


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    powers_ptr,
    x_powers_ptr,
    x_scales_ptr,
    eps,
    stride_x,
    stride_part,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    CODES: tl.constexpr,
    FACTORS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row): residual += x (without ADD: = x), out = rms_norm(residual) * weight.

    PARTS      x is the sum of PARTS tensors
    FACTORS    x is to be multiplied by x_powers [rows] and x_scales [SIZE] first
    CODES      out is in e4m3, and powers [rows] are its factors
    DEPENDENT  the previous kernel, which writes x and the residual, may still run"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    x_at = x_ptr + row * stride_x + column
    value = tl.load(x_at, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x_at + part * stride_part, mask=inside, other=0.0)
    if FACTORS:
        power = tl.load(x_powers_ptr + row)
        value = _scaled(value, power, x_scales_ptr + column, inside)
    at = residual_ptr + row * SIZE + column
    if ADD:
        before = tl.load(at, mask=inside, other=0.0)
        # Round as the store does, because the next layer reads the rounded value.
        value = (value.to(tl.float32) + before.to(tl.float32)).to(residual_ptr.dtype.element_ty)
    tl.store(at, value.to(residual_ptr.dtype.element_ty), mask=inside)
    wide = value.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 0) / SIZE + eps)
    normed = wide * scale
    kind = residual_ptr.dtype.element_ty
    if weight_ptr.dtype.element_ty == kind:  # Else the gain is in float32.
        normed = normed.to(kind).to(tl.float32)
    result = (normed * weight.to(tl.float32)).to(kind)
    if CODES:
        result, power = coded(result)
        tl.store(powers_ptr + row, power)
    tl.store(out_ptr + row * SIZE + column, result, mask=inside)


@triton.jit
def add_parts_kernel(
    parts_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    squares_ptr,
    stride_part,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block of BLOCK columns, row): residual += the sum of parts, out = residual * weight.

    squares    float32 [rows, programs]: the sums of the squares of the residual
    DEPENDENT  the previous kernel, which writes the parts and the residual, may still run"""
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < SIZE
    part = tl.arange(0, triton.next_power_of_2(PARTS))[:, None]
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    at = row * SIZE + column
    parts_at = parts_ptr + part.to(tl.int64) * stride_part + at[None, :]
    parts = tl.load(parts_at, mask=inside[None, :] & (part < PARTS), other=0.0)
    before = tl.load(residual_ptr + at, mask=inside, other=0.0)
    kind = residual_ptr.dtype.element_ty
    total, squares = add_to_residual(tl.sum(parts, 0), before, residual_ptr + at, inside, kind)
    tl.store(squares_ptr + row * tl.num_programs(0) + tl.program_id(0), tl.sum(squares, 0))
    tl.store(out_ptr + at, (total * weight.to(tl.float32)).to(kind), mask=inside)


@triton.jit
def rope_and_store_kernel(
    qkv_ptr,
    out_ptr,
    positions,
    table_rows,
    tables,
    cos_sin,
    q_weight,
    k_weight,
    k_cache,
    v_cache,
    k_exponents,
    v_exponents,
    powers_ptr,
    scales_ptr,
    eps,
    stride_qkv,
    stride_part,
    stride_out,
    stride_page,
    stride_table,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    WITH_NORM: tl.constexpr,
    KEEP_K: tl.constexpr,
    QUANTISED: tl.constexpr,
    FACTORS: tl.constexpr,
    EARLY: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, block of HEADS heads): rotate q and k by the token's position, write q to
    out, and k and v to the token's slot in its page.

    PARTS      qkv is the sum of PARTS tensors, and out is another tensor; 0: out is qkv
    WITH_NORM  first apply the RMS norm to each head of q and k
    KEEP_K     also write k to out, and v unless it is there
    QUANTISED  pages store codes and exponents (`quantised_kernels`); KEEP_K writes the dequantised
               k and v
    FACTORS    qkv is to be multiplied by powers [tokens] and scales [outputs] first
    DEPENDENT  the previous kernel, which writes qkv, may still run
    EARLY      the next kernel may start at once, which is faster for few tokens

    The halves of a head are rotated: (x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)."""
    token = tl.program_id(0).to(tl.int64)
    table_row = tl.load(table_rows + token)
    position = tl.load(positions + token)
    is_token = table_row >= 0  # Else it is padding of a CUDA graph, with any position.
    position = tl.where(is_token, position, 0)
    page = tl.load(tables + table_row * stride_table + position // PAGE, mask=is_token, other=0)
    if DEPENDENT:
        gdc_wait()
    if DEPENDENT and EARLY:
        gdc_launch_dependents()
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half = tl.arange(0, D // 2)
    inside = (head < H + 2 * HKV)[:, None] & (half < D // 2)[None, :]
    kind = out_ptr.dtype.element_ty
    at = qkv_ptr + token * stride_qkv + head[:, None] * D + half[None, :]
    x1 = tl.load(at, mask=inside, other=0.0)
    x2 = tl.load(at + D // 2, mask=inside, other=0.0)
    for part in tl.static_range(1, PARTS):
        x1 += tl.load(at + part * stride_part, mask=inside, other=0.0)
        x2 += tl.load(at + part * stride_part + D // 2, mask=inside, other=0.0)
    x1 = x1.to(kind)
    x2 = x2.to(kind)
    if FACTORS:
        power = tl.load(powers_ptr + token)
        scales_at = scales_ptr + head[:, None] * D + half[None, :]
        x1 = _scaled(x1, power, scales_at, inside)
        x2 = _scaled(x2, power, scales_at + D // 2, inside)
    is_v = head >= H + HKV
    y1 = x1.to(tl.float32)
    y2 = x2.to(tl.float32)
    if WITH_NORM:
        scale = tl.rsqrt(tl.sum(y1 * y1 + y2 * y2, 1) / D + eps)[:, None]
        is_q = (head < H)[:, None]
        q1 = tl.load(q_weight + half).to(tl.float32)[None, :]
        q2 = tl.load(q_weight + half + D // 2).to(tl.float32)[None, :]
        k1 = tl.load(k_weight + half).to(tl.float32)[None, :]
        k2 = tl.load(k_weight + half + D // 2).to(tl.float32)[None, :]
        y1 = y1 * scale * tl.where(is_q, q1, k1)
        y2 = y2 * scale * tl.where(is_q, q2, k2)
    cos = tl.load(cos_sin + position * D + half)[None, :]
    sin = tl.load(cos_sin + position * D + D // 2 + half)[None, :]
    r1 = (y1 * cos - y2 * sin).to(kind)
    r2 = (y2 * cos + y1 * sin).to(kind)
    k1 = r1
    k2 = r2
    KEEP_V: tl.constexpr = KEEP_K and (QUANTISED or PARTS > 0)
    NUM_OUT: tl.constexpr = H + (HKV if KEEP_K else 0) + (HKV if KEEP_V else 0)
    if KEEP_V and not QUANTISED:
        r1 = tl.where(is_v[:, None], x1, r1)
        r2 = tl.where(is_v[:, None], x2, r2)
    if QUANTISED:
        n1 = tl.where(is_v[:, None], x1, r1).to(tl.float32)
        n2 = tl.where(is_v[:, None], x2, r2).to(tl.float32)
        exponent = exponent_of(tl.max(tl.maximum(bits_of(n1), bits_of(n2)), 1))
        inverse = inverse_of(exponent)[:, None]
        x1 = codes_of(n1 * inverse)
        x2 = codes_of(n2 * inverse)
        k1 = x1
        k2 = x2
        if KEEP_K:
            power = power_of(exponent)[:, None]
            rotated = (head < H)[:, None]
            r1 = tl.where(rotated, r1, (numbers_of(x1, True) * power).to(kind))
            r2 = tl.where(rotated, r2, (numbers_of(x2, True) * power).to(kind))
    inside &= is_token
    to_out = inside & (head < NUM_OUT)[:, None]
    out_at = out_ptr + token * stride_out + head[:, None] * D + half[None, :]
    tl.store(out_at, r1, mask=to_out)
    tl.store(out_at + D // 2, r2, mask=to_out)
    kv_head = tl.where(is_v, head - H - HKV, head - H)
    place = page.to(tl.int64) * stride_page + (kv_head * PAGE + position % PAGE).to(tl.int64) * D
    k_at = k_cache + place[:, None] + half[None, :]
    to_k = inside & ((head >= H) & (head < H + HKV))[:, None]
    tl.store(k_at, k1, mask=to_k)
    tl.store(k_at + D // 2, k2, mask=to_k)
    v_at = v_cache + place[:, None] + half[None, :]
    to_v = inside & is_v[:, None]
    tl.store(v_at, x1, mask=to_v)
    tl.store(v_at + D // 2, x2, mask=to_v)
    if QUANTISED:
        row = page.to(tl.int64) * (HKV * PAGE) + kv_head * PAGE + position % PAGE
        is_k = is_token & (head >= H) & (head < H + HKV)
        is_v = is_token & is_v & (head < H + 2 * HKV)
        tl.store(k_exponents + row, exponent.to(tl.uint8), mask=is_k)
        tl.store(v_exponents + row, exponent.to(tl.uint8), mask=is_v)


@triton.jit
def _gated_columns(
    row_at,
    column,
    x_power,
    x_scales_ptr,
    SIZE: tl.constexpr,
    GELU: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Compute some columns of a row: silu(gate) * up. See `silu_mul_kernel`."""
    inside = column < SIZE
    kind = row_at.dtype.element_ty
    gate = tl.load(row_at + column, mask=inside, other=0.0)
    up = tl.load(row_at + SIZE + column, mask=inside, other=0.0)
    if FACTORS:
        gate = _scaled(gate, x_power, x_scales_ptr + column, inside)
        up = _scaled(up, x_power, x_scales_ptr + SIZE + column, inside)
    gate = gate.to(tl.float32)
    up = up.to(tl.float32)
    power = gate
    if GELU:  # 1 + tanh(x) is 2 * sigmoid(2 * x), and 1.596 is 2 * sqrt(2 / pi).
        power = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return (gate * tl.sigmoid(power) * up).to(kind)


@triton.jit
def silu_mul_kernel(
    gate_up_ptr,
    out_ptr,
    powers_ptr,
    x_powers_ptr,
    x_scales_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    GELU: tl.constexpr,
    CODES: tl.constexpr,
    FACTORS: tl.constexpr,
):
    """Program (row, block of columns): out = silu(gate) * up, for rows [gate | up].

    GELU     apply the tanh approximation of GELU instead
    CODES    a program computes all blocks of a row; out is in e4m3, and powers [rows] are its
             factors
    FACTORS  multiply gate and up by x_powers [rows] and x_scales [2 SIZE] first"""
    row = tl.program_id(0).to(tl.int64)
    row_at = gate_up_ptr + row * 2 * SIZE
    out_at = out_ptr + row * SIZE
    block = tl.arange(0, BLOCK)
    x_power = 1.0
    if FACTORS:
        x_power = tl.load(x_powers_ptr + row)
    if CODES:
        results = ()
        largest = tl.zeros([BLOCK], dtype=tl.int32)
        for first in tl.static_range(0, SIZE, BLOCK):
            result = _gated_columns(
                row_at, first + block, x_power, x_scales_ptr, SIZE, GELU, FACTORS
            )
            largest = tl.maximum(largest, bits_of(result.to(tl.float32)))
            results = results + (result,)  # noqa: RUF005 (not in Triton)
        exponent = exponent_of(tl.max(largest, 0))
        tl.store(powers_ptr + row, power_of(exponent))
        inverse = inverse_of(exponent)
        for index in tl.static_range(len(results)):
            column = index * BLOCK + block
            codes = float8_of(results[index].to(tl.float32) * inverse)
            tl.store(out_at + column, codes, mask=column < SIZE)
    else:
        column = tl.program_id(1) * BLOCK + block
        result = _gated_columns(row_at, column, x_power, x_scales_ptr, SIZE, GELU, FACTORS)
        tl.store(out_at + column, result, mask=column < SIZE)
