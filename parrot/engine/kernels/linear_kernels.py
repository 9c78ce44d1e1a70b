"""Matrix products of few rows, which are bound by reading the weights. `linear` launches them."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def _rows_dot(at, x_ptr, inside, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """Inner products of BN rows of a matrix with one vector, in float32."""
    total = tl.zeros([BN, BK], dtype=tl.float32)
    offset = tl.arange(0, BK)
    for first in tl.range(0, K, BK):
        column = first + offset
        # Weights are read once: they leave the cache to what is read again.
        weight = tl.load(
            at + column[None, :],
            mask=inside[:, None] & (column < K)[None, :],
            other=0.0,
            eviction_policy="evict_first",
        )
        x = tl.load(x_ptr + column, mask=column < K, other=0.0)
        total += weight.to(tl.float32) * x.to(tl.float32)[None, :]
    return tl.sum(total, 1)


@triton.jit
def one_row_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SILU: tl.constexpr,
):
    """Program (block of BN outputs): out = weight x. SILU: weight is [gate | up], 2 N rows, and
    out = silu(gate x) * (up x)."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < N
    at = weight_ptr + row.to(tl.int64)[:, None] * K
    result = _rows_dot(at, x_ptr, inside, K, BN, BK)
    if SILU:
        # Rounded between, as the two kernels that this one replaces would.
        kind = out_ptr.dtype.element_ty
        gate = result.to(kind).to(tl.float32)
        up_at = at + tl.full([], N, tl.int64) * K
        up = _rows_dot(up_at, x_ptr, inside, K, BN, BK).to(kind).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + row, result.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _load_weight(at, inside, WHOLE: tl.constexpr):
    """A tile of what is read once, see above."""
    if WHOLE:
        tile = tl.load(at, eviction_policy="evict_first")
    else:
        tile = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first")
    return tile


@triton.jit
def few_rows_linear_kernel(
    x_ptr,
    weight_ptr,
    out_ptr,
    num_rows,
    stride_x,
    N: tl.constexpr,
    K: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    SILU: tl.constexpr,
):
    """Program (block of BN outputs): out^T = weight x^T for up to BM rows. The weights are the tall
    operand of the matrix unit, so few rows of x waste little of it. SILU as above."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    member = tl.arange(0, BM)
    offset = tl.arange(0, BK)
    inside = row < N
    live = member < num_rows
    whole: tl.constexpr = (N % BN == 0) & (K % BK == 0)
    at = weight_ptr + row.to(tl.int64)[:, None] * K + offset[None, :]
    up_at = at + tl.full([], N, tl.int64) * K
    x_at = x_ptr + member.to(tl.int64)[:, None] * stride_x + offset[None, :]
    result = tl.zeros([BN, BM], dtype=tl.float32)
    up = tl.zeros([BN, BM], dtype=tl.float32)
    for first in tl.range(0, K, BK, num_stages=STAGES):
        column = (first + offset < K)[None, :]
        x = tl.load(x_at + first, mask=live[:, None] & column, other=0.0)
        weight = _load_weight(at + first, inside[:, None] & column, whole)
        result = tl.dot(weight, tl.trans(x), result, input_precision="ieee")
        if SILU:
            weight = _load_weight(up_at + first, inside[:, None] & column, whole)
            up = tl.dot(weight, tl.trans(x), up, input_precision="ieee")
    kind = out_ptr.dtype.element_ty
    if SILU:
        # Rounded between, as the two kernels that this one replaces would.
        gate = result.to(kind).to(tl.float32)
        result = gate * tl.sigmoid(gate) * up.to(kind).to(tl.float32)
    out_at = out_ptr + member.to(tl.int64)[None, :] * N + row[:, None]
    tl.store(out_at, result.to(kind), mask=inside[:, None] & live[None, :])
