"""Rows in e4m3 with a power of two each, and the rows that products in e4m3 read."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from parrot.engine.kernels.e4m3 import coded
from parrot.engine.kernels.launch import early_launch, starts_early


@dataclass(frozen=True, slots=True)
class CodedRows:
    """Rows [tokens, size] as codes in e4m3 times powers of two, float32 [tokens, 1].

    `dtype` is the type before."""

    codes: torch.Tensor
    powers: torch.Tensor
    dtype: torch.dtype

    @classmethod
    def empty(cls, like: torch.Tensor, size: int) -> "CodedRows":
        """Uninitialized rows, as many as in `like`."""
        codes = like.new_empty((len(like), size), dtype=torch.float8_e4m3fn)
        return cls(codes, like.new_empty((len(like), 1), dtype=torch.float32), like.dtype)


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors that a product in e4m3 has yet to be multiplied by: number [r, c] by powers[r, 0]
    and scales[c].

    `powers` float32 [tokens, 1], powers of two; `scales` float32 [outputs]"""

    powers: torch.Tensor
    scales: torch.Tensor


@triton.jit
def row_codes_kernel(
    x_ptr,
    codes_ptr,
    powers_ptr,
    stride_x,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Program (row): x = codes * power, rounded.

    DEPENDENT  the previous kernel, which writes x, may still run"""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    if DEPENDENT:
        gdc_wait()
        gdc_launch_dependents()
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0)
    codes, power = coded(x)
    tl.store(codes_ptr + row * SIZE + column, codes, mask=inside)
    tl.store(powers_ptr + row, power)


def row_codes(x: torch.Tensor) -> CodedRows:
    """x [rows, size] in e4m3."""
    rows, size = x.shape
    assert x.stride(1) == 1
    found = CodedRows.empty(x, size)
    block = triton.next_power_of_2(size)
    row_codes_kernel[(rows,)](
        x,
        found.codes,
        found.powers,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 1024, 1), 8),
        **early_launch(starts_early(x.device)),
    )
    return found
