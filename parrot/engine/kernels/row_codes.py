"""Rounds rows to e4m3 with a power of two each, for products of many rows."""
# mypy: disable-error-code="no-untyped-def, no-untyped-call, untyped-decorator"

import torch
import triton
import triton.language as tl

from parrot.engine.kernels.e4m3 import bits_of, exponent_of, float8_of, inverse_of, power_of


@triton.jit
def row_codes_kernel(
    x_ptr, codes_ptr, powers_ptr, stride_x, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row): codes = x / power in e4m3."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < SIZE
    x = tl.load(x_ptr + row * stride_x + column, mask=inside, other=0.0).to(tl.float32)
    exponent = exponent_of(tl.max(bits_of(x), 0))
    tl.store(codes_ptr + row * SIZE + column, float8_of(x * inverse_of(exponent)), mask=inside)
    tl.store(powers_ptr + row, power_of(exponent))


def row_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] -> e4m3 [rows, size] and powers of two, float32 [rows, 1]."""
    rows, size = x.shape
    assert x.stride(1) == 1
    codes = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=x.device)
    powers = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(size)
    row_codes_kernel[(rows,)](
        x,
        codes,
        powers,
        x.stride(0),
        SIZE=size,
        BLOCK=block,
        num_warps=min(max(block // 1024, 1), 8),
    )
    return codes, powers
