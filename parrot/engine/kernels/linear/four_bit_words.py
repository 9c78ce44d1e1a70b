"""The layout of matrices of four bits that the Triton kernels read."""

from dataclasses import dataclass

import torch

MOST_GROUP = 128  # Inputs of the largest group of the layout.
UNIT = 128  # Inputs of 32 words.
CODES = 4  # Codes of a word.

_MOST_PART = 64


@dataclass(frozen=True, slots=True)
class FourBitWords:
    """A matrix of four bits with whole zeros, in blocks of `4 * part` inputs.

    `words` int16 [outputs, blocks * part]; `factors` int32 [groups, outputs]. See
    `four_bit_kernels`. The last block may be padded with zeros."""

    words: torch.Tensor
    factors: torch.Tensor
    inputs: int
    has_half_scales: bool  # The scales are float16, otherwise bfloat16.

    @property
    def outputs(self) -> int:
        return len(self.words)

    @property
    def num_units(self) -> int:
        return self.words.shape[1] * CODES // UNIT

    @property
    def group(self) -> int:
        """The number of inputs with one scale."""
        return self.words.shape[1] * CODES // len(self.factors)

    @property
    def part(self) -> int:
        """The words of a block."""
        return part_of(self.group)

    @property
    def num_bytes(self) -> int:
        return 2 * self.words.numel() + 4 * self.factors.numel()


def part_of(group: int) -> int:
    """The words of a block for a size of groups. All inputs of a part are in one group."""
    # Rows of 128 bytes are written to shared memory twice as fast as rows of 64 bytes.
    return min(group, _MOST_PART)
