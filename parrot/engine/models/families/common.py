"""Reads what several families share from a configuration."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from parrot.engine.models.spec import (
    Activation,
    AttentionSpec,
    DecoderSpec,
    HFConfig,
    LayerSpec,
    MlpSpec,
    NormSpec,
    RopeSpec,
    TensorNames,
)
from parrot.utils.config import ConfigError

# Names of activation functions in configurations.
_ACTIVATIONS: dict[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "relu": "relu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}

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


def equal_layers(config: HFConfig, layer: LayerSpec) -> tuple[LayerSpec, ...]:
    return (layer,) * bounded("num_hidden_layers", config["num_hidden_layers"])


def heads(config: HFConfig, head_dim: int | None = None) -> AttentionSpec:
    """The heads of each layer. `head_dim` is the family's default; None: by the hidden size."""
    hidden = bounded("hidden_size", config["hidden_size"])
    num_heads = bounded("num_attention_heads", config["num_attention_heads"])
    num_kv_heads = bounded("num_key_value_heads", config.get("num_key_value_heads") or num_heads)
    if num_heads % num_kv_heads:
        raise ConfigError(f"{num_heads} heads do not divide into {num_kv_heads} KV heads")
    size = config.get("head_dim") or head_dim or hidden // num_heads
    return AttentionSpec(num_heads, num_kv_heads, bounded("head_dim", size))


def activation_of(config: HFConfig, key: str, default: str) -> Activation:
    name = config.get(key) or default
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ConfigError(f"{key} {name!r:.200} is not supported; the engine supports {known}")
    return _ACTIVATIONS[name]


def gated(
    config: HFConfig,
    *,
    head_dim: int | None = None,
    rope: RopeSpec | None = None,
    norm: NormSpec | None = None,
    activation_key: str = "hidden_act",
    activation: str = "silu",
    ties: bool = False,
) -> DecoderSpec:
    """A decoder with pre-RMSNorm, rotary positions, grouped heads and a gated MLP, without biases.

    The options are the family's defaults, for configurations without the key."""
    inner = bounded("intermediate_size", config["intermediate_size"])
    mlp = MlpSpec(inner, activation_of(config, activation_key, activation))
    return DecoderSpec(
        **sizes(config),
        layers=equal_layers(config, LayerSpec(heads(config, head_dim), mlp)),
        norm=norm or NormSpec(eps=float(config.get("rms_norm_eps", 1e-6))),
        ropes=(rope or read_rope(config),),
        tie_embeddings=bool(config.get("tie_word_embeddings", ties)),
    )


def renamed(names: TensorNames, old: str, new: str) -> TensorNames:
    """`names` with another beginning of the modules that begin with `old`."""
    changed: dict[str, Any] = {
        x.name: new + value.removeprefix(old)
        for x in fields(names)
        if isinstance(value := getattr(names, x.name), str) and value.startswith(old)
    }
    return replace(names, **changed)


def text_part(config: HFConfig, build: Callable[[HFConfig], DecoderSpec]) -> DecoderSpec:
    """The language model of a model that also has images."""
    text = {**config["text_config"], "architectures": config["architectures"]}
    if "tie_word_embeddings" in config:
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    spec = build(text)
    inside = renamed(spec.names, "model.", "model.language_model.")
    old = renamed(
        renamed(spec.names, "model.", "language_model.model."), "lm_", "language_model.lm_"
    )
    return replace(spec, names=inside, other_names=(old,))


def with_windows(spec: DecoderSpec, window: Any, slides: Sequence[bool]) -> DecoderSpec:
    """Give a window to the layers for which `slides` is true. No window has all positions."""
    if window is None or int(window) >= spec.max_positions:
        return spec
    if int(window) < 1:
        raise ConfigError(f"`sliding_window` is {window}, not 1 or more")

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        if not slides[index]:
            return layer
        return replace(layer, attention=replace(layer.attention, window=int(window)))

    return spec.with_layers(change)


def sliding_layers(config: HFConfig, default: Callable[[int], bool]) -> list[bool]:
    """Whether each layer has a window: by `layer_types`, else by `default` of its index."""
    count = bounded("num_hidden_layers", config["num_hidden_layers"])
    types = config.get("layer_types")
    if types is None:
        return [default(index) for index in range(count)]
    kinds = {"sliding_attention": True, "full_attention": False}
    if len(types) != count or not set(types) <= kinds.keys():
        raise ConfigError(f"`layer_types` must be a list of {count} from {', '.join(kinds)}")
    return [kinds[kind] for kind in types]


_ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "factors")


def read_rope(
    config: HFConfig,
    *,
    theta: float = 10000.0,
    partial: float = 1.0,
    interleaved: bool = False,
    parameters: Mapping[str, Any] | None = None,
) -> RopeSpec:
    """Read `rope_parameters`, or `rope_theta` and `rope_scaling` of older configurations.

    `theta` and `partial` are the family's defaults. `parameters` replaces the configuration's."""
    if parameters is None:
        parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    kind: Any = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind not in _ROPE_KINDS:
        known = ", ".join(_ROPE_KINDS)
        raise ConfigError(f"rope scaling {kind!r} is not supported; the engine supports {known}")
    head_dim = heads(config).head_dim
    share = parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor")
    share = float(share or partial)
    num_rotated = int(head_dim * share)
    if not 0.0 < share <= 1.0 or num_rotated % 2 or head_dim % 2:
        raise ConfigError(
            f"partial_rotary_factor {share} of heads of size {head_dim} is not supported; "
            "the rotated dimensions must be an even number"
        )
    rope = RopeSpec(
        theta=float(parameters.get("rope_theta") or config.get("rope_theta") or theta),
        # Dynamic scaling begins after the model's longest context, which the engine never exceeds.
        kind="default" if kind == "dynamic" else kind,
        scaling=parameters,
        num_rotated=None if num_rotated == head_dim else num_rotated,
        interleaved=interleaved,
    )
    if kind == "yarn":
        return _yarn(rope, config)
    return _longrope(rope, config, num_rotated) if kind == "longrope" else rope


def ropes_by_window(config: HFConfig, local: float, whole: float) -> tuple[RopeSpec, RopeSpec]:
    """The ropes of layers with a window, then of other layers; `local`, `whole`: default thetas.

    Older configurations have the scaling of the other layers in `rope_scaling`."""
    nested: dict[str, Any] = dict(config.get("rope_parameters") or {})
    other = {**(config.get("rope_scaling") or {}), **(nested.get("full_attention") or {})}
    own = {key: value for key, value in config.items() if key != "rope_theta"}
    return (
        read_rope(own, theta=local, parameters=nested.get("sliding_attention") or {}),
        read_rope(config, theta=whole, parameters=other),
    )


def _yarn(rope: RopeSpec, config: HFConfig) -> RopeSpec:
    scaling = rope.scaling
    original = float(scaling.get("original_max_position_embeddings") or _max_positions(config))
    factor = float(scaling.get("factor") or _max_positions(config) / original)

    def growth(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0

    amplitude = scaling.get("attention_factor")
    if amplitude is None:
        weight, over = scaling.get("mscale"), scaling.get("mscale_all_dim")
        amplitude = growth(weight) / growth(over) if weight and over else growth(1.0)
    both = {**scaling, "factor": factor, "original_max_position_embeddings": original}
    return replace(rope, scaling=both, amplitude=float(amplitude))


def _longrope(rope: RopeSpec, config: HFConfig, num_rotated: int) -> RopeSpec:
    """The caller sets the factors with `DecoderSpec.for_length`."""
    scaling, positions = rope.scaling, _max_positions(config)
    original = config.get("original_max_position_embeddings")
    original = int(original or scaling.get("original_max_position_embeddings") or positions)
    factors = {key: [float(x) for x in scaling[key]] for key in ("long_factor", "short_factor")}
    if any(len(numbers) != num_rotated // 2 for numbers in factors.values()):
        raise ConfigError(f"`long_factor` and `short_factor` must have {num_rotated // 2} numbers")
    factor, amplitude = float(scaling.get("factor") or positions / original), 1.0
    if factor > 1.0:
        amplitude = math.sqrt(1 + math.log(factor) / math.log(original))
    given = scaling.get("attention_factor")
    return replace(
        rope,
        scaling={"original": original, **factors},
        amplitude=amplitude if given is None else float(given),
    )


def _max_positions(config: HFConfig) -> int:
    return int(config.get("max_position_embeddings", 2048))
