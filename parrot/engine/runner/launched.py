"""A step on its way to the device, and there."""

from collections.abc import Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

import numpy as np
import torch

from parrot.engine.core.plan import StepResult
from parrot.engine.runner.device import noticing_loss
from parrot.engine.runner.inputs import IntArray, StepInputs
from parrot.engine.runner.sampling import results
from parrot.engine.runner.staging import Landing, Mark


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

    def tokens_of(self, context_ids: Sequence[int]) -> "Sources":
        row_of = {context_id: row for row, context_id in enumerate(self.inputs.sampled)}
        return self.tokens.result(), np.array([row_of[c] for c in context_ids], dtype=np.int32)


# Tokens of the step before on the device, and which of them this one's pending ones are.
Sources = tuple[torch.Tensor, IntArray]
