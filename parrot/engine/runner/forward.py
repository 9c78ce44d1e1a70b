"""Logits of a step on the device: by fused kernels where they fit the model, or plain torch."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.kernels.sampling import best_tokens
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.fused import FusedDecoder, can_fuse


@dataclass(frozen=True, slots=True)
class Decoded:
    """Row by row: the token of the largest logit, or -1 where the logits are not finite."""

    tokens: torch.Tensor
    logits: torch.Tensor


def decode(logits: torch.Tensor) -> Decoded:
    return Decoded(best_tokens(logits), logits)


Forward = Callable[[torch.Tensor, TritonAttention, TritonPlan, torch.Tensor | None], torch.Tensor]
"""Token ids, attention, its plan and sampled rows -> logits [sampled rows, vocab]; None: of all."""


def make_forward(model: Decoder, max_positions: int) -> Forward:
    return FusedDecoder(model, max_positions) if can_fuse(model.spec) else partial(_plain, model)


def _plain(
    model: Decoder,
    token_ids: torch.Tensor,
    attention: TritonAttention,
    plan: TritonPlan,
    sample_rows: torch.Tensor | None,
) -> torch.Tensor:
    hidden = model.forward(token_ids, plan.positions, attention, plan)
    if sample_rows is not None:
        hidden = hidden.index_select(0, sample_rows)
    return model.logits(hidden)
