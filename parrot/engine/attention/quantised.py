"""KV in e4m3: one byte per number, and a power of two per token and head.

A row is one token's key or value of one head. It is divided by the smallest power of two that
brings its largest number to 448 or below, and rounded to e4m3. A power of two loses hardly more
than an exact maximum, because e4m3 has exponents of its own. Only numbers smaller than 1/28,672 of
the row's largest lose bits. The exponent takes one byte, stored numbers are exact in float32 and
bfloat16, all backends get the same bits, and no calibration is necessary.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch

_INFINITY = 0x7F800000  # The bits of infinity in float32.
_LEAST_EXPONENT = 87  # Smallest exponent of a row, plus 127.
_NOT_FINITE = 255  # Exponent of a row with a number that is not finite.


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [..., size] -> uint8 codes [..., size], and exponents plus 127, uint8 [...].

    A row with a number that is not finite gets exponent 255."""
    wide = x.float()
    largest = wide.view(torch.int32).bitwise_and(0x7FFFFFFF).amax(-1)
    exponents = (((largest + 0x1FFFFF) >> 23) - 8).clamp_(min=_LEAST_EXPONENT)
    exponents.masked_fill_(largest >= _INFINITY, _NOT_FINITE)
    inverse = ((254 - exponents).clamp_(min=0) << 23).view(torch.float32)
    codes = (wide * inverse.unsqueeze(-1)).to(torch.float8_e4m3fn).view(torch.uint8)
    return codes, exponents.to(torch.uint8)


def dequantise(codes: torch.Tensor, exponents: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The numbers of codes and exponents from `quantise`. Rows with exponent 255 are not finite."""
    power = (exponents.to(torch.int32) << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn).float().mul_(power.unsqueeze(-1)).to(dtype)


@dataclass(frozen=True, slots=True)
class PooledKV:
    """A KV pool, plain or quantised."""

    numbers: torch.Tensor  # [..., block_size, head_dim]: numbers of type `dtype`, or codes.
    exponents: torch.Tensor | None  # uint8 [..., block_size] of a quantised pool.
    dtype: torch.dtype  # The type in which attention gets the numbers.

    @classmethod
    def plain(cls, numbers: torch.Tensor) -> "PooledKV":
        return cls(numbers, None, numbers.dtype)


class PooledLayers(NamedTuple):
    """Layers of a model whose KV is in one pool."""

    layers: tuple[int, ...]  # In the order of the pool.
    pool: PooledKV
    in_slots: bool = False  # Their block tables have the window slots of the blocks.
