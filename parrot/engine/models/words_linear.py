"""Matrices of four bits on a GPU."""

import torch
import torch.nn.functional as F

from parrot.engine.kernels.linear.words_layout import BLOCK, CODES, Words
from parrot.engine.models.codes import CodedMatrix

_GROUPS = (32, 64, 128)
_MOST_ZERO = 16


class WordsLinear:
    """`layers.Linear` with a weight of four bits on a GPU."""

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


def has_words(group: int) -> bool:
    """Whether the layout has groups of this size."""
    return group in _GROUPS or group % BLOCK == 0


def words_of(matrix: CodedMatrix) -> Words | None:
    """The same numbers; None if the layout cannot hold them exactly."""
    found, group = _factors(matrix), matrix.group
    if found is None or not has_words(group):
        return None
    factors, has_half_scales = found
    size = matrix.codes.shape[1]
    num_blocks = -(-size // BLOCK)
    factors = factors.repeat_interleave(max(1, group // BLOCK), 1)
    num_groups = num_blocks * (BLOCK // min(group, BLOCK))
    factors = F.pad(factors, (0, num_groups - factors.shape[1]))
    codes = F.pad(matrix.codes, (0, num_blocks * BLOCK - size))
    parts = codes.view(len(codes), num_blocks, CODES, -1).to(torch.int16)
    words = parts[:, :, 0].clone()
    for index in range(1, CODES):
        words |= parts[:, :, index] << (4 * index)
    words = words.transpose(0, 1).contiguous()
    return Words(words, factors.t().contiguous(), size, has_half_scales)


def matrix_of(words: Words) -> CodedMatrix:
    """The reverse of `words_of`."""
    blocks = words.words.transpose(0, 1).unsqueeze(2)
    parts = [blocks >> (4 * index) & 15 for index in range(CODES)]
    codes = torch.cat(parts, 2).flatten(1).to(torch.uint8)[:, : words.inputs]
    factors = words.factors.t()[:, : words.inputs // words.group].contiguous()
    low = (factors & 0xFFFF).to(torch.int16)
    scales = low.view(torch.float16 if words.has_half_scales else torch.bfloat16)
    return CodedMatrix.with_zeros(codes.contiguous(), scales, -128 - _high_halves(factors))


def _high_halves(factors: torch.Tensor) -> torch.Tensor:
    return (factors & -65536).view(torch.float32)


def _factors(matrix: CodedMatrix) -> tuple[torch.Tensor, bool] | None:
    """Factors int32 [outputs, groups], and whether the scales are float16."""
    scales, least = matrix.scales, matrix.least
    zeros = (-least / torch.where(scales == 0, 1, scales)).round()
    if not torch.equal(zeros * scales, -least) or not bool(
        ((zeros >= 0) & (zeros <= _MOST_ZERO)).all()
    ):
        return None
    kind = next((x for x in (torch.float16, torch.bfloat16) if _is_exact(scales, x)), None)
    if kind is None:
        return None
    low = scales.to(kind).view(torch.int16).to(torch.int32) & 0xFFFF
    return (-128 - zeros).view(torch.int32) | low, kind is torch.float16


def _is_exact(numbers: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(numbers.to(dtype).float(), numbers)
