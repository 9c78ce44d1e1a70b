"""When to launch the next step: while the device still has a little to do for this one."""

import torch

from parrot.engine.attention.triton_backend import TritonAttention, TritonPlan
from parrot.engine.cuda.stage import Mark
from parrot.engine.kernels.attention import NewKV

_LAYERS_LEFT = 1 / 8
"""Some milliseconds, of a step so large that its kernels are launched one by one."""


class WatchedAttention(TritonAttention):
    """`due` is passed when the device comes to the last layers of a step."""

    def __init__(
        self, memory: torch.Tensor, num_heads: int, max_slots: int, *, upcast: bool = False
    ) -> None:
        super().__init__(memory, num_heads, max_slots, upcast=upcast)
        self._due_layer = int(len(memory) * (1 - _LAYERS_LEFT))
        self.due = Mark(memory.device)

    def attend(
        self, layer: int, q: torch.Tensor, new: NewKV, plan: TritonPlan, *, only_last: bool = False
    ) -> torch.Tensor:
        if layer == self._due_layer:
            self.due.put()
        return super().attend(layer, q, new, plan, only_last=only_last)
