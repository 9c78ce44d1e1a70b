"""Attention of models with several groups of layers, in plain torch."""

from collections.abc import Sequence

import torch

from parrot.engine.attention.quantised import PooledLayers
from parrot.engine.attention.torch_attention import TorchAttention, TorchPlan
from parrot.engine.attention.work_list import StepRows, WorkList


class GroupedAttention:
    """One `TorchAttention` for each group of layers. Groups use the same blocks, or their slots."""

    def __init__(self, parts: Sequence[TorchAttention], groups: Sequence[PooledLayers]) -> None:
        """`parts[i]`: the attention of `groups[i]`."""
        self._parts = parts
        self._in_slots = [group.in_slots for group in groups]
        self.shape = parts[0].shape
        self._place = {
            layer: (number, index)
            for number, group in enumerate(groups)
            for index, layer in enumerate(group.layers)
        }

    def plan(
        self, work: WorkList, step: StepRows, slots: StepRows | None = None
    ) -> tuple[TorchPlan, ...]:
        """`slots`: the step with tables of slots."""
        plans = []
        for part, in_slots in zip(self._parts, self._in_slots, strict=True):
            rows = slots if in_slots else step
            assert rows is not None, "there are no slots"
            plans.append(part.plan(work, rows))
        return tuple(plans)

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
