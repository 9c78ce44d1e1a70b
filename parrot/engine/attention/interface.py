"""What the models need of attention, whatever computes it."""

from typing import Generic, Protocol, TypeVar

import torch

from parrot.engine.batch import Batch

PlanT = TypeVar("PlanT")


class AttentionBackend(Protocol, Generic[PlanT]):
    """Writes the new KV of a step into the pool and attends over the contexts.

    `min_saved_tokens` is the gate of `build_batch`: how many tokens of KV a shared span must save
    reading before sharing is faster than not sharing."""

    @property
    def min_saved_tokens(self) -> int: ...

    def plan(self, batch: Batch) -> PlanT:
        """Everything about a step that is the same for all layers; once per step."""
        ...

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlanT
    ) -> torch.Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]
        -> [rows, heads * head_dim].

        k and v are written to the pool; none of the three is changed. A result may be overwritten
        by the next call."""
        ...
