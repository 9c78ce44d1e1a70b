"""Llama and Mistral. The same decoder with other numbers."""

from parrot.engine.models.spec import DecoderSpec, HFConfig, TensorNames, read_rope
from parrot.utils.config import ConfigError

_ACTIVATIONS = {"silu": "silu", "swish": "silu"}


def llama_spec(config: HFConfig) -> DecoderSpec:
    attention_bias = bool(config.get("attention_bias", False))
    return gated_decoder(
        config,
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(config.get("mlp_bias", False)),
    )


def mistral_spec(config: HFConfig) -> DecoderSpec:
    return gated_decoder(config, sliding_window=config.get("sliding_window"))


def gated_decoder(
    config: HFConfig,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    head_dim: int | None = None,
    sliding_window: int | None = None,
) -> DecoderSpec:
    """RMSNorm before each half, rotary positions, grouped heads, SwiGLU."""
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; use silu")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return DecoderSpec(
        architecture=str(config["architectures"][0]),
        vocab_size=int(config["vocab_size"]),
        hidden_size=hidden,
        num_layers=int(config["num_hidden_layers"]),
        num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or head_dim or hidden // heads),
        intermediate_size=int(config["intermediate_size"]),
        max_positions=int(config.get("max_position_embeddings", 2048)),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        names=TensorNames(),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        o_bias=o_bias,
        mlp_bias=mlp_bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=sliding_window,
    )
