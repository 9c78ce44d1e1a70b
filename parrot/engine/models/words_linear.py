"""Matrices of codes on a GPU."""

import torch
import torch.nn.functional as F

from parrot.engine.kernels.linear.words_layout import Words, block_of, has_words, width_of
from parrot.engine.models.codes import CodedMatrix

_MOST_ZERO = 16
_ROUNDING = 2**-11  # Of the largest number that a row can hold: the error of rounded factors.


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
    float16. A number then differs by at most 2^-11 of the largest number that its row can hold."""
    bits, group = matrix.bits, matrix.group
    found = _factors(matrix) if has_words(bits, group) else None
    if found is None:
        return None
    factors, has_half_scales, has_least = found
    size, block = matrix.codes.shape[1], block_of(bits, group)
    num_blocks = -(-size // block)
    factors = factors.repeat_interleave(max(1, group // block), 1)
    num_groups = num_blocks * (block // min(group, block))
    factors = F.pad(factors, (0, num_groups - factors.shape[1]))
    codes = F.pad(matrix.codes, (0, num_blocks * block - size))
    parts = codes.view(len(codes), num_blocks, -1, width_of(group)).to(torch.int16)
    words = torch.zeros_like(parts[:, :, 0])
    for index in range(parts.shape[2]):
        words |= (parts[:, :, index] & (1 << bits) - 1) << (bits * index)
    words = words.transpose(0, 1).contiguous()
    return Words(words, factors.t().contiguous(), size, bits, has_half_scales, has_least)


def matrix_of(words: Words) -> CodedMatrix:
    """The reverse of `words_of`."""
    blocks, bits = words.words.transpose(0, 1).unsqueeze(2), words.bits
    parts = [blocks << (16 - bits - bits * index) for index in range(words.num_codes)]
    high = torch.cat(parts, 2).flatten(1)[:, : words.inputs] >> (16 - bits)
    codes = (high & 15).to(torch.uint8) if bits == 4 else high.to(torch.int8)
    factors = words.factors.t()[:, : words.inputs // words.group].contiguous()
    kind = torch.float16 if words.has_half_scales else torch.bfloat16
    scales = (factors & 0xFFFF).to(torch.int16).view(kind).float()
    if words.has_least:
        least = (factors >> 16).to(torch.int16).view(kind).float()
        return CodedMatrix(codes.contiguous(), scales, least)
    zeros = -128 - (factors & -65536).view(torch.float32) if bits == 4 else torch.zeros_like(scales)
    return CodedMatrix.with_zeros(codes.contiguous(), scales, zeros)


def _factors(matrix: CodedMatrix) -> tuple[torch.Tensor, bool, bool] | None:
    """Factors int32 [outputs, groups], whether they are float16, and `Words.has_least`."""
    scales, least = matrix.scales, matrix.least
    upper = _zeros(matrix)
    has_least = upper is None
    parts = [scales, least] if upper is None else [scales]
    kinds = (torch.float16, torch.bfloat16)
    kind = next((x for x in kinds if all(_is_exact(part, x) for part in parts)), torch.float16)
    largest = 15 if matrix.bits == 4 else 128
    error = (scales.to(kind).float() - scales).abs() * largest
    if upper is None:
        upper = least.to(kind).view(torch.int16).to(torch.int32) << 16
        error += (least.to(kind).float() - least).abs()
    most = (scales.abs() * largest + least.abs()).amax(1, keepdim=True)
    if not bool((error <= _ROUNDING * most).all()):
        return None
    low = scales.to(kind).view(torch.int16).to(torch.int32) & 0xFFFF
    return upper | low, kind is torch.float16, has_least


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
