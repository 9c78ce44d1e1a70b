"""Gemma 1 to 4 (text): scaled embeddings, and from 2 on norms on both sides and windows."""

from dataclasses import replace
from typing import Any

from parrot.engine.models.families.common import (
    gated,
    heads,
    read_rope,
    ropes_by_window,
    sliding_layers,
    text_part,
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
from parrot.utils.config import ConfigError

_HEAD_DIM = 256  # Head size if the configuration has none.
_BOTH_SIDES = Norms(attn_out=True, mlp_out=True)
_NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_out_norm="post_feedforward_layernorm",
)
_GEMMA3_DEFAULTS = {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131072,
}
_LOCAL, _GLOBAL = 0, 1  # Indices of the ropes of Gemma 3 and 4.


def gemma(config: HFConfig) -> DecoderSpec:
    if config.get("hidden_act") == "gelu":  # A name of older releases for the approximation.
        config = {**config, "hidden_act": "gelu_pytorch_tanh"}
    return _scaled(config, "hidden_act", read_rope(config))


def gemma2(config: HFConfig) -> DecoderSpec:
    spec = _both_sides(_scaled(config, "hidden_activation", read_rope(config)), config)
    slides = sliding_layers(config, lambda index: (index + 1) % 2 != 0)
    return with_windows(spec, config.get("sliding_window", 4096), slides)


def gemma3(config: HFConfig) -> DecoderSpec:
    """Layers with a window have a rope of their own."""
    interval = int(config.get("sliding_window_pattern", 6))
    slides = sliding_layers(config, lambda index: (index + 1) % interval != 0)
    ropes = ropes_by_window(config, float(config.get("rope_local_base_freq", 10000.0)), 1e6)
    spec = _both_sides(_scaled(config, "hidden_activation", *ropes), config)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        rope = _LOCAL if slides[index] else _GLOBAL
        return replace(layer, attention=replace(layer.attention, qk_norm="head", rope=rope))

    return with_windows(spec.with_layers(change), config.get("sliding_window", 4096), slides)


def gemma3_with_images(config: HFConfig) -> DecoderSpec:
    """The language model of Gemma 3. Its configuration leaves out what is the default."""
    text = {**_GEMMA3_DEFAULTS, **config["text_config"]}
    return text_part({"tie_word_embeddings": True, **config, "text_config": text}, gemma3)


def gemma4(config: HFConfig) -> DecoderSpec:
    """Layers without a window have larger heads, which may have the keys as values."""
    _require_dense(config)
    slides = sliding_layers(config, lambda index: (index + 1) % 6 != 0)
    slides[-1] = False
    config = {"head_dim": _HEAD_DIM, **config}
    large = {**config, "head_dim": config.get("global_head_dim") or 512}
    same = bool(config.get("attention_k_eq_v", False))
    if same:
        large["num_key_value_heads"] = (
            config.get("num_global_key_value_heads") or (config["num_key_value_heads"])
        )
    attention, norm = heads(large), NormSpec(eps=float(config.get("rms_norm_eps", 1e-6)))
    spec = _both_sides(_scaled(config, "hidden_activation", *_gemma4_ropes(config, large)), config)
    spec = spec.with_attention(qk_norm="head", scale=1.0, v_norm=True)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        own = layer.attention
        if not slides[index]:
            size, kv_heads = attention.head_dim, attention.num_kv_heads
            own = replace(own, head_dim=size, num_kv_heads=kv_heads, rope=_GLOBAL, v_is_k=same)
        return replace(layer, attention=own, has_output_scale=True)

    spec = replace(spec.with_layers(change), norm=norm)
    return with_windows(spec, config.get("sliding_window", 512), slides)


def gemma4_with_images(config: HFConfig) -> DecoderSpec:
    return text_part(config, gemma4)


def _require_dense(config: HFConfig) -> None:
    refused = {
        "hidden_size_per_layer_input": config.get("hidden_size_per_layer_input", 256),
        "num_kv_shared_layers": config.get("num_kv_shared_layers", 0),
        "enable_moe_block": config.get("enable_moe_block", False),
        "use_double_wide_mlp": config.get("use_double_wide_mlp", False),
        "per_layer_config": config.get("per_layer_config"),
    }
    for key, value in refused.items():
        if value:
            raise ConfigError(f"{key}: {value!r:.80} is not supported")


def _gemma4_ropes(config: HFConfig, large: HFConfig) -> tuple[RopeSpec, RopeSpec]:
    nested: dict[str, Any] = dict(config.get("rope_parameters") or {})
    local = nested.get("sliding_attention") or {}
    whole = nested.get("full_attention") or {
        "rope_type": "proportional",
        "partial_rotary_factor": 0.25,
    }
    if whole.get("rope_type") != "proportional":
        return read_rope(config, parameters=local), read_rope(large, theta=1e6, parameters=whole)
    share = float(whole.get("partial_rotary_factor", 1.0))
    scaling = {"share": share, "factor": float(whole.get("factor") or 1.0)}
    theta = float(whole.get("rope_theta") or 1e6)
    return read_rope(config, parameters=local), RopeSpec(theta, "proportional", scaling)


def _both_sides(spec: DecoderSpec, config: HFConfig) -> DecoderSpec:
    """Norms on both sides of attention and MLP, and caps of scores and logits."""
    cap = config.get("attn_logit_softcapping", 50.0 if "Gemma2" in spec.architecture else None)
    last = config.get("final_logit_softcapping", 30.0 if "Gemma2" in spec.architecture else None)
    scale = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
    spec = spec.with_attention(scale=scale, softcap=cap).with_layer_fields(norms=_BOTH_SIDES)
    return replace(spec, names=_NAMES, logit_softcap=last)


def _scaled(config: HFConfig, activation_key: str, *ropes: RopeSpec) -> DecoderSpec:
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ConfigError("use_bidirectional_attention is not supported")
    config = {"head_dim": _HEAD_DIM, **config}
    norm = NormSpec(eps=float(config.get("rms_norm_eps", 1e-6)), gain_offset=1.0)
    spec = gated(
        config,
        norm=norm,
        rope=ropes[0],
        activation_key=activation_key,
        activation="gelu_pytorch_tanh",
        ties=True,
    )
    bias = bool(config.get("attention_bias", False))
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias)
    return replace(spec, ropes=ropes, embed_scale=spec.hidden_size**0.5)
