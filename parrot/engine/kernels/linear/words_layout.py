"""The layout of matrices of codes that the Triton kernels read."""

from dataclasses import dataclass

import torch

_MAX_WIDTH = 32  # Words of an output in a block.
_WORD = 16  # Bits of a word.
LARGEST_BLOCK = 128  # Inputs of a block with codes of four bits.
MANY_OUTPUTS = 8192  # From this number of outputs on, wide tiles occupy a GPU.
MOST_OUTPUTS = 65536  # From this number of outputs on, wide tiles are fastest for all rows.


def width_of(group: int) -> int:
    """Words of an output in a block, for groups of this size."""
    return min(group, _MAX_WIDTH)


def block_of(bits: int, group: int) -> int:
    """Inputs of a block of words, for codes of `bits` bits."""
    return _WORD // bits * width_of(group)


def has_words(bits: int, group: int) -> bool:
    """Whether the layout has groups of this size."""
    return group in (16, 32, 64) or group % block_of(bits, group) == 0


@dataclass(frozen=True, slots=True)
class Words:
    """A matrix of codes of four or eight bits, in blocks of 32 or 16 words of each output.

    `words` int16 [blocks, outputs, words]; `factors` int32 [blocks * groups per block, outputs].
    See `words_kernels`. The last block may be padded with zeros."""

    words: torch.Tensor
    factors: torch.Tensor
    inputs: int
    bits: int  # Of a code: 4 or 8.
    has_half_scales: bool  # The scales are float16, otherwise bfloat16.
    has_least: bool  # The numbers of code 0 are factors, and not whole zeros.
    shift: int = 0  # The factors are 2^shift times those of the matrix.

    @property
    def outputs(self) -> int:
        return self.words.shape[1]

    @property
    def num_blocks(self) -> int:
        return len(self.words)

    @property
    def block(self) -> int:
        """Inputs of a block."""
        return self.num_codes * self.words.shape[2]

    @property
    def num_codes(self) -> int:
        """Codes of a word."""
        return _WORD // self.bits

    @property
    def group(self) -> int:
        """The number of inputs with one scale."""
        return self.num_blocks * self.block // len(self.factors)

    @property
    def most_rows(self) -> int:
        """With more rows, a product with the dequantised weight is faster."""
        is_wide = self.outputs > MANY_OUTPUTS and self.group >= LARGEST_BLOCK
        is_widest = self.outputs >= MOST_OUTPUTS
        return 256 if (is_wide or is_widest) and not self.has_least else 128

    @property
    def num_bytes(self) -> int:
        return 2 * self.words.numel() + 4 * self.factors.numel()
