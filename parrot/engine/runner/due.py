"""When to launch the next step: while the device still has a little to do for this one."""

import math
from typing import Any

import torch

from parrot.engine.attention.triton_backend import TritonAttention
from parrot.engine.runner.staging import Mark

_LEAD_S = 1e-3
_MATRIX_RATE = 790e12


class WatchedAttention(TritonAttention):
    """`due` is passed when the device has come to one of a step's last layers: so many before its
    end that the host can plan the next step and launch the first of its kernels meanwhile."""

    def __init__(
        self,
        memory: torch.Tensor,
        num_heads: int,
        max_slots: int,
        layer_weights: int,
        *,
        upcast: bool = False,
    ) -> None:
        super().__init__(memory, num_heads, max_slots, upcast=upcast)
        self._num_layers = len(memory)
        self._lead_tokens = _LEAD_S * _MATRIX_RATE / (2 * layer_weights)
        self._due_layer = 0
        self.due = Mark(memory.device)

    def expect(self, num_tokens: int) -> None:
        """The next step has so many. Hardly anything is left of one that begins its last layer."""
        layers_left = 1 + math.ceil(self._lead_tokens / num_tokens)
        self._due_layer = max(0, self._num_layers - layers_left)

    def attend(self, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer == self._due_layer:
            self.due.put()
        return super().attend(layer, *args, **kwargs)
