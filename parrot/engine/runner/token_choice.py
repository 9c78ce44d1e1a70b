"""The choice of a step's tokens on the device, from its logits."""

import numpy as np
import torch

from parrot.engine.core.plan import SampleSpec
from parrot.engine.kernels.sampling import (
    adjust_logits,
    best_tokens,
    draw_tokens,
    mask_logits,
)
from parrot.engine.kernels.sampling_layout import NUM_COLUMNS, NUM_FIELDS, NUM_SETTINGS
from parrot.engine.runner.device import Stage
from parrot.engine.runner.draws import (
    DRAWN,
    LIMITED,
    AdjustedRow,
    AdjustedTokens,
    Adjustments,
    adjustments_of,
    draw_settings,
)
from parrot.engine.runner.log_probabilities import score_tokens
from parrot.engine.runner.masks import Masks
from parrot.protocol.sampling import MAX_LOGPROBS, SamplingConfig

_NUM_NUMBERS = 2**16

SentAdjustments = tuple[torch.Tensor, torch.Tensor]
"""The rows and entries of `Adjustments`, on the device."""


class TokenChooser:
    """Adjusts logits, draws tokens, and says how likely they were.

    There may be any number of adjustments, so they have a pinned buffer of their own, which grows,
    and a copy of their own: only steps with such requests pay for it. So have masks, whose copies
    come later, behind the step's other kernels."""

    def __init__(self, device: torch.device) -> None:
        self._stage = Stage(_NUM_NUMBERS, device)
        self._mask_stage = Stage(_NUM_NUMBERS, device)

    def send(self, adjustments: Adjustments) -> SentAdjustments:
        """Valid on the current stream until the next `send`."""
        parts = (adjustments.rows.reshape(-1), adjustments.entries.reshape(-1))
        self._stage.make_room([len(part) for part in parts])
        rows, entries = self._stage.send(parts)
        self._stage.sent()
        return rows.view(-1, NUM_COLUMNS), entries.view(-1, NUM_FIELDS)

    def choose(
        self,
        logits: torch.Tensor,
        best: torch.Tensor,
        token_ids: torch.Tensor,
        choice: int,
        settings: torch.Tensor,
        adjustments: SentAdjustments | None,
        masks: Masks | None = None,
        scored: torch.Tensor | None = None,
        num_top: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """int32 [rows]: a token for each row of `logits`, or -1 if they are not finite. And what
        `score_tokens` gives for the rows that are `scored`; None if none is.

        `best`: `best_tokens(logits)`; both may be changed. `token_ids`: the step's, none of them
        pending. `choice` and `settings`: of `Draws`."""
        # A copy, since logits may be changed in place; the other rows cost nothing.
        plain = None if scored is None or not len(scored) else logits[scored]
        if adjustments is not None:
            logits = logits.float()
            adjust_logits(logits, token_ids, *adjustments)
        if masks is not None:
            logits = logits.float()
            mask_logits(logits, *self._send_masks(masks))
        if adjustments is not None or masks is not None:
            best = best_tokens(logits)
        if choice & DRAWN:
            limited = bool(choice & LIMITED)
            draw_tokens(logits, best, settings.view(-1, NUM_SETTINGS), limited=limited)
        return best, None if plain is None else score_tokens(plain, best[scored], num_top)

    def _send_masks(self, masks: Masks) -> tuple[torch.Tensor, torch.Tensor]:
        parts = (masks.rows, masks.words.reshape(-1))
        self._mask_stage.make_room([len(part) for part in parts])
        rows, words = self._mask_stage.send(parts)
        self._mask_stage.sent()
        return rows, words.view(masks.words.shape)

    def warm_up(self, logits: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Compile all kernels for `logits` [1, vocab], as they are and adjusted."""
        row = draw_settings(SamplingConfig(top_k=4, top_p=0.9))
        for choice in (DRAWN | LIMITED, DRAWN):
            for scores in (logits, logits.float()):
                (settings,) = self._stage.send([row])
                self.choose(scores, best_tokens(scores), token_ids, choice, settings, None)
                self._stage.sent()
        config = SamplingConfig(presence_penalty=1.0)
        adjusted = AdjustedRow(0, -1, AdjustedTokens(0, config), SampleSpec(0, config, 0, 0))
        sent = self.send(adjustments_of([adjusted]))
        self.choose(logits, best_tokens(logits), token_ids, 0, settings, sent)
        num_words = -(-logits.shape[1] // 32)
        masks = Masks(np.zeros(1, dtype=np.int32), np.full((1, num_words), -1, dtype=np.int32))
        first = torch.zeros(1, dtype=torch.int32, device=logits.device)
        best = best_tokens(logits)
        self.choose(logits, best, token_ids, 0, settings, None, masks, first, MAX_LOGPROBS)
