"""The interface through which models reach attention."""

from typing import Generic, Protocol, TypeVar

import torch

PlanT = TypeVar("PlanT", contravariant=True)


class AttentionBackend(Protocol, Generic[PlanT]):
    """Writes the new KV of a step into the pool and attends over the contexts. A plan (`PlanT`) is
    made once for a step and serves all of its layers."""

    def run(
        self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PlanT
    ) -> torch.Tensor:
        """q [rows, heads, head_dim], k and v [rows, kv_heads, head_dim]
        -> [rows, heads * head_dim].

        k and v are written to the pool; none of the three is changed. A result may be overwritten
        by the next call."""
        ...
