"""Llama, and the families that differ from it in a few fields."""

from dataclasses import replace

from parrot.engine.models.families.common import (
    gated,
    read_rope,
    sliding_layers,
    text_part,
    with_windows,
)
from parrot.engine.models.spec import DecoderSpec, HFConfig, LayerSpec

_MISTRAL_WINDOW = 4096  # The window of Mistral if the configuration has no key.
_QWEN3_HEAD_DIM = 128  # Head size of Qwen3 if the configuration has none.
_QWEN_FULL_LAYERS = 28  # First layer of Qwen with a window if the configuration has none.
_SMOLLM3_THETA = 2e6
_SEED_HEAD_DIM = 128
_ERNIE_HEAD_DIM, _ERNIE_THETA = 128, 500000.0


def llama(config: HFConfig) -> DecoderSpec:
    return _with_biases(gated(config), config)


def _with_biases(spec: DecoderSpec, config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias)
    return spec.with_mlp(bias=bool(config.get("mlp_bias", False)))


def mistral(config: HFConfig) -> DecoderSpec:
    spec = gated(config)
    window = config.get("sliding_window", _MISTRAL_WINDOW)
    return with_windows(spec, window, [True] * spec.num_layers)


def ministral(config: HFConfig) -> DecoderSpec:
    spec = gated(config)
    slides = sliding_layers(config, lambda index: True)
    return with_windows(spec, config.get("sliding_window", _MISTRAL_WINDOW), slides)


def seed_oss(config: HFConfig) -> DecoderSpec:
    """`gated` with biases of q, k and v."""
    spec = gated(config, head_dim=_SEED_HEAD_DIM).with_attention(
        qkv_bias=bool(config.get("attention_bias", True)),
        o_bias=bool(config.get("attention_out_bias", False)),
    )
    return spec.with_mlp(bias=bool(config.get("mlp_bias", False)))


def ernie(config: HFConfig) -> DecoderSpec:
    """`gated` with rotations of adjacent dimensions."""
    config = {"head_dim": _ERNIE_HEAD_DIM, "rms_norm_eps": 1e-5, **config}
    rope = read_rope(config, theta=_ERNIE_THETA, interleaved=True)
    bias = bool(config.get("use_bias", False))
    spec = gated(config, rope=rope, ties=True).with_attention(qkv_bias=bias, o_bias=bias)
    return spec.with_mlp(bias=bias)


def mistral3(config: HFConfig) -> DecoderSpec:
    """The language model of Mistral Small 3, which also has images."""
    return text_part(config, mistral)


def qwen2(config: HFConfig) -> DecoderSpec:
    """`gated` with biases of q, k and v."""
    return _with_qwen_windows(gated(config).with_attention(qkv_bias=True), config)


def qwen3(config: HFConfig) -> DecoderSpec:
    """`gated` with an RMS norm of each head of q and k."""
    bias = bool(config.get("attention_bias", False))
    spec = gated(config, head_dim=_QWEN3_HEAD_DIM)
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias, qk_norm="head")
    return _with_qwen_windows(spec, config)


def _with_qwen_windows(spec: DecoderSpec, config: HFConfig) -> DecoderSpec:
    first = int(config.get("max_window_layers", _QWEN_FULL_LAYERS))
    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    return with_windows(spec, window, sliding_layers(config, lambda index: index >= first))


def smollm3(config: HFConfig) -> DecoderSpec:
    """`llama` without rotation in every fourth layer."""
    spec = gated(config, rope=read_rope(config, theta=_SMOLLM3_THETA), ties=True)
    interval = int(config.get("no_rope_layer_interval", 4))
    rotates = config.get("no_rope_layers")
    if rotates is None:
        rotates = [(index + 1) % interval != 0 for index in range(spec.num_layers)]

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        rope = 0 if rotates[index] else None
        return replace(layer, attention=replace(layer.attention, rope=rope))

    window = config.get("sliding_window") if config.get("use_sliding_window") else None
    slides = sliding_layers(config, lambda index: not rotates[index])
    return with_windows(_with_biases(spec.with_layers(change), config), window, slides)


def granite(config: HFConfig) -> DecoderSpec:
    """`llama` with factors of embeddings, scores, residuals and logits."""
    spec = _with_biases(gated(config), config)
    spec = spec.with_attention(scale=float(config.get("attention_multiplier", 1.0)))
    return replace(
        spec.with_layer_fields(residual_scale=float(config.get("residual_multiplier", 1.0))),
        embed_scale=float(config.get("embedding_multiplier", 1.0)),
        logit_scale=1.0 / float(config.get("logits_scaling", 1.0)),
    )
