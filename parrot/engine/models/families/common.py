"""Reads what several families share from a configuration."""

from typing import Any

from parrot.engine.models.spec import (
    AttentionSpec,
    DecoderSpec,
    HFConfig,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
)
from parrot.utils.config import ConfigError

_GATED_ACTIVATIONS = ("silu", "swish")  # Two names of the same function.

# Limits that exceed all real models many times. A larger value in a malformed configuration is
# rejected, because computing the tensor shapes would take too long.
_LARGEST = {
    "vocab_size": 2**24,
    "hidden_size": 2**18,
    "num_hidden_layers": 4096,
    "num_attention_heads": 2**14,
    "num_key_value_heads": 2**14,
    "head_dim": 2**14,
    "intermediate_size": 2**21,
    "max_position_embeddings": 2**31,
}


def bounded(name: str, value: Any) -> int:
    """A size of the configuration. `name` is its usual key."""
    size = int(value)
    if not 1 <= size <= _LARGEST[name]:
        raise ConfigError(f"`{name}` is {size}, not 1 to {_LARGEST[name]}")
    return size


def sizes(config: HFConfig) -> dict[str, Any]:
    """The fields of a `DecoderSpec` that all families share."""
    positions = config.get("max_position_embeddings", 2048)
    return {
        "architecture": str(config["architectures"][0]),
        "vocab_size": bounded("vocab_size", config["vocab_size"]),
        "hidden_size": bounded("hidden_size", config["hidden_size"]),
        "max_positions": bounded("max_position_embeddings", positions),
    }


def equal_layers(config: HFConfig, attention: AttentionSpec, mlp: MlpSpec) -> tuple[LayerSpec, ...]:
    return (LayerSpec(attention, mlp),) * bounded("num_hidden_layers", config["num_hidden_layers"])


def heads(config: HFConfig, head_dim: int | None = None) -> AttentionSpec:
    """The heads of each layer. `head_dim` is the family's default; None: by the hidden size."""
    hidden = bounded("hidden_size", config["hidden_size"])
    num_heads = bounded("num_attention_heads", config["num_attention_heads"])
    num_kv_heads = bounded("num_key_value_heads", config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} heads do not divide into {num_kv_heads} KV heads")
    size = config.get("head_dim") or head_dim or hidden // num_heads
    return AttentionSpec(num_heads, num_kv_heads, bounded("head_dim", size))


def gated(config: HFConfig, head_dim: int | None = None) -> DecoderSpec:
    """A decoder with pre-RMSNorm, rotary positions, grouped heads and SwiGLU, without biases."""
    activation = config.get("hidden_act", "silu")
    if activation not in _GATED_ACTIVATIONS:
        raise ConfigError(f"hidden_act {activation!r} is not supported; use silu")
    mlp = MlpSpec(bounded("intermediate_size", config["intermediate_size"]))
    return DecoderSpec(
        **sizes(config),
        layers=equal_layers(config, heads(config, head_dim), mlp),
        norm=NormSpec(eps=float(config.get("rms_norm_eps", 1e-6))),
        ropes=(read_rope(config),),
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    )


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
