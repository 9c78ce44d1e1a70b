"""Device functions that the kernels of matrix products share: all steps except the product."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def gated(gate, up, KIND: tl.constexpr):
    """silu(gate) * up. Both are rounded first, as separate kernels would round them."""
    gate = gate.to(KIND).to(tl.float32)
    return gate * tl.sigmoid(gate) * up.to(KIND).to(tl.float32)


@triton.jit
def add_to_residual(result, before, residual_at, inside, KIND: tl.constexpr):
    """Add to the residual and store it. Returns the sum and its squares, in float32."""
    # Rounded as stored, because the next layer reads the rounded value.
    total = (result + before.to(tl.float32)).to(KIND)
    tl.store(residual_at, total, mask=inside)
    total = total.to(tl.float32)
    return total, tl.where(inside, total * total, 0.0)


@triton.jit
def head_and_outputs(D: tl.constexpr, BN: tl.constexpr):
    """The head of a program, BN // 2 dimensions in the head's first half, and its BN outputs.

    The outputs are these dimensions, and the dimensions of the second half that rotate with them.
    """
    HALF: tl.constexpr = BN // 2
    head = tl.program_id(0) // (D // BN)
    first = tl.program_id(0) % (D // BN) * HALF
    index = tl.arange(0, BN)
    row = head * D + first + index % HALF + index // HALF * (D // 2)
    return head, first + tl.arange(0, HALF), row


@triton.jit
def places(
    member,
    live,
    dim,
    positions,
    table_rows,
    tables,
    cos_sin,
    stride_page,
    stride_table,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """Return for each row: whether it has a block table, the offset of its key of the first head in
    the cache, and the cosines and sines [dims, rows] of its position."""
    table_row = tl.load(table_rows + member, mask=live, other=-1)
    placed = table_row >= 0
    position = tl.load(positions + member, mask=placed, other=0)
    angle_at = cos_sin + position[None, :] * D + dim[:, None]
    cos = tl.load(angle_at, mask=placed[None, :], other=0.0)
    sin = tl.load(angle_at + D // 2, mask=placed[None, :], other=0.0)
    page = tl.load(tables + table_row * stride_table + position // PAGE, mask=placed, other=0)
    return placed, page.to(tl.int64) * stride_page + position % PAGE * D, cos, sin


@triton.jit
def rotate_and_store(
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
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    PAGE: tl.constexpr,
):
    """`rope_and_store_kernel` for one head's outputs [BN, rows].

    Writes q to q_ptr [rows, H, D], and k and v to the cache. The other arguments are the results of
    `head_and_outputs` and `places`."""
    # Rounded before the rotation, as separate kernels would round.
    kind = q_ptr.dtype.element_ty
    halves = tl.reshape(result.to(kind).to(tl.float32), [2, dim.shape[0], member.shape[0]])
    y1, y2 = tl.split(tl.permute(halves, (1, 2, 0)))
    r1 = y1 * cos - y2 * sin
    r2 = y2 * cos + y1 * sin
    if head < H:
        q_at = q_ptr + (member.to(tl.int64)[None, :] * H + head) * D + dim[:, None]
        tl.store(q_at, r1.to(kind), mask=placed[None, :])
        tl.store(q_at + D // 2, r2.to(kind), mask=placed[None, :])
    else:
        offset = (place + (head - H) % HKV * (PAGE * D))[None, :] + dim[:, None]
        if head < H + HKV:
            tl.store(k_cache + offset, r1.to(kind), mask=placed[None, :])
            tl.store(k_cache + offset + D // 2, r2.to(kind), mask=placed[None, :])
        else:
            tl.store(v_cache + offset, y1.to(kind), mask=placed[None, :])
            tl.store(v_cache + offset + D // 2, y2.to(kind), mask=placed[None, :])
