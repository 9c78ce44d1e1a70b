"""Chooses the forward pass of a decoder with the Triton kernels."""

from functools import partial
from typing import Protocol

import torch

from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.fused import FusedDecoder, can_fuse
from parrot.engine.models.fused_sums import SummingDecoder, can_fuse_sums
from parrot.engine.models.parallel import VocabularyShard


class Forward(Protocol):
    """A forward pass over a step's tokens."""

    vocabulary: VocabularyShard | None  # The tokens of this rank's logits; None for all tokens.

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """Logits [sampled rows, tokens]. `sample_rows` None: logits of all rows."""
        ...

    def states(
        self, token_ids: torch.Tensor, attention: TritonAttention, plan: TritonPlan
    ) -> torch.Tensor:
        """The final hidden states [tokens, width]."""
        ...

    def head(self, states: torch.Tensor) -> torch.Tensor:
        """Final states [rows, width] -> logits [rows, tokens]."""
        ...


def make_forward(model: Decoder, max_positions: int) -> Forward:
    """The forward pass with the most fused kernels that the model allows."""
    if can_fuse(model.spec):
        return FusedDecoder(model, max_positions)
    if can_fuse_sums(model.spec):
        return SummingDecoder(model, max_positions)
    return PlainDecoder(model)


class PlainDecoder:
    """`Forward` in plain torch, except for attention."""

    def __init__(self, model: Decoder) -> None:
        self._model = model
        self.vocabulary = model.vocabulary

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        attend = partial(attention.run, plan=plan)
        hidden = self._model.forward(token_ids, plan.positions, attend, sample_rows)
        return self.head(self._model.final(hidden))

    def states(
        self, token_ids: torch.Tensor, attention: TritonAttention, plan: TritonPlan
    ) -> torch.Tensor:
        hidden = self._model.forward(token_ids, plan.positions, partial(attention.run, plan=plan))
        return self._model.final(hidden)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.own_logits(states)
