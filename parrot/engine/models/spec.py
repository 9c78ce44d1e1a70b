"""Descriptions of decoders as values.

A model family is a function from a configuration to a `DecoderSpec` (`families`). `decoder.py`
builds all decoders from the same parts, and `tensors.py` derives the tensors of a checkpoint."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, NamedTuple

from parrot.engine.kernels.attention_shape import ScoreRule

HFConfig = Mapping[str, Any]


RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope", "factors", "proportional"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """The parameters of rotary positions."""

    theta: float
    # "longrope" and "factors" (GGUF files) divide each frequency by a factor of its own.
    # "proportional" rotates the first pairs with the frequencies that they have in whole heads.
    kind: RopeKind = "default"
    scaling: Mapping[str, Any] = field(default_factory=dict)  # Parameters of `kind`.
    num_rotated: int | None = None  # The first dimensions of a head that rotate; None: all.
    interleaved: bool = False  # Pairs are dimensions 2i and 2i + 1, otherwise i and i + half.
    amplitude: float = 1.0  # Factor of cosines and sines.

    def rotated(self, head_dim: int) -> int:
        """The number of dimensions that rotate."""
        return head_dim if self.num_rotated is None else self.num_rotated


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names of modules in a checkpoint. Names of a layer's modules are relative to `layer`.

    The defaults are also the decoder's own names for its tensors, in all families. If q, k and v
    have the same name, or gate and up, one tensor has the rows of all, in this order."""

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
    attn_out_norm: str = "self_attn.out_norm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "mlp.out_norm"
    gate: str = "mlp.gate_proj"
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    positions: str = "model.embed_positions"
    project_in: str = "model.project_in"
    project_out: str = "model.project_out"
    joins_heads: bool = False  # A tensor of q, k and v has the rows of each head together.
    transposed: bool = False  # Weights of a layer are [inputs, outputs].


@dataclass(frozen=True, slots=True)
class NormSpec:
    """The norms of hidden states and of heads."""

    kind: Literal["rms", "layer"] = "rms"
    eps: float = 1e-6
    bias: bool = False
    gain_offset: float = 0.0  # Added to the gains of a checkpoint.


# "head" has one gain for all heads of q and one for all heads of k. "heads" has a gain for each
# head. "width" normalises all heads together.
HeadNorms = Literal["", "head", "heads", "width"]


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The attention of one layer."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: int | None = 0  # Index into `DecoderSpec.ropes`; None: heads are not rotated.
    qk_norm: HeadNorms = ""  # Norms of q and k.
    v_norm: bool = False  # An RMS norm of each head of v, without gains.
    v_is_k: bool = False  # v has the weights of k.
    qkv_bias: bool = False
    o_bias: bool = False
    scale: float | None = None  # Factor of scores; None: 1 / sqrt(head_dim).
    softcap: float | None = None  # Scores are softcap * tanh(score / softcap).
    window: int | None = None  # Keys that a token attends to, with its own; None: all.
    # Size of a head in the checkpoint, if heads are padded to `head_dim`; None: `head_dim`.
    unpadded_dim: int | None = None

    def unpadded(self) -> "AttentionSpec":
        return replace(self, head_dim=self.unpadded_dim or self.head_dim)

    @property
    def rule(self) -> ScoreRule:
        head_dim = self.unpadded_dim or self.head_dim
        scale = head_dim**-0.5 if self.scale is None else self.scale
        return ScoreRule(scale, self.softcap, self.window)


Activation = Literal["silu", "relu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class MlpSpec:
    width: int
    activation: Activation = "silu"
    gated: bool = True  # down(act(gate) * up), otherwise down(act(up)).
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms that a layer has."""

    attn: bool = True  # Of the input of attention.
    attn_out: bool = False  # Of the output of attention.
    mlp: bool = True
    mlp_out: bool = False
    after_sum: bool = False  # `attn` and `mlp` normalise the sum with the residual instead.


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer: x += attention(norm(x)), then x += mlp(norm(x))."""

    attention: AttentionSpec
    mlp: MlpSpec
    norms: Norms = Norms()
    # Attention and MLP have the same input. Without `norms.mlp` they also share its norm.
    parallel: bool = False
    residual_scale: float = 1.0  # Factor of the outputs of attention and MLP.
    has_output_scale: bool = False  # A tensor has a factor of the layer's output.


class LayerGroup(NamedTuple):
    """Layers whose KV has the same shape."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    # The layers keep KV only inside their windows (`runner.kv_cache`).
    in_slots: bool = False


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """The shape and the variants of a decoder."""

    architecture: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_positions: int
    norm: NormSpec = NormSpec()
    ropes: tuple[RopeSpec, ...] = ()
    names: TensorNames = TensorNames()
    other_names: tuple[TensorNames, ...] = ()  # For checkpoints that do not have `names`.
    final_norm: bool = True
    tie_embeddings: bool = False
    # Row of the learned positions for position 0; None: the model has no learned positions.
    position_offset: int | None = None
    # Width of token embeddings that are projected to and from `hidden_size`; None: no projections.
    embed_dim: int | None = None
    embed_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # Logits are softcap * tanh(logit / softcap).

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def attention(self) -> AttentionSpec:
        """The attention of the first layer. In most models, all layers have its heads."""
        return self.layers[0].attention

    def layer_groups(self, *, with_slots: bool = False) -> tuple[LayerGroup, ...]:
        """`with_slots`: layers with windows keep KV only inside their windows."""
        shapes = [
            (x.num_kv_heads, x.head_dim, with_slots and x.window is not None)
            for x in (layer.attention for layer in self.layers)
        ]
        return tuple(
            LayerGroup(tuple(i for i, other in enumerate(shapes) if other == shape), *shape)
            for shape in dict.fromkeys(shapes)
        )

    @property
    def window(self) -> int | None:
        """The size of the largest window; None without windows."""
        windows = [x.attention.window for x in self.layers if x.attention.window is not None]
        return max(windows, default=None)

    @property
    def rules(self) -> list[ScoreRule]:
        return [layer.attention.rule for layer in self.layers]

    @property
    def mlp_widths(self) -> frozenset[int]:
        return frozenset(layer.mlp.width for layer in self.layers)

    def for_length(self, max_seq_len: int | None) -> "DecoderSpec":
        """The spec of an engine with contexts up to this length; None: of the model's length."""
        # Original models change all frequencies when a context passes the original length. All
        # contexts of an engine must have the same frequencies, because they share KV.
        length = min(max_seq_len or self.max_positions, self.max_positions)
        return replace(self, ropes=tuple(_rope_for_length(rope, length) for rope in self.ropes))

    def padded(self) -> "DecoderSpec | None":
        """The spec with heads of the next power of two, whose last dimensions are zeros.

        None for heads with norms, whose mean would change."""
        size = self.attention.head_dim
        if any(layer.attention.qk_norm for layer in self.layers):
            return None
        ropes = tuple(replace(rope, num_rotated=rope.rotated(size)) for rope in self.ropes)
        wide = replace(self, ropes=ropes)
        return wide.with_attention(head_dim=1 << (size - 1).bit_length(), unpadded_dim=size)

    def with_layers(self, change: Callable[[int, LayerSpec], LayerSpec]) -> "DecoderSpec":
        """`change` gets the index of each layer and the layer."""
        return replace(self, layers=tuple(change(i, x) for i, x in enumerate(self.layers)))

    def with_attention(self, **changes: Any) -> "DecoderSpec":
        """Change fields of the attention of all layers."""
        return self.with_layers(
            lambda _, layer: replace(layer, attention=replace(layer.attention, **changes))
        )

    def with_layer_fields(self, **changes: Any) -> "DecoderSpec":
        """Change fields of all layers."""
        return self.with_layers(lambda _, layer: replace(layer, **changes))

    def with_mlp(self, **changes: Any) -> "DecoderSpec":
        """Change fields of the MLP of all layers."""
        return self.with_layers(lambda _, layer: replace(layer, mlp=replace(layer.mlp, **changes)))


def _rope_for_length(rope: RopeSpec, length: int) -> RopeSpec:
    if rope.kind != "longrope":
        return rope
    key = "long_factor" if length > rope.scaling["original"] else "short_factor"
    return replace(rope, scaling={**rope.scaling, "factors": rope.scaling[key]})


def is_default(value: Any, *, except_for: Collection[str]) -> bool:
    """Whether all fields of a description have their defaults, except for those named.

    A fast path names the fields that it handles. So it never ignores a field that is added later.
    """
    others = [spec for spec in fields(value) if spec.name not in except_for]
    return all(getattr(value, spec.name) == spec.default for spec in others)
