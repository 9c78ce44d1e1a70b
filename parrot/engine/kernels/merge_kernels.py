"""Merges the results of several attention items for one token. `tree_attention` launches it."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.attention_kernels import NO_MAXIMUM, NO_SCORE


@triton.jit
def merge_partials(
    partial_out,
    partial_lse,
    slot_indptr,
    out_ptr,
    lse_ptr,
    H: tl.constexpr,
    D: tl.constexpr,
    SLOTS: tl.constexpr,
    WITH_LSE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (token, head): the log-sum-exp weighted mean of the token's partial results, which
    lie in a row, SLOTS at a time. Tokens without slots were written directly and are left alone.
    DEPENDENT: the kernel before, which wrote the partial results, may still run."""
    token = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(slot_indptr + token)
    end = tl.load(slot_indptr + token + 1)
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    if start >= end:
        return
    offs_d = tl.arange(0, D)
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
    row = token.to(tl.int64) * H + head
    tl.store(out_ptr + row * D + offs_d, (acc / total).to(out_ptr.dtype.element_ty))
    if WITH_LSE:
        tl.store(lse_ptr + row, maximum + tl.log2(total))
