"""The shape of a model's attention, and the norm of its heads. Does not import torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm of each head of q and k (Qwen3): weights [head_dim]."""

    q_weight: "torch.Tensor"
    k_weight: "torch.Tensor"
    eps: float


@dataclass(frozen=True, slots=True)
class ScoreRule:
    """The scores of one layer's attention, from products of queries and keys."""

    scale: float
    softcap: float | None = None  # Scores are softcap * tanh(score / softcap).
    window: int | None = None  # Keys that a token attends to, with its own; None: all.


def plain_rule(head_dim: int) -> ScoreRule:
    """The rule of most models."""
    return ScoreRule(head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The shape of one layer's attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int  # Tokens per page.
    # Bytes of a number in the KV pool. Numbers of 1 byte (e4m3) have one exponent byte more per
    # token and head.
    number_bytes: int = 2

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.num_heads // self.num_kv_heads

    @property
    def kv_token_bytes(self) -> int:
        exponent = 1 if self.number_bytes == 1 else 0
        return 2 * self.num_kv_heads * (self.number_bytes * self.head_dim + exponent)

    @property
    def partial_token_bytes(self) -> int:
        """Bytes of a token's float32 partial result, which is written once and read once."""
        return 8 * self.num_heads * self.head_dim
