"""The forward pass of Llama and its relatives with the fused Triton kernels.

Besides attention, a layer has three kinds of kernels between the matrix products: residual add with
RMS norm (twice), norm and rotation of heads with the KV write, and SiLU-mul. For few rows the
products include these operations. For one row and weights in e4m3 or in four bits, all products
between two attentions are one kernel (`fused_chain`)."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store
from parrot.engine.kernels.launch import NewKV, is_hopper
from parrot.engine.kernels.linear.products import Rows
from parrot.engine.models.decoder import Decoder
from parrot.engine.models.fused_layer import FusedLayer
from parrot.engine.models.fused_weights import EMBEDDING_SLOT, LayerWeight
from parrot.engine.models.layers import RMSNorm
from parrot.engine.models.rope import angle_table
from parrot.engine.models.spec import DecoderSpec, LayerSpec, is_default
from parrot.engine.models.weights import weight_of

if TYPE_CHECKING:
    from parrot.engine.kernels.linear.chain import RowChain

HANDLED = (
    *("architecture", "vocab_size", "hidden_size", "layers", "max_positions", "norm", "ropes"),
    *("names", "other_names", "tie_embeddings"),
)
HANDLED_BY_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "rope", "qk_norm", "qkv_bias", "o_bias"),
    *("scale", "softcap", "window", "unpadded_dim"),  # `TritonAttention` handles these.
)


def can_fuse(spec: DecoderSpec) -> bool:
    """Whether the fused kernels compute all layers of a decoder."""
    return (
        is_default(spec, except_for=HANDLED)
        and is_default(spec.norm, except_for=("eps",))
        and all(map(_can_fuse_layer, spec.layers))
    )


def _can_fuse_layer(layer: LayerSpec) -> bool:
    return (
        is_default(layer, except_for=("attention", "mlp"))
        and is_default(layer.attention, except_for=HANDLED_BY_ATTENTION)
        and layer.attention.qk_norm in ("", "head")
        and is_default(layer.mlp, except_for=("width", "bias"))
    )


def angle_tables(model: Decoder, max_positions: int) -> dict[int | None, torch.Tensor]:
    """The table of angles of each rope that layers have."""
    ropes, head_dim = model.spec.ropes, model.spec.attention.head_dim
    return {
        rope: angle_table(None if rope is None else ropes[rope], head_dim, max_positions).to(
            model.device
        )
        for rope in {layer.attention.rope for layer in model.spec.layers}
    }


class FusedDecoder:
    """`Forward` with the fused kernels. Shares all weights with its `Decoder`. Stateless."""

    def __init__(self, model: Decoder, max_positions: int) -> None:
        assert isinstance(model.norm, RMSNorm)
        self.vocabulary = model.vocabulary
        self._embed, self._embedded = model.embed, model.embedded
        tables = angle_tables(model, max_positions)
        self._layers = [
            FusedLayer.of(layer, tables[layer.spec.attention.rope]) for layer in model.layers
        ]
        self._norm = model.norm
        self._lm_head: LayerWeight = weight_of(model.lm_head)
        self._chain = _chain_of(self._layers, model)

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `forward.Forward`. The logits have the model's dtype."""
        # For rows that are not sampled, the last layer computes only KV. Prompts save most of the
        # layer.
        return self.head(self._normed(token_ids, attention, plan, sample_rows)[0])

    def states(
        self, token_ids: torch.Tensor, attention: TritonAttention, plan: TritonPlan
    ) -> torch.Tensor:
        return self._norm(self._normed(token_ids, attention, plan, None)[1])

    def head(self, states: Rows) -> torch.Tensor:
        return self._lm_head(states)

    def _normed(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> tuple[Rows, torch.Tensor]:
        """The final states of the sampled rows (None: all rows), and the states before the norm."""
        residual, normed = self._embedded_and_normed(token_ids)
        last = len(self._layers) - 1
        chain = self._chain
        num_sampled = 1 if sample_rows is None else len(sample_rows)
        if chain is not None and len(residual) == num_sampled == 1 and _is_paged(attention, plan):
            return self._chained(chain, residual, normed, attention, plan)
        for index, layer in enumerate(self._layers):
            only_last = index == last and sample_rows is not None
            q, new = self._heads(index, normed, attention, plan)
            attended = attention.attend(index, q, new, plan, only_last=only_last)
            if index == last and sample_rows is not None:
                attended = attended.index_select(0, sample_rows)
                residual = residual.index_select(0, sample_rows)
            next_norm, reader = self._norm, self._lm_head
            if index < last:
                next_norm, reader = self._layers[index + 1].attn_norm, self._layers[index + 1].qkv
            gate_up, down = layer.gate_up, layer.down
            normed = layer.out.add_and_norm(
                attended, residual, layer.mlp_norm, for_e4m3=gate_up.reads_e4m3
            )
            hidden = gate_up.gated(normed, for_e4m3=down.reads_e4m3)
            normed = down.add_and_norm(hidden, residual, next_norm, for_e4m3=reader.reads_e4m3)
        return normed, residual

    def _chained(
        self,
        chain: "RowChain",
        residual: torch.Tensor,
        normed: Rows,
        attention: TritonAttention,
        plan: TritonPlan,
    ) -> tuple[Rows, torch.Tensor]:
        """`_normed` of one row with one kernel for all products between two attentions."""
        step, last = chain.start(residual), len(self._layers) - 1
        q, new = self._heads(0, normed, attention, plan)
        for index in range(len(self._layers)):
            # The chain asks for a limited number of weights while attention runs.
            attended = attention.attend(index, q, new, plan, next_early=True)
            following = attention.view(min(index + 1, last), plan)
            q, new = step.run(index, attended, following, plan.table_rows), None
        return step.normed(), residual

    def _embedded_and_normed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, Rows]:
        norm, vocabulary = self._layers[0].attn_norm, self.vocabulary
        if vocabulary is not None and (exchanges := vocabulary.ranks.exchanges) is not None:
            residual = self._embed.new_empty((len(token_ids), self._embed.shape[1]))
            part = exchanges.slot(EMBEDDING_SLOT, 1, residual)
            if part is not None:
                vocabulary.embed_own(token_ids, self._embed, part[0])
                normed = exchanges.sum_and_norm(part, residual, norm.weight, norm.eps, add=False)
                return residual, normed
        residual = self._embedded(token_ids)
        out = torch.empty_like(residual)
        return residual, add_rms_norm(residual, residual, norm.weight, norm.eps, out, add=False)

    def _heads(
        self, index: int, x: Rows, attention: TritonAttention, plan: TritonPlan
    ) -> tuple[torch.Tensor, NewKV | None]:
        """Store the layer's new KV. Returns q, and the KV for attention without pages."""
        layer, shape = self._layers[index], attention.shape
        qkv = layer.qkv
        where = (attention.view(index, plan), plan.table_rows, layer.cos_sin, shape)
        is_plain = not attention.is_quantised and layer.head_norm is None
        if is_plain and qkv.can_rotate(shape, x):
            return qkv.rotated(x, where), None
        keep_k = bool(plan.buffers.work.dense)
        product, factors = qkv.unscaled(x)
        return rope_and_store(
            product,
            *where,
            layer.head_norm,
            keep_k=keep_k,
            factors=factors,
            dtype=self._embed.dtype,
        )


def _chain_of(layers: Sequence[FusedLayer], model: Decoder) -> "RowChain | None":
    # The chain has been measured on Hopper GPUs only.
    if not is_hopper(model.device) or any(layer.qkv.for_chain() is None for layer in layers):
        return None
    from parrot.engine.models.fused_chain import chain_of  # Only models in these formats.

    assert isinstance(model.norm, RMSNorm)
    return chain_of(layers, model.norm, model.spec.attention)


def _is_paged(attention: TritonAttention, plan: TritonPlan) -> bool:
    """Whether attention reads all KV from pages, in the model's type."""
    return not attention.is_quantised and not plan.buffers.work.dense
