"""GPT-2, GPT-NeoX and StarCoder2: LayerNorm, biases, and an MLP without a gate."""

from dataclasses import replace
from typing import Any

from parrot.engine.models.families.common import (
    activation_of,
    bounded,
    equal_layers,
    heads,
    read_rope,
    renamed,
    sizes,
    with_windows,
)
from parrot.engine.models.spec import (
    DecoderSpec,
    HFConfig,
    LayerSpec,
    MlpSpec,
    NormSpec,
    TensorNames,
)

_GPT2_KEYS = {  # Usual keys by GPT-2's keys.
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_positions": "max_position_embeddings",
}
_GPT2_NAMES = TensorNames(
    embed="transformer.wte",
    final_norm="transformer.ln_f",
    layer="transformer.h.{i}",
    q="attn.c_attn",
    k="attn.c_attn",
    v="attn.c_attn",
    o="attn.c_proj",
    attn_norm="ln_1",
    mlp_norm="ln_2",
    up="mlp.c_fc",
    down="mlp.c_proj",
    positions="transformer.wpe",
    transposed=True,
)
_NEOX_NAMES = TensorNames(
    embed="gpt_neox.embed_in",
    final_norm="gpt_neox.final_layer_norm",
    lm_head="embed_out",
    layer="gpt_neox.layers.{i}",
    q="attention.query_key_value",
    k="attention.query_key_value",
    v="attention.query_key_value",
    o="attention.dense",
    up="mlp.dense_h_to_4h",
    down="mlp.dense_4h_to_h",
    joins_heads=True,
)


def gpt2(config: HFConfig) -> DecoderSpec:
    usual = {name: config[key] for key, name in _GPT2_KEYS.items() if key in config}
    config = {**config, **usual}
    inner = config.get("n_inner") or 4 * int(config["hidden_size"])
    activation = activation_of(config, "activation_function", "gelu_new")
    norm = NormSpec("layer", float(config.get("layer_norm_epsilon", 1e-5)), bias=True)
    attention = replace(heads(config), rope=None, qkv_bias=True, o_bias=True)
    mlp = MlpSpec(bounded("intermediate_size", inner), activation, gated=False, bias=True)

    def with_scale(index: int, layer: LayerSpec) -> LayerSpec:
        scale = layer.attention.head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
        if config.get("scale_attn_by_inverse_layer_idx", False):
            scale /= index + 1
        return replace(layer, attention=replace(layer.attention, scale=scale))

    spec = DecoderSpec(
        **sizes(config),
        layers=equal_layers(config, LayerSpec(attention, mlp)),
        norm=norm,
        names=_GPT2_NAMES,
        other_names=(renamed(_GPT2_NAMES, "transformer.", ""),),  # The first releases.
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        position_offset=0,
    )
    return spec.with_layers(with_scale)


def gpt_neox(config: HFConfig) -> DecoderSpec:
    old: dict[str, Any] = {}
    if "rotary_emb_base" in config:
        old["rope_theta"] = config["rotary_emb_base"]
    if "rotary_pct" in config:
        old["partial_rotary_factor"] = config["rotary_pct"]
    config = {**old, **config}
    bias = bool(config.get("attention_bias", True))
    attention = replace(heads(config), qkv_bias=bias, o_bias=bias)
    activation = activation_of(config, "hidden_act", "gelu")
    inner = bounded("intermediate_size", config["intermediate_size"])
    mlp = MlpSpec(inner, activation, gated=False, bias=True)
    parallel = bool(config.get("use_parallel_residual", True))
    return DecoderSpec(
        **sizes(config),
        layers=equal_layers(config, LayerSpec(attention, mlp, parallel=parallel)),
        norm=NormSpec("layer", float(config.get("layer_norm_eps", 1e-5)), bias=True),
        ropes=(read_rope(config, partial=0.25),),
        names=_NEOX_NAMES,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def starcoder2(config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("use_bias", True))
    attention = replace(heads(config), qkv_bias=bias, o_bias=bias)
    activation = activation_of(config, "hidden_act", "gelu_pytorch_tanh")
    inner = bounded("intermediate_size", config["intermediate_size"])
    mlp = MlpSpec(inner, activation, gated=False, bias=bias)
    spec = DecoderSpec(
        **sizes(config),
        layers=equal_layers(config, LayerSpec(attention, mlp)),
        norm=NormSpec("layer", float(config.get("norm_epsilon", 1e-5)), bias=True),
        ropes=(read_rope(config),),
        names=TensorNames(up="mlp.c_fc", down="mlp.c_proj"),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
    )
    return with_windows(spec, config.get("sliding_window"), [True] * spec.num_layers)
