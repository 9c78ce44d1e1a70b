"""Matrices of codes, with a scale and an offset for each group of columns."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import gcd

import torch


@dataclass(frozen=True, slots=True)
class CodeFormat:
    """How a matrix of codes is kept on a GPU."""

    bits: int  # Of a code.
    group: int  # Inputs with one scale.

    def joined(self, other: "CodeFormat") -> "CodeFormat":
        """The format of `CodedMatrix.joined`."""
        return CodeFormat(max(self.bits, other.bits), gcd(self.group, other.group))


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
