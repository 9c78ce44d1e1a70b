"""OPT: learned positions, LayerNorm, ReLU or GELU, and biases."""

from dataclasses import replace

from parrot.engine.models.families.common import activation_of, bounded, equal_layers, heads, sizes
from parrot.engine.models.spec import (
    DecoderSpec,
    HFConfig,
    LayerSpec,
    MlpSpec,
    Norms,
    NormSpec,
    TensorNames,
)
from parrot.utils.config import ConfigError

_POSITION_OFFSET = 2  # The first two learned positions of OPT are unused.

_NAMES = TensorNames(
    embed="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{i}",
    o="self_attn.out_proj",
    attn_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    up="fc1",
    down="fc2",
    positions="model.decoder.embed_positions",
    project_in="model.decoder.project_in",
    project_out="model.decoder.project_out",
)


def opt(config: HFConfig) -> DecoderSpec:
    activation = activation_of(config, "activation_function", "relu")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ConfigError("layer_norm_elementwise_affine: false is not supported")
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    norms = Norms(after_sum=not pre_norm)
    attention = replace(heads(config), rope=None, qkv_bias=bias, o_bias=bias)
    inner = bounded("intermediate_size", config["ffn_dim"])
    mlp = MlpSpec(inner, activation, gated=False, bias=bias)
    fields = sizes(config)
    width = int(config.get("word_embed_proj_dim") or fields["hidden_size"])
    return DecoderSpec(
        **fields,
        layers=equal_layers(config, LayerSpec(attention, mlp, norms)),
        norm=NormSpec("layer", eps=1e-5, bias=True),
        names=_NAMES,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        position_offset=_POSITION_OFFSET,
        embed_dim=None if width == fields["hidden_size"] else width,
    )
