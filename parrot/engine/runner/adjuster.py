"""Penalties and biases on their way to the logits."""

import torch

from parrot.engine.core.plan import SampleSpec
from parrot.engine.kernels.adjustments import (
    NUM_COLUMNS,
    NUM_FIELDS,
    AdjustedRow,
    AdjustedTokens,
    Adjustments,
    adjustments_of,
)
from parrot.engine.kernels.sampling import adjust_logits
from parrot.engine.runner.staging import Stage
from parrot.protocol.sampling import SamplingConfig

_ROOM = 2**16

# Rows and entries on the device.
SentAdjustments = tuple[torch.Tensor, torch.Tensor]


class LogitAdjuster:
    """There may be any number of entries, so they have a pinned buffer of their own, which grows,
    and a second copy: only steps with such requests pay for it."""

    def __init__(self, device: torch.device) -> None:
        self._stage = Stage(_ROOM, device)

    def send(self, adjustments: Adjustments) -> SentAdjustments:
        """Valid on the current stream until the next `send`."""
        parts = (adjustments.rows.reshape(-1), adjustments.entries.reshape(-1))
        self._stage.make_room([len(part) for part in parts])
        rows, entries = self._stage.send(parts)
        self._stage.sent()
        return rows.view(-1, NUM_COLUMNS), entries.view(-1, NUM_FIELDS)

    def adjusted(
        self, logits: torch.Tensor, token_ids: torch.Tensor, sent: SentAdjustments
    ) -> torch.Tensor:
        """In float32; `logits` may be changed. `token_ids`: the step's, none of them pending."""
        logits = logits.float()
        adjust_logits(logits, token_ids, *sent)
        return logits

    def warm_up(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Compile, and change nothing."""
        config = SamplingConfig(presence_penalty=1.0)
        row = AdjustedRow(0, -1, AdjustedTokens(0, config), SampleSpec(0, config, 0, 0))
        self.adjusted(logits, token_ids, self.send(adjustments_of([row])))
