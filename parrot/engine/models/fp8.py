"""Weights in e4m3: one byte per number, and a factor per output, or per block of 128 x 128.

Rows of activations are rounded to e4m3 as well, with a power of two each
(`attention.quantised.quantise`). Products of few and of many rows compute the same function, so an
output does not depend on how its prompt was cut. The factors of a checkpoint are any float32
numbers. Weights that are rounded here get powers of two, so their numbers are exact in bfloat16."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import torch
import torch.nn.functional as F

from parrot.engine.attention.quantised import quantise

BLOCK = 128  # Outputs and inputs of a block with one factor.
ALIGNMENT = 16  # The matrix products on a GPU need inputs and outputs in multiples of this.


@dataclass(frozen=True, slots=True)
class Fp8Matrix:
    """A matrix whose number [r, c] is codes[r, c] * scales[r], or times scales[r / 128, c / 128].

    `codes` e4m3 [outputs, inputs]; `scales` float32 [outputs], or [outputs / 128, inputs / 128]
    without a rest."""

    codes: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def of(cls, numbers: torch.Tensor) -> "Fp8Matrix":
        """Round each row to e4m3 with a power of two."""
        codes, powers = _rounded(numbers)
        return cls(codes, powers.squeeze(1))

    @classmethod
    def joined(cls, parts: "Sequence[Fp8Matrix]") -> "Fp8Matrix":
        """Concatenate the rows of all parts."""
        codes = torch.cat([part.codes.view(torch.uint8) for part in parts])
        return cls(codes.view(torch.float8_e4m3fn), torch.cat([part.scales for part in parts]))

    def numbers(self) -> torch.Tensor:
        """The numbers, float32 [outputs, inputs]."""
        numbers = self.codes.float()
        if not self.is_blocked:
            return numbers.mul_(self.scales.unsqueeze(1))
        blocks = numbers.view(len(self.scales), BLOCK, -1, BLOCK)
        return blocks.mul_(self.scales[:, None, :, None]).view_as(numbers)

    @property
    def is_blocked(self) -> bool:
        """Whether blocks have factors, and not outputs."""
        return self.scales.dim() == 2

    @property
    def num_bytes(self) -> int:
        return self.codes.numel() + 4 * self.scales.numel()


class Fp8Linear:
    """`layers.Linear` with a weight in e4m3."""

    def __init__(self, matrix: Fp8Matrix, bias: torch.Tensor | None) -> None:
        self.matrix = matrix
        self.bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        out = fp8_product(*row_codes(x), self.matrix, self.bias, x.dtype)
        return out if residual is None else out.add_(residual)


def fp8_product(
    codes: torch.Tensor,
    powers: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Rows from `row_codes` times the weight, plus bias [rows, outputs]."""
    if matrix.is_blocked:
        return _block_product(codes, powers, matrix, bias, dtype)
    if codes.device.type == "cpu":
        product = unscaled_product(codes, matrix.codes, torch.float32)
        product = product.mul_(powers).mul_(matrix.scales)
        return (product if bias is None else product.add_(bias)).to(dtype)
    return torch._scaled_mm(
        codes,
        matrix.codes.t(),
        powers,
        matrix.scales.unsqueeze(0),
        bias,
        out_dtype=dtype,
        use_fast_accum=True,  # Sums of 14 bits, whose error is far below that of e4m3.
    )


def unscaled_product(codes: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes [rows, inputs] times codes [outputs, inputs], both in e4m3, without factors."""
    if codes.device.type == "cpu":
        return (codes.float() @ weight.float().t()).to(dtype)
    one = _one(codes.device)
    return torch._scaled_mm(codes, weight.t(), one, one, out_dtype=dtype, use_fast_accum=True)


@cache
def _one(device: torch.device) -> torch.Tensor:
    return torch.ones((), dtype=torch.float32, device=device)


def _block_product(
    codes: torch.Tensor,
    powers: torch.Tensor,
    matrix: Fp8Matrix,
    bias: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    if codes.device.type == "cpu":
        product = (codes.float() @ matrix.numbers().t()).mul_(powers).to(dtype)
    else:
        # cuBLAS needs a factor for each 128 inputs of a row, with those of all rows contiguous and
        # aligned.
        rows = len(codes)
        padding = (0, 0, 0, -rows % ALIGNMENT)
        if padding[-1]:
            codes = F.pad(codes.view(torch.uint8), padding).view(torch.float8_e4m3fn)
            powers = F.pad(powers, padding)
        factors = powers.t().expand(matrix.scales.shape[1], -1).contiguous().t()
        scales = matrix.scales.t()
        product = torch._scaled_mm(codes, matrix.codes.t(), factors, scales, out_dtype=dtype)
        product = product[:rows]
    return product if bias is None else product.add_(bias)


def row_codes(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """x [rows, size] -> e4m3 [rows, size] and powers of two, float32 [rows, 1]."""
    if x.device.type != "cpu":
        from parrot.engine.kernels import row_codes as kernels  # Imports Triton.

        found = kernels.row_codes(x)
        return found.codes, found.powers
    return _rounded(x)


def _rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    codes, exponents = quantise(x)
    powers = (exponents.to(torch.int32) << 23).view(torch.float32)
    return codes.view(torch.float8_e4m3fn), powers.unsqueeze(1)


def unaligned(shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """Which of the matrices the products of a GPU cannot have; None if they can have all."""
    for name, shape in shapes.items():
        if any(size % ALIGNMENT for size in shape):
            return (
                f"needs matrices with sizes in multiples of {ALIGNMENT}, and {name} is "
                f"{list(shape)}"
            )
    return None
