"""Descriptions of decoders as values.

A model family is a function from a configuration to a `DecoderSpec`. `decoder.py` builds all
decoders from the same parts."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal

from parrot.utils.config import ConfigError

HFConfig = Mapping[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The parameters of rotary positions."""

    theta: float
    # "factors" divides each frequency by its own factor, from a GGUF file.
    kind: Literal["default", "linear", "llama3", "factors"] = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # Parameters of `kind`.


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of tensors in a checkpoint. Names of a layer's tensors are relative to `layer`."""

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
    positions: str = ""
    project_in: str = ""
    project_out: str = ""


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    max_positions: int
    norm_eps: float
    rope: RopeSpec | None
    names: TensorNames = TensorNames()
    norm: Literal["rms", "layer"] = "rms"
    activation: Literal["silu", "relu", "gelu"] = "silu"
    gated: bool = True  # MLP is down(act(gate) * up), otherwise down(act(up)).
    pre_norm: bool = True  # False: norms follow the residual sum.
    final_norm: bool = True
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tie_embeddings: bool = False
    position_offset: int = 0  # Row of the learned positions for position 0.
    # Width of token embeddings that are projected to and from `hidden_size`; None: no projections.
    embed_dim: int | None = None
    sliding_window: int | None = None

    @property
    def max_seq_len(self) -> int:
        """The longest context, in tokens."""
        # A context within the sliding window attends to all its tokens, so no mask is necessary.
        return min(self.max_positions, self.sliding_window or self.max_positions)

    @property
    def num_weights(self) -> int:
        return sum(prod(shape) for shape in self.tensor_shapes().values())

    @property
    def num_layer_weights(self) -> int:
        return sum(prod(shape) for shape in self._layer_shapes().values())

    def tensor_shapes(self) -> Shapes:
        """The shapes of all tensors that a checkpoint must have, by name."""
        shapes = self._top_shapes()
        for i in range(self.num_layers):
            prefix = self.names.layer.format(i=i)
            shapes |= {f"{prefix}.{name}": shape for name, shape in self._layer_shapes().items()}
        return shapes

    def _top_shapes(self) -> Shapes:
        names, hidden, width = self.names, self.hidden_size, self.embed_dim or self.hidden_size
        shapes = _module(names.embed, self.vocab_size, width)
        if not self.tie_embeddings:
            shapes |= _module(names.lm_head, self.vocab_size, width)
        if self.final_norm:
            shapes |= self._norm_shapes(names.final_norm)
        if names.positions:
            shapes |= _module(names.positions, self.max_positions + self.position_offset, hidden)
        if self.embed_dim is not None:
            shapes |= _module(names.project_in, hidden, width)
            shapes |= _module(names.project_out, width, hidden)
        return shapes

    def _layer_shapes(self) -> Shapes:
        names, hidden, inner = self.names, self.hidden_size, self.intermediate_size
        q_width, kv_width = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = (
            _module(names.q, q_width, hidden, bias=self.qkv_bias)
            | _module(names.k, kv_width, hidden, bias=self.qkv_bias)
            | _module(names.v, kv_width, hidden, bias=self.qkv_bias)
            | _module(names.o, hidden, q_width, bias=self.o_bias)
            | _module(names.up, inner, hidden, bias=self.mlp_bias)
            | _module(names.down, hidden, inner, bias=self.mlp_bias)
            | self._norm_shapes(names.attn_norm)
            | self._norm_shapes(names.mlp_norm)
        )
        if self.gated:
            shapes |= _module(names.gate, inner, hidden, bias=self.mlp_bias)
        if self.qk_norm:
            shapes |= _module(names.q_norm, self.head_dim) | _module(names.k_norm, self.head_dim)
        return shapes

    def _norm_shapes(self, name: str) -> Shapes:
        return _module(name, self.hidden_size, bias=self.norm == "layer")


def _module(name: str, *weight: int, bias: bool = False) -> Shapes:
    shapes: Shapes = {f"{name}.weight": weight}
    return shapes | {f"{name}.bias": weight[:1]} if bias else shapes


def read_rope(config: HFConfig) -> RopeSpec:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older configurations."""
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    partial = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if kind not in ("default", "linear", "llama3", "factors"):
        raise ConfigError(f"rope scaling {kind!r} is not supported; use default, linear or llama3")
    if partial != 1.0:
        raise ConfigError(f"partial_rotary_factor {partial} is not supported")
    return RopeSpec(theta, kind, parameters)
