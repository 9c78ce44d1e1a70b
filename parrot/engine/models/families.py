"""The architectures of the builtin engine: functions from a model's configuration to its spec.

A new architecture is a function and an entry in `ARCHITECTURES`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from parrot.engine.models.spec import DecoderSpec, HFConfig, TensorNames, read_rope
from parrot.utils.config import ConfigError

_GATED_ACTIVATIONS = ("silu", "swish")  # Two names of the same function.
_OPT_ACTIVATIONS = ("relu", "gelu")
_OPT_POSITION_OFFSET = 2  # The first two learned positions of OPT are unused.
_QWEN3_HEAD_DIM = 128  # Head size of Qwen3 if the configuration has none.

# Limits that exceed all real models many times. A larger value in a malformed configuration is
# rejected, because computing the tensor shapes would take too long.
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "num_layers": 4096,
    "num_heads": 2**14,
    "num_kv_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**21,
    "max_positions": 2**31,
}

_OPT_NAMES = TensorNames(
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


def gated_decoder(config: HFConfig, head_dim: int | None = None) -> DecoderSpec:
    """A decoder with pre-RMSNorm, rotary positions, grouped heads and SwiGLU, without biases."""
    activation = config.get("hidden_act", "silu")
    if activation not in _GATED_ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; use silu")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    return DecoderSpec(
        **_common_sizes(config),
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or head_dim or hidden // heads),
        intermediate_size=int(config["intermediate_size"]),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=read_rope(config),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


def _common_sizes(config: HFConfig) -> dict[str, Any]:
    return {
        "architecture": str(config["architectures"][0]),
        "vocab_size": int(config["vocab_size"]),
        "hidden_size": int(config["hidden_size"]),
        "num_layers": int(config["num_hidden_layers"]),
        "num_heads": int(config["num_attention_heads"]),
        "max_positions": int(config.get("max_position_embeddings", 2048)),
    }


def _llama(config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    mlp_bias = bool(config.get("mlp_bias", False))
    return replace(gated_decoder(config), qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: HFConfig) -> DecoderSpec:
    return replace(gated_decoder(config), sliding_window=config.get("sliding_window"))


def _qwen2(config: HFConfig) -> DecoderSpec:
    """`gated_decoder` with biases of q, k and v."""
    return replace(gated_decoder(config), qkv_bias=True, sliding_window=_qwen_window(config))


def _qwen3(config: HFConfig) -> DecoderSpec:
    """`gated_decoder` with an RMS norm of each head of q and k."""
    bias = bool(config.get("attention_bias", False))
    spec = gated_decoder(config, _QWEN3_HEAD_DIM)
    window = _qwen_window(config)
    return replace(spec, qkv_bias=bias, o_bias=bias, qk_norm=True, sliding_window=window)


def _qwen_window(config: HFConfig) -> int | None:
    return config.get("sliding_window") if config.get("use_sliding_window") else None


def _opt(config: HFConfig) -> DecoderSpec:
    """A decoder with learned positions, LayerNorm, ReLU or GELU, and biases."""
    activation = config.get("activation_function", "relu")
    if activation not in _OPT_ACTIVATIONS:
        raise ConfigError(f"activation_function {activation!r} is not supported; use relu or gelu")
    if not config.get("layer_norm_elementwise_affine", True):
        raise ConfigError("layer_norm_elementwise_affine: false is not supported")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    pre_norm = bool(config.get("do_layer_norm_before", True))
    bias = bool(config.get("enable_bias", True))
    width = int(config.get("word_embed_proj_dim") or hidden)
    return DecoderSpec(
        **_common_sizes(config),
        num_kv_heads=heads,
        head_dim=hidden // heads,
        intermediate_size=int(config["ffn_dim"]),
        norm_eps=1e-5,
        rope=None,
        names=_OPT_NAMES,
        norm="layer",
        activation=activation,
        gated=False,
        pre_norm=pre_norm,
        final_norm=pre_norm and not config.get("_remove_final_layer_norm", False),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
        tie_embeddings=bool(config.get("tie_word_embeddings", True)),
        position_offset=_OPT_POSITION_OFFSET,
        embed_dim=None if width == hidden else width,
    )


ARCHITECTURES: dict[str, Callable[[HFConfig], DecoderSpec]] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _mistral,
    "OPTForCausalLM": _opt,
    "Qwen2ForCausalLM": _qwen2,
    "Qwen3ForCausalLM": _qwen3,
}


def spec_from_config(config: HFConfig, source: str) -> DecoderSpec:
    """The spec for a configuration.

    Raises `ConfigError` that names `source` if the engine cannot run the model exactly."""
    architectures = config.get("architectures") or ["(none)"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    build = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if build is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{source}: architecture {name!r:.200} is not supported by the builtin engine; "
            f"it runs {known}"
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantized safetensors are not supported; use a GGUF file")
    try:
        spec = build(config)
    except KeyError as error:
        raise ConfigError(f"{source}: config.json has no {error.args[0]!r}") from None
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{source}: {error}") from None
    for name, most in _LARGEST.items():
        if not 1 <= getattr(spec, name) <= most:
            raise ConfigError(f"{source}: `{name}` is {getattr(spec, name)}, not 1 to {most}")
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{source}: {spec.num_heads} heads do not divide into {spec.num_kv_heads} KV heads"
        )
    return spec
