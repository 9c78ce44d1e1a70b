"""A decoder's forward pass with the Triton kernels, fused for the models that allow it.

Besides attention, a layer has three kinds of kernels between the matrix products: residual add with
RMS norm (twice), norm and rotation of heads with the KV write, and SiLU-mul. For few rows the
products include these operations."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F

from parrot.engine.attention.triton_attention import TritonAttention, TritonPlan
from parrot.engine.kernels.attention_shape import HeadNorm
from parrot.engine.kernels.fused import add_rms_norm, rope_and_store, silu_mul
from parrot.engine.kernels.linear.products import (
    UndividedRows,
    can_rotate,
    few_rows_add_and_norm,
    few_rows_linear,
    few_rows_qkv,
    num_splits,
)
from parrot.engine.kernels.linear.tiles import FEW_ROWS
from parrot.engine.models.decoder import Decoder, DecoderLayer
from parrot.engine.models.layers import Linear, PlainLinear, RMSNorm
from parrot.engine.models.parallel import Ranks, SummedLinear, VocabularyShard
from parrot.engine.models.rope import angle_table
from parrot.engine.models.spec import DecoderSpec, LayerSpec, is_default


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
    """The forward pass with fused kernels if the model allows it, else with plain torch."""
    fuses = can_fuse(model.spec)
    return FusedDecoder(model, max_positions) if fuses else PlainDecoder(model)


_HANDLED = (
    *("architecture", "vocab_size", "hidden_size", "layers", "max_positions", "norm", "ropes"),
    *("names", "other_names", "tie_embeddings"),
)
_HANDLED_BY_ATTENTION = (
    *("num_heads", "num_kv_heads", "head_dim", "rope", "qk_norm", "qkv_bias", "o_bias"),
    *("scale", "softcap", "window", "unpadded_dim"),  # `TritonAttention` handles these.
)


def can_fuse(spec: DecoderSpec) -> bool:
    """Whether the fused kernels compute all layers of a decoder."""
    return (
        is_default(spec, except_for=_HANDLED)
        and is_default(spec.norm, except_for=("eps",))
        and all(map(_can_fuse_layer, spec.layers))
    )


def _can_fuse_layer(layer: LayerSpec) -> bool:
    return (
        is_default(layer, except_for=("attention", "mlp"))
        and is_default(layer.attention, except_for=_HANDLED_BY_ATTENTION)
        and layer.attention.qk_norm in ("", "head")
        and is_default(layer.mlp, except_for=("width", "bias"))
    )


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


Normed = torch.Tensor | UndividedRows

_OUT_SLOT, _DOWN_SLOT, _EMBEDDING_SLOT = range(3)


@dataclass(frozen=True, slots=True)
class _Weight:
    """A weight with its products."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    ranks: Ranks | None = None  # Ranks whose products are summed; None for a whole weight.
    slot: int = 0  # The slot of symmetric memory for the sum.

    @classmethod
    def of(cls, linear: Linear, slot: int = 0) -> "_Weight":
        if isinstance(linear, SummedLinear):
            return replace(cls.of(linear.linear), ranks=linear.ranks, slot=slot)
        assert isinstance(linear, PlainLinear), "fused kernels need weights as they are"
        return cls(linear.weight, linear.bias)

    def __call__(self, x: Normed) -> torch.Tensor:
        if isinstance(x, UndividedRows) or _is_few(x):
            out = _rows(x).new_empty(len(_rows(x)), len(self.weight))
            return few_rows_linear(x, self.weight, out, bias=self.bias)
        return F.linear(x, self.weight, self.bias)

    def gated(self, x: Normed) -> torch.Tensor:
        """silu(gate) * up, for a weight [gate | up]."""
        out = _rows(x).new_empty(len(_rows(x)), len(self.weight) // 2)
        if isinstance(x, UndividedRows) or _is_few(x):
            return few_rows_linear(x, self.weight, out, bias=self.bias, silu=True)
        return silu_mul(F.linear(x, self.weight, self.bias), out)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor, norm: RMSNorm) -> Normed:
        """residual += the product, in place. Returns the norm of the residual."""
        if self.ranks is None and _is_few(x) and x.dtype != torch.float16:
            return few_rows_add_and_norm(
                x, self.weight, residual, norm.weight, norm.eps, bias=self.bias
            )
        if self.ranks is not None and (exchanges := self.ranks.exchanges) is not None:
            splits = num_splits(x, self.weight) if self.bias is None and _is_few(x) else 1
            part = exchanges.slot(self.slot, splits, residual)
            if part is not None:
                self._into(part, x)
                return exchanges.sum_and_norm(part, residual, norm.weight, norm.eps)
        product = self(x) if self.ranks is None else self.ranks.all_reduce(self(x))
        out = torch.empty_like(residual)
        return add_rms_norm(product, residual, norm.weight, norm.eps, out)

    def _into(self, part: torch.Tensor, x: torch.Tensor) -> None:
        """Write the product to `part` [splits, rows, outputs], split by inputs."""
        if _is_few(x):
            few_rows_linear(x, self.weight, part, bias=self.bias)
        elif self.bias is None:
            torch.mm(x, self.weight.t(), out=part[0])
        else:
            torch.addmm(self.bias, x, self.weight.t(), out=part[0])


def _rows(x: Normed) -> torch.Tensor:
    return x.rows if isinstance(x, UndividedRows) else x


def _is_few(x: torch.Tensor) -> bool:
    return 0 < len(x) <= FEW_ROWS


@dataclass(frozen=True, slots=True)
class _FusedLayer:
    qkv: _Weight
    out: _Weight
    gate_up: _Weight
    down: _Weight
    attn_norm: RMSNorm
    mlp_norm: RMSNorm
    head_norm: HeadNorm | None
    cos_sin: torch.Tensor  # The table of angles.

    @classmethod
    def of(cls, layer: DecoderLayer, cos_sin: torch.Tensor) -> "_FusedLayer":
        attn_norm, mlp_norm = layer.attn_norm, layer.mlp_norm
        assert isinstance(attn_norm, RMSNorm)
        assert isinstance(mlp_norm, RMSNorm)
        return cls(
            qkv=_Weight.of(layer.qkv),
            out=_Weight.of(layer.out, slot=_OUT_SLOT),
            gate_up=_Weight.of(layer.mlp.up),
            down=_Weight.of(layer.mlp.down, slot=_DOWN_SLOT),
            attn_norm=attn_norm,
            mlp_norm=mlp_norm,
            head_norm=layer.head_norm,
            cos_sin=cos_sin,
        )


class FusedDecoder:
    """`Forward` with the fused kernels. Shares all weights with its `Decoder`. Stateless."""

    def __init__(self, model: Decoder, max_positions: int) -> None:
        spec = model.spec
        assert isinstance(model.norm, RMSNorm)
        self.vocabulary = model.vocabulary
        self._embed, self._embedded = model.embed, model.embedded
        tables = {
            rope: angle_table(
                None if rope is None else spec.ropes[rope], spec.attention.head_dim, max_positions
            ).to(model.device)
            for rope in {layer.attention.rope for layer in spec.layers}
        }
        self._layers = [
            _FusedLayer.of(layer, tables[layer.spec.attention.rope]) for layer in model.layers
        ]
        self._norm = model.norm
        self._lm_head = _Weight.of(model.lm_head)

    def __call__(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> torch.Tensor:
        """See `Forward`. The logits have the model's dtype."""
        # For rows that are not sampled, the last layer computes only KV. Prompts save most of the
        # layer.
        return self.head(self._normed(token_ids, attention, plan, sample_rows)[0])

    def states(
        self, token_ids: torch.Tensor, attention: TritonAttention, plan: TritonPlan
    ) -> torch.Tensor:
        return self._norm(self._normed(token_ids, attention, plan, None)[1])

    def head(self, states: Normed) -> torch.Tensor:
        return self._lm_head(states)

    def _normed(
        self,
        token_ids: torch.Tensor,
        attention: TritonAttention,
        plan: TritonPlan,
        sample_rows: torch.Tensor | None,
    ) -> tuple[Normed, torch.Tensor]:
        """The final states of the sampled rows (None: all rows), and the states before the norm."""
        residual, normed = self._embedded_and_normed(token_ids)
        last = len(self._layers) - 1
        for index, layer in enumerate(self._layers):
            only_last = index == last and sample_rows is not None
            attended = self._attend(index, layer, normed, attention, plan, only_last)
            if index == last and sample_rows is not None:
                attended = attended.index_select(0, sample_rows)
                residual = residual.index_select(0, sample_rows)
            normed = layer.out.add_and_norm(attended, residual, layer.mlp_norm)
            next_norm = self._norm if index == last else self._layers[index + 1].attn_norm
            hidden = layer.gate_up.gated(normed)
            normed = layer.down.add_and_norm(hidden, residual, next_norm)
        return normed, residual

    def _embedded_and_normed(self, token_ids: torch.Tensor) -> tuple[torch.Tensor, Normed]:
        norm, vocabulary = self._layers[0].attn_norm, self.vocabulary
        if vocabulary is not None and (exchanges := vocabulary.ranks.exchanges) is not None:
            residual = self._embed.new_empty((len(token_ids), self._embed.shape[1]))
            part = exchanges.slot(_EMBEDDING_SLOT, 1, residual)
            if part is not None:
                vocabulary.embed_own(token_ids, self._embed, part[0])
                normed = exchanges.sum_and_norm(part, residual, norm.weight, norm.eps, add=False)
                return residual, normed
        residual = self._embedded(token_ids)
        out = torch.empty_like(residual)
        return residual, add_rms_norm(residual, residual, norm.weight, norm.eps, out, add=False)

    def _attend(
        self,
        index: int,
        layer: _FusedLayer,
        x: Normed,
        attention: TritonAttention,
        plan: TritonPlan,
        only_last: bool,
    ) -> torch.Tensor:
        shape, qkv = attention.shape, layer.qkv
        where = (attention.view(index, plan), plan.table_rows, layer.cos_sin, shape)
        new = None
        fits = can_rotate(shape, x) and not attention.is_quantised
        if layer.head_norm is None and fits:
            q = few_rows_qkv(x, qkv.weight, *where, bias=qkv.bias)
        else:
            keep_k = bool(plan.buffers.work.dense)
            q, new = rope_and_store(qkv(x), *where, layer.head_norm, keep_k=keep_k)
        return attention.attend(index, q, new, plan, only_last=only_last)
