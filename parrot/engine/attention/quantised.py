"""KV in e4m3: a byte for each number, and a power of two for each token and head.

A row of numbers (one token's key or value of one head) is divided by the least power of two that
brings its largest number to 448 or below, and rounded to e4m3. Since e4m3 has exponents of its own,
a power of two serves as well as an exact maximum would: what it costs is at the small end only,
where numbers below a 28,672nd of the largest lose bits. In return nothing else is ever rounded: the
exponent is one byte, numbers come back exactly in float32 and bfloat16, and every backend gets the
same bits. Nothing has to be calibrated.
"""

from dataclasses import dataclass

import torch

_INFINITY = 0x7F800000
_LEAST_EXPONENT = 87
_NOT_FINITE = 255


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., size] -> uint8 codes [..., size], and uint8 exponents plus 127 [...]; a row with a
    number that is not finite has exponent 255."""
    wide = x.float()
    largest = wide.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(-1)
    exponents = (((largest + 0x1FFFFF) >> 23) - 8).clamp_(min=_LEAST_EXPONENT)
    exponents.masked_fill_(largest >= _INFINITY, _NOT_FINITE)
    inverse = ((254 - exponents).clamp_(min=0) << 23).view(torch.float32)
    codes = (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, exponents.to(torch.uint8)


def dequantise(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers that `quantise` left; not finite in rows that were not."""
    power = (exponents.to(torch.int32) << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float().mul_(power.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class PooledKV:
    """A pool of KV: `numbers` [..., block_size, head_dim], of type `dtype`; or codes, with
    `exponents` [..., block_size]. Attention gets `dtype` in any case."""

    numbers: torch.Tensor
    exponents: torch.Tensor | None
    dtype: torch.dtype

    @classmethod
    def plain(cls, numbers: torch.Tensor) -> "PooledKV":
        return cls(numbers, None, numbers.dtype)
