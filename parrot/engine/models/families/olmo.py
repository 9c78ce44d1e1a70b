"""OLMo 2 and 3: norms of the outputs of attention and MLP, and of all heads together."""

from dataclasses import replace

from parrot.engine.models.families.common import (
    gated,
    ropes_by_window,
    sliding_layers,
    with_windows,
)
from parrot.engine.models.spec import (
    DecoderSpec,
    HFConfig,
    LayerSpec,
    Norms,
    NormSpec,
    RopeSpec,
    TensorNames,
)

_NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"
)
_NORMS = Norms(attn=False, attn_out=True, mlp=False, mlp_out=True)


_OLMO3_THETA = 500000.0


def olmo2(config: HFConfig) -> DecoderSpec:
    return _after(config, None)


def olmo3(config: HFConfig) -> DecoderSpec:
    """Three of four layers have a window, and the scaling of rotations is that of the others."""
    theta = float(config.get("rope_theta") or _OLMO3_THETA)
    ropes = ropes_by_window(config, theta, theta)
    slides = sliding_layers(config, lambda index: (index + 1) % 4 != 0)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        return replace(layer, attention=replace(layer.attention, rope=0 if slides[index] else 1))

    spec = replace(_after(config, ropes[0]).with_layers(change), ropes=ropes)
    return with_windows(spec, config.get("sliding_window", 4096), slides)


def _after(config: HFConfig, rope: RopeSpec | None) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    norm = NormSpec(eps=float(config.get("rms_norm_eps", 1e-5)))
    spec = gated(config, norm=norm, rope=rope)
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias, qk_norm="width")
    return replace(spec.with_layer_fields(norms=_NORMS), names=_NAMES)
