"""Attention of models whose layers have heads of different shapes, in plain torch."""

from collections.abc import Sequence

import torch

from parrot.engine.attention.torch_attention import TorchAttention, TorchPlan
from parrot.engine.attention.work_list import StepRows, WorkList


class GroupedAttention:
    """One `TorchAttention` for each group of layers. All groups use the same blocks."""

    def __init__(self, parts: Sequence[TorchAttention], layers: Sequence[Sequence[int]]) -> None:
        """`layers[i]`: the layers of `parts[i]`, in the order of its pool."""
        self._parts = parts
        self.shape = parts[0].shape
        self._place = {
            layer: (group, index)
            for group, members in enumerate(layers)
            for index, layer in enumerate(members)
        }

    def plan(self, work: WorkList, step: StepRows) -> tuple[TorchPlan, ...]:
        return tuple(part.plan(work, step) for part in self._parts)

    def run(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        plan: tuple[TorchPlan, ...],
    ) -> torch.Tensor:
        group, index = self._place[layer]
        return self._parts[group].run(index, q, k, v, plan[group])
