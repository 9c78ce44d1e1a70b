"""A step on its way, and when the next one is due."""

import math
from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from parrot.engine.attention.context_tree import IntArray
from parrot.engine.attention.triton_attention import TritonAttention
from parrot.engine.core.plan import StepResult
from parrot.engine.kernels.launch import MATRIX_RATE
from parrot.engine.runner.device import Landing, Mark, noticing_loss
from parrot.engine.runner.inputs import StepInputs
from parrot.engine.runner.sampling import results

_LEAD_S = 1e-3

Sources = tuple[torch.Tensor, IntArray]
"""Tokens of the step before on the device, and which of them the pending ones of this step are."""


@dataclass(frozen=True, slots=True)
class Launched:
    """`tokens`, one for each of its inputs' samples, are there once it is launched, and valid until
    the step after it has run; `due` until that is launched."""

    inputs: StepInputs
    tokens: "Future[torch.Tensor]"
    landing: Landing
    due: Mark
    device: torch.device

    def wait_until_due(self) -> None:
        wait((self.tokens,))
        self.due.wait()

    def wait(self) -> StepResult:
        with noticing_loss(self.device):
            tokens = self.landing.wait(len(self.tokens.result()))
        pairs = zip(self.inputs.samples, tokens, strict=True)
        chosen = [(spec, token) for spec, token in pairs if spec is not None]
        return results(*zip(*chosen, strict=True)) if chosen else StepResult({}, {})

    def tokens_of(self, context_ids: Sequence[int]) -> Sources:
        row_of = {context_id: row for row, context_id in enumerate(self.inputs.sampled)}
        return self.tokens.result(), np.array([row_of[c] for c in context_ids], dtype=np.int32)


class WatchedAttention(TritonAttention):
    """`due` is passed when the device has come to one of a step's last layers, early enough for
    the host to plan the next step and launch the first of its kernels meanwhile."""

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
        self._lead_tokens = _LEAD_S * MATRIX_RATE / (2 * layer_weights)
        self._due_layer = 0
        self.due = Mark(memory.device)

    def expect(self, num_tokens: int) -> None:
        """Choose the layer for a step of `num_tokens`. A step that begins its last layer is nearly
        over."""
        layers_left = 1 + math.ceil(self._lead_tokens / num_tokens)
        self._due_layer = max(0, self._num_layers - layers_left)

    def attend(self, layer: int, *args: Any, **kwargs: Any) -> torch.Tensor:
        if layer == self._due_layer:
            self.due.put()
        return super().attend(layer, *args, **kwargs)
