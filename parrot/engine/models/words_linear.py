"""Matrices of codes on a GPU."""

from typing import NamedTuple

import torch
import torch.nn.functional as F

from parrot.engine.kernels.linear.words_layout import Words, block_of, has_words, width_of
from parrot.engine.models.codes import CodedMatrix

_MOST_ZERO = 16
_ROUNDING = 2**-11  # Of the largest number that a group can hold: the error of rounded factors.
# Factors of GGUF files are float16 times a whole number: 2^-24 or more. Times 2^10 they are normal
# numbers of float16.
_SHIFT = 10


class WordsLinear:
    """`layers.Linear` with a weight of codes on a GPU."""

    def __init__(self, matrix: Words, bias: torch.Tensor | None) -> None:
        self.matrix = matrix
        self.bias = bias

    def __call__(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if x.device.type == "cpu":
            out = F.linear(x, matrix_of(self.matrix).numbers().to(x.dtype), self.bias)
        else:
            from parrot.engine.models.words_weights import words_product  # Imports Triton.

            out = words_product(x, self.matrix, self.bias)
        return out if residual is None else out.add_(residual)


def words_of(matrix: CodedMatrix) -> Words | None:
    """The matrix in the layout of the kernels; None if the layout cannot hold it.

    The numbers are the same if 16 bits hold their factors. Otherwise the factors are rounded to
    float16. A number then differs by at most 2^-11 of the largest number that its group can hold.
    """
    bits, group = matrix.bits, matrix.group
    found = _factors(matrix) if has_words(bits, group) else None
    if found is None:
        return None
    size, block = matrix.codes.shape[1], block_of(bits, group)
    num_blocks = -(-size // block)
    factors = found.factors.repeat_interleave(max(1, group // block), 1)
    num_groups = num_blocks * (block // min(group, block))
    factors = F.pad(factors, (0, num_groups - factors.shape[1]))
    codes = F.pad(matrix.codes, (0, num_blocks * block - size))
    parts = codes.view(len(codes), num_blocks, -1, width_of(group)).to(torch.int16)
    words = torch.zeros_like(parts[:, :, 0])
    for index in range(parts.shape[2]):
        words |= (parts[:, :, index] & (1 << bits) - 1) << (bits * index)
    words = words.transpose(0, 1).contiguous()
    factors = factors.t().contiguous()
    return Words(words, factors, size, bits, found.are_half, found.have_least, found.shift)


def matrix_of(words: Words) -> CodedMatrix:
    """The reverse of `words_of`."""
    blocks, bits = words.words.transpose(0, 1).unsqueeze(2), words.bits
    parts = [blocks << (16 - bits - bits * index) for index in range(words.num_codes)]
    high = torch.cat(parts, 2).flatten(1)[:, : words.inputs] >> (16 - bits)
    codes = (high & 15).to(torch.uint8) if bits == 4 else high.to(torch.int8)
    factors = words.factors.t()[:, : words.inputs // words.group].contiguous()
    kind = torch.float16 if words.has_half_scales else torch.bfloat16
    unit = 2.0**-words.shift
    scales = (factors & 0xFFFF).to(torch.int16).view(kind).float() * unit
    if words.has_least:
        least = (factors >> 16).to(torch.int16).view(kind).float() * unit
        return CodedMatrix(codes.contiguous(), scales, least)
    zeros = -128 - (factors & -65536).view(torch.float32) if bits == 4 else torch.zeros_like(scales)
    return CodedMatrix.with_zeros(codes.contiguous(), scales, zeros)


class _Factors(NamedTuple):
    """Factors int32 [outputs, groups]. The other fields are those of `Words`."""

    factors: torch.Tensor
    are_half: bool
    have_least: bool
    shift: int


def _factors(matrix: CodedMatrix) -> _Factors | None:
    upper = _zeros(matrix)
    parts = [matrix.scales, matrix.least] if upper is None else [matrix.scales]
    kinds = (torch.float16, torch.bfloat16)
    exact = next((x for x in kinds if all(_is_exact(part, x) for part in parts)), None)
    kind, shift = (torch.float16, _SHIFT) if exact is None else (exact, 0)
    scales, *least = [(part * 2**shift).to(kind) for part in parts]
    if exact is None and not _is_close(matrix, scales, *least):
        return None
    if upper is None:
        upper = least[0].view(torch.int16).to(torch.int32) << 16
    low = scales.view(torch.int16).to(torch.int32) & 0xFFFF
    return _Factors(upper | low, kind is torch.float16, bool(least), shift)


def _is_close(matrix: CodedMatrix, scales: torch.Tensor, least: torch.Tensor | None = None) -> bool:
    """Whether numbers with shifted and rounded factors are within the bound of `words_of`."""
    largest, unit = 15 if matrix.bits == 4 else 128, 2.0**-_SHIFT
    error = (scales.float() * unit - matrix.scales).abs() * largest
    if least is not None:
        error += (least.float() * unit - matrix.least).abs()
    most = matrix.scales.abs() * largest + matrix.least.abs()
    return bool((error <= _ROUNDING * most).all())


def _zeros(matrix: CodedMatrix) -> torch.Tensor | None:
    """The upper halves of factors for whole zeros; None if an offset is none.

    Codes of four bits have -128 - zero in bfloat16, and codes of eight bits have no zero."""
    scales, least = matrix.scales, matrix.least
    if matrix.bits == 8:
        return None if bool(least.any()) else torch.zeros_like(least, dtype=torch.int32)
    zeros = (-least / torch.where(scales == 0, 1, scales)).round()
    is_whole = (zeros * scales == -least) & (zeros >= 0) & (zeros <= _MOST_ZERO)
    return (-128 - zeros).view(torch.int32) if bool(is_whole.all()) else None


def _is_exact(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(numbers.to(dtype).float(), numbers)
