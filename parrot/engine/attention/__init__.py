"""Attention of a step over the KV pool, behind one interface."""

from parrot.engine.attention.interface import AttentionBackend
from parrot.engine.attention.torch_attention import TorchAttention

__all__ = ["AttentionBackend", "TorchAttention"]
