"""The forward pass with Triton kernels for layers with other norms, factors or activations.

Norms and sums of the residual are kernels of their own here. It supports what `FusedDecoder` does,
and in addition norms of the outputs of attention and MLP, norms of all heads together, factors of
residuals, embeddings and logits, caps of logits, and GELU."""

from dataclasses import dataclass

import torch

from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.kernels.attention_shape import HeadNorm
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store, silu_mul
from parrot.engine.kernels.linear.products import Rows
from parrot.engine.models.decoder import Decoder, DecoderLayer, QKNorm, WidthNorm
from parrot.engine.models.fused import HANDLED, HANDLED_BY_ATTENTION, angle_tables
from parrot.engine.models.fused_weights import LayerWeight
from parrot.engine.models.layers import Norm, RMSNorm
from parrot.engine.models.spec import DecoderSpec, LayerSpec, is_default
from parrot.engine.models.weights import weight_of

_HANDLED_HERE = (*HANDLED, "embed_scale", "logit_scale", "logit_softcap")


def can_fuse_sums(spec: DecoderSpec) -> bool:
    """Whether `SummingDecoder` computes all layers of a decoder."""
    return (
        is_default(spec, except_for=_HANDLED_HERE)
        and is_default(spec.norm, except_for=("eps", "gain_offset"))
        and all(map(_can_fuse_layer, spec.layers))
    )


def _can_fuse_layer(layer: LayerSpec) -> bool:
    return (
        is_default(layer, except_for=("attention", "mlp", "norms", "residual_scale"))
        and is_default(layer.norms, except_for=("attn", "attn_out", "mlp", "mlp_out"))
        and is_default(layer.attention, except_for=HANDLED_BY_ATTENTION)
        and layer.attention.qk_norm in ("", "head", "width")
        and is_default(layer.mlp, except_for=("width", "bias", "activation"))
        and layer.mlp.activation in ("silu", "gelu_tanh")
    )


def _rms(norm: Norm | None) -> RMSNorm | None:
    assert norm is None or isinstance(norm, RMSNorm)
    return norm


@dataclass(frozen=True, slots=True)
class _Layer:
    qkv: LayerWeight
    out: LayerWeight
    gate_up: LayerWeight
    down: LayerWeight
    attn_norm: RMSNorm | None
    attn_out_norm: RMSNorm | None
    mlp_norm: RMSNorm | None
    mlp_out_norm: RMSNorm | None
    head_norm: HeadNorm | None
    width_norm: WidthNorm | None
    cos_sin: torch.Tensor  # The table of angles.
    scale: float  # Factor of the outputs of attention and MLP.
    gelu: bool

    @classmethod
    def of(cls, layer: DecoderLayer, cos_sin: torch.Tensor) -> "_Layer":
        norm = layer.qk_norm
        return cls(
            qkv=weight_of(layer.qkv),
            out=weight_of(layer.out),
            gate_up=weight_of(layer.mlp.up),
            down=weight_of(layer.mlp.down),
            attn_norm=_rms(layer.attn_norm),
            attn_out_norm=_rms(layer.attn_out_norm),
            mlp_norm=_rms(layer.mlp_norm),
            mlp_out_norm=_rms(layer.mlp_out_norm),
            head_norm=layer.head_norm if isinstance(norm, QKNorm) else None,
            width_norm=norm if isinstance(norm, WidthNorm) else None,
            cos_sin=cos_sin,
            scale=layer.spec.residual_scale,
            gelu=layer.spec.mlp.activation == "gelu_tanh",
        )


class SummingDecoder:
    """`forward.Forward`. Shares all weights with its `Decoder`. Stateless."""

    def __init__(self, model: Decoder, max_positions: int) -> None:
        self.vocabulary = model.vocabulary
        self._model = model
        tables = angle_tables(model, max_positions)
        self._layers = [_Layer.of(x, tables[x.spec.attention.rope]) for x in model.layers]
        self._lm_head = weight_of(model.lm_head)

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `forward.Forward`. The logits have the model's dtype."""
        return self.head(self._states(token_ids, attention, plan, sample_rows))

    def states(
        self, token_ids: torch.Tensor, attention: TritonAttention, plan: TritonPlan
    ) -> torch.Tensor:
        return self._states(token_ids, attention, plan, None)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        return self._model.scaled(self._lm_head(states))

    def _states(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """The final states of the sampled rows (None: all rows)."""
        residual = self._model.embedded(token_ids)
        normed = _normed(residual, self._layers[0].attn_norm)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            only_last = index == last and sample_rows is not None
            attended = _attend(index, layer, normed, attention, plan, only_last)
            if index == last and sample_rows is not None:
                attended = attended.index_select(0, sample_rows)
                residual = residual.index_select(0, sample_rows)
            output = layer.out.summed(attended)
            normed = _sum(output, residual, layer.attn_out_norm, layer.scale, layer.mlp_norm)
            hidden = _gated(layer, normed)
            next_norm = _rms(self._model.norm)
            if index < last:
                next_norm = self._layers[index + 1].attn_norm
            output = layer.down.summed(hidden)
            normed = _sum(output, residual, layer.mlp_out_norm, layer.scale, next_norm)
        return normed


def _attend(
    index: int,
    layer: _Layer,
    x: torch.Tensor,
    attention: TritonAttention,
    plan: TritonPlan,
    only_last: bool,
) -> torch.Tensor:
    shape, qkv = attention.shape, layer.qkv(x)
    if layer.width_norm is not None:
        heads = qkv.view(len(qkv), -1, shape.head_dim)[:, : -shape.num_kv_heads]
        heads.copy_(layer.width_norm(heads))
    q, new = rope_and_store(
        qkv,
        attention.view(index, plan),
        plan.table_rows,
        layer.cos_sin,
        shape,
        layer.head_norm,
        keep_k=bool(plan.buffers.work.dense),
    )
    return attention.attend(index, q, new, plan, only_last=only_last)


def _gated(layer: _Layer, x: torch.Tensor) -> Rows:
    if not layer.gelu:
        return layer.gate_up.gated(x, for_e4m3=layer.down.reads_e4m3)
    both = layer.gate_up(x)
    return silu_mul(both, both.new_empty(len(both), both.shape[1] // 2), gelu=True)


def _normed(x: torch.Tensor, norm: RMSNorm | None) -> torch.Tensor:
    """The norm of x, which stays as it is."""
    if norm is None:
        return x
    return add_rms_norm(x, x, norm.weight, norm.eps, torch.empty_like(x), add=False)


def _sum(
    output: torch.Tensor,
    residual: torch.Tensor,
    output_norm: RMSNorm | None,
    scale: float,
    next_norm: RMSNorm | None,
) -> torch.Tensor:
    """residual += scale * output_norm(output), in place. Returns next_norm(residual)."""
    output = _normed(output, output_norm)
    if scale != 1.0:
        output = output.mul_(scale)
    if next_norm is None:
        return residual.add_(output)
    out = torch.empty_like(residual)
    return add_rms_norm(output, residual, next_norm.weight, next_norm.eps, out)
