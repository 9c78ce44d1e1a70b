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
    BIAS: tl.constexpr,
    PARTS: tl.constexpr,
    SILU: tl.constexpr,
    ADD: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (block of BN outputs): out = x weight^T (+ bias) for up to BM rows. The weights are
    the tall operand of the matrix unit, so few rows of x waste little of it.

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
    row_at = weight_ptr + row.to(tl.int64)[:, None] * K
    up_row_at = row_at + tl.full([], N, tl.int64) * K
    x_row_at = x_ptr + member.to(tl.int64)[:, None] * stride_x
    if DEPENDENT:
        gdc_wait()
    if PARTS > 0:
        part = tl.arange(0, triton.next_power_of_2(PARTS))[None, :]
        is_part = live[:, None] & (part < PARTS)
        squares_at = squares_ptr + member[:, None] * PARTS + part
        squares = tl.load(squares_at, mask=is_part, other=0.0)  # nobody waits for them yet
    if ADD:
        place = member.to(tl.int64)[None, :] * N + row[:, None]
        before = tl.load(residual_ptr + place, mask=both, other=0.0)
        gain = tl.load(gain_ptr + row, mask=inside, other=0.0)
    result = tl.zeros([BN, BM], dtype=tl.float32)
    up = tl.zeros([BN, BM], dtype=tl.float32)
    offset = tl.arange(0, BK)[None, :]
    whole: tl.constexpr = (N % BN == 0) & (K % BK == 0)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        column = first + offset
        x = tl.load(x_row_at + column, mask=live[:, None] & (column < K), other=0.0)
        tile = inside[:, None] & (column < K)
        weight = _load_weight(row_at + column, tile, whole)
        result = tl.dot(weight, tl.trans(x), result, input_precision="ieee")
        if SILU:
            weight = _load_weight(up_row_at + column, tile, whole)
            up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
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
        # Rounded between, as separate kernels would.
        gate = result.to(kind).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up.to(kind).to(tl.float32)
    if ADD:
        # Rounded as it is stored: what the next layer adds to is in memory.
        total = (result + before.to(tl.float32)).to(kind)
        tl.store(residual_ptr + place, total, mask=both)
        result = total.to(tl.float32)
        part_squares = tl.sum(tl.where(both, result * result, 0.0), 0)
        tl.store(squares_out_ptr + member * tl.num_programs(0) + program, part_squares, mask=live)
        result *= gain.to(tl.float32)[:, None]
    out_at = out_ptr + member.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(out_at, result.to(kind), mask=both)
