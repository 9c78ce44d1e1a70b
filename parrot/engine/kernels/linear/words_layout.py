"""The layout of matrices of four bits that the Triton kernels read."""

from dataclasses import dataclass

import torch

BLOCK = 128  # Inputs of a block of words, and the largest group.
CODES = 4  # Codes of a word.


@dataclass(frozen=True, slots=True)
class Words:
    """A matrix of four bits with whole zeros, in blocks of `BLOCK` inputs.

    `words` int16 [blocks, outputs, 32]; `factors` int32 [blocks * groups per block, outputs]. See
    `words_kernels`. The last block may be padded with zeros."""

    words: torch.Tensor
    factors: torch.Tensor
    inputs: int
    has_half_scales: bool  # The scales are float16, otherwise bfloat16.

    @property
    def outputs(self) -> int:
        return self.words.shape[1]

    @property
    def num_blocks(self) -> int:
        return len(self.words)

    @property
    def group(self) -> int:
        """The number of inputs with one scale."""
        return self.num_blocks * BLOCK // len(self.factors)

    @property
    def num_bytes(self) -> int:
        return 2 * self.words.numel() + 4 * self.factors.numel()
