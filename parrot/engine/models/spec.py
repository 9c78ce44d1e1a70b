"""Descriptions of decoders as values.

A model family is a function from a configuration to a `DecoderSpec` (`families`). `decoder.py`
builds all decoders from the same parts, and `tensors.py` derives the tensors of a checkpoint."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

HFConfig = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The parameters of rotary positions."""

    theta: float
    # "factors" divides each frequency by its own factor, from a GGUF file.
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # Parameters of `kind`.


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of modules in a checkpoint. Names of a layer's modules are relative to `layer`.

    The defaults are also the decoder's own names for its tensors, in all families."""

    embed: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{i}"
    q: str = "self_attn.q_proj"
    k: str = "self_attn.k_proj"
    v: str = "self_attn.v_proj"
    o: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    attn_norm: str = "input_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    positions: str = "model.embed_positions"
    project_in: str = "model.project_in"
    project_out: str = "model.project_out"


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of hidden states and of heads."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int | None = 0  # Index into `DecoderSpec.ropes`; None: heads are not rotated.
    qk_norm: bool = False  # A norm of each head of q and k.
    qkv_bias: bool = False
    o_bias: bool = False


@dataclass(frozen=True, slots=True)
class MlpSpec:
    width: int
    activation: Literal["silu", "relu", "gelu"] = "silu"
    gated: bool = True  # down(act(gate) * up), otherwise down(act(up)).
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x))."""

    attention: AttentionSpec
    mlp: MlpSpec
    pre_norm: bool = True  # False: norms follow the residual sum.


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a decoder. KV heads are equal in all layers."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm: NormSpec = NormSpec()
    ropes: tuple[RopeSpec, ...] = ()
    names: TensorNames = TensorNames()
    final_norm: bool = True
    tie_embeddings: bool = False
    # Row of the learned positions for position 0; None: the model has no learned positions.
    position_offset: int | None = None
    # Width of token embeddings that are projected to and from `hidden_size`; None: no projections.
    embed_dim: int | None = None
    sliding_window: int | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer. The shape of heads is equal in all layers."""
        return self.layers[0].attention

    @property
    def mlp_widths(self) -> frozenset[int]:
        return frozenset(layer.mlp.width for layer in self.layers)

    @property
    def max_seq_len(self) -> int:
        """The longest context, in tokens."""
        # A context within the sliding window attends to all its tokens, so no mask is necessary.
        return min(self.max_positions, self.sliding_window or self.max_positions)

    def with_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> "DecoderSpec":
        """`change` gets the index of each layer and the layer."""
        return replace(self, layers=tuple(change(i, x) for i, x in enumerate(self.layers)))

    def with_attention(self, **changes: Any) -> "DecoderSpec":
        """Change fields of the attention of all layers."""
        return self.with_layers(
            lambda _, layer: replace(layer, attention=replace(layer.attention, **changes))
        )

    def with_mlp(self, **changes: Any) -> "DecoderSpec":
        """Change fields of the MLP of all layers."""
        return self.with_layers(lambda _, layer: replace(layer, mlp=replace(layer.mlp, **changes)))


def is_default(value: Any, *, except_for: Collection[str]) -> bool:
    """Whether all fields of a description have their defaults, except for those named.

    A fast path names the fields that it handles. So it never ignores a field that is added later.
    """
    others = [spec for spec in fields(value) if spec.name not in except_for]
    return all(getattr(value, spec.name) == spec.default for spec in others)
