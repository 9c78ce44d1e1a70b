"""Copies of few numbers between pinned memory and the GPU, by a kernel.

Between two kernels of a stream, a copy of the driver starts 5 to 9 us after the first kernel, and
another kernel 1 to 2 us after it (one H200)."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl

_BLOCK = 1024  # Numbers that a program copies.


# One variant for all numbers of tokens, wherever they are.
@triton.jit(
    do_not_specialize=["count", "num_tokens"],
    do_not_specialize_on_alignment=["source", "target", "known"],
)
def copy_numbers_kernel(
    source, target, known, count, num_tokens, BLOCK: tl.constexpr, HAS_KNOWN: tl.constexpr
):
    """Program (block of BLOCK numbers): target[:count] = source[:count]. See `copy_numbers`."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = tl.load(source + index, mask=index < count, other=0)
    if HAS_KNOWN:
        is_pending = (index < num_tokens) & (number < 0)
        token = tl.load(known - 1 - number, mask=is_pending, other=0)
        # The token of a failed job is -1. Its row is unused, so any valid token will do.
        number = tl.where(is_pending, tl.maximum(token, 0), number)
    tl.store(target + index, number, mask=index < count)


def copy_numbers(
    source: torch.Tensor,
    target: torch.Tensor,
    count: int,
    known: torch.Tensor | None = None,
    num_tokens: int = 0,
) -> None:
    """Copy the first `count` numbers, int32. Both tensors are in pinned memory or on the GPU.

    `known`: tokens int32 on the GPU. A number n < 0 among the first `num_tokens` is then replaced
    by known[-1 - n], or by 0 if that is -1."""
    assert source.dtype == target.dtype == torch.int32, (source.dtype, target.dtype)
    assert source.is_contiguous()
    assert target.is_contiguous()
    if not count:
        return
    copy_numbers_kernel[(triton.cdiv(count, _BLOCK),)](
        source,
        target,
        known,
        count,
        num_tokens,
        BLOCK=_BLOCK,
        HAS_KNOWN=known is not None,
        num_warps=4,
    )
