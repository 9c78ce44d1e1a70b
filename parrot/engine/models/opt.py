"""OPT: learned positions, LayerNorm, ReLU, biases everywhere."""

from parrot.engine.models.spec import DecoderSpec, HFConfig, TensorNames
from parrot.utils.config import ConfigError

_POSITION_OFFSET = 2  # its first two learned positions were meant for padding
_ACTIVATIONS = ("relu", "gelu")

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


def opt_spec(config: HFConfig) -> DecoderSpec:
    activation = config.get("activation_function", "relu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"activation_function {activation!r} is not supported; use relu or gelu")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ConfigError("layer_norm_elementwise_affine: false is not supported")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    width = int(config.get("word_embed_proj_dim") or hidden)
    return DecoderSpec(
        architecture=str(config["architectures"][0]),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=int(config["ffn_dim"]),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        norm_eps=1e-5,
        rope=None,
        names=_NAMES,
        norm="layer",
        activation=activation,
        gated=False,
        pre_norm=pre_norm,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        position_offset=_POSITION_OFFSET,
        embed_dim=None if width == hidden else width,
    )
