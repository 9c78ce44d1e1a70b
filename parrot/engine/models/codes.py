"""Matrices of codes, with a scale and an offset for each group of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch

_INT8_GROUPS = (64, 32, 16)
_LARGEST_CODE = 127
_SLICE = 4096  # Rows that `CodedMatrix.rounded` rounds at once.


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How a matrix of codes is kept on a GPU."""

    bits: int  # Of a code.
    group: int  # Inputs with one scale.

    def joined(self, other: "CodeFormat") -> "CodeFormat":
        """The format of `CodedMatrix.joined`."""
        return CodeFormat(max(self.bits, other.bits), gcd(self.group, other.group))

    @classmethod
    def int8(cls, inputs: int) -> "CodeFormat | None":
        """The format of `CodedMatrix.rounded`; None if 16 does not divide the inputs."""
        group = next((size for size in _INT8_GROUPS if inputs % size == 0), None)
        return None if group is None else cls(8, group)


@dataclass(frozen=True, slots=True)
class CodedMatrix:
    """A matrix whose number [r, c] is codes[r, c] * scales[r, c / group] + least[r, c / group].

    `codes` [rows, columns] uint8 below 16, or int8; `scales` and `least` float32 [rows, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    least: torch.Tensor

    @classmethod
    def with_zeros(
        cls, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor
    ) -> "CodedMatrix":
        """The matrix of (codes - zeros) * scales, for zeros of up to 16.

        Exact for scales of 16 bits."""
        scales = scales.float()
        return cls(codes, scales, scales * -zeros.float())

    @classmethod
    def rounded(cls, numbers: torch.Tensor) -> "CodedMatrix":
        """Numbers of any type [rows, columns] in int8, in groups of `CodeFormat.int8`.

        bfloat16 holds each scale: the largest number of the group / 127, rounded. A number changes
        by at most half a scale. Raises `ValueError` if 16 does not divide the columns."""
        rows, columns = numbers.shape
        kind = CodeFormat.int8(columns)
        if kind is None:
            raise ValueError(f"16 does not divide {columns} columns")
        codes = torch.empty_like(numbers, dtype=torch.int8, memory_format=torch.contiguous_format)
        shape = rows, columns // kind.group
        scales = torch.empty(shape, dtype=torch.float32, device=numbers.device)
        for first in range(0, rows, _SLICE):  # A large matrix in float32 may not fit in memory.
            part = slice(first, first + _SLICE)
            groups = numbers[part].float().reshape(-1, columns // kind.group, kind.group)
            scale = (groups.abs().amax(2) / _LARGEST_CODE).to(torch.bfloat16).float()
            scales[part] = scale
            scale = scale.masked_fill(scale == 0, 1.0).unsqueeze(2)
            # Codes of groups with a subnormal scale may be larger.
            limited = (groups / scale).round_().clamp_(-_LARGEST_CODE, _LARGEST_CODE)
            codes[part] = limited.flatten(1).to(torch.int8)
        return cls(codes, scales, torch.zeros_like(scales))

    @property
    def bits(self) -> int:
        """Bits of a code: 4 or 8."""
        return 4 if self.codes.dtype is torch.uint8 else 8

    @property
    def group(self) -> int:
        """The number of columns with one scale."""
        return self.codes.shape[1] // self.scales.shape[1]

    def numbers(self) -> torch.Tensor:
        """The numbers, float32 [rows, columns], exactly as ggml computes them."""
        rows, columns = self.codes.shape
        numbers = self.codes.float().view(rows, -1, self.group)
        numbers.mul_(self.scales.unsqueeze(-1)).add_(self.least.unsqueeze(-1))
        return numbers.view(rows, columns)

    @classmethod
    def joined(cls, parts: "Sequence[CodedMatrix]") -> "CodedMatrix":
        """Concatenate the rows of all parts, with the widest codes and a size of groups that
        divides all others."""
        if len(parts) == 1:
            return parts[0]
        group = gcd(*(part.group for part in parts))
        widest = max(parts, key=lambda part: part.bits).codes.dtype

        def spread(factors: torch.Tensor, part: "CodedMatrix") -> torch.Tensor:
            return factors.repeat_interleave(part.group // group, 1)

        codes = torch.cat([part.codes.to(widest) for part in parts])
        scales = torch.cat([spread(part.scales, part) for part in parts])
        return cls(codes, scales, torch.cat([spread(part.least, part) for part in parts]))

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "CodedMatrix":
        """Apply `change` to the rows. It receives and returns tensors [rows, any]."""
        return CodedMatrix(change(self.codes), change(self.scales), change(self.least))
