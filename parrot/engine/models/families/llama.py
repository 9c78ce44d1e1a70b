"""Llama, and the families that differ from it in a few fields."""

from dataclasses import replace

from parrot.engine.models.families.common import gated
from parrot.engine.models.spec import DecoderSpec, HFConfig

_QWEN3_HEAD_DIM = 128  # Head size of Qwen3 if the configuration has none.


def llama(config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    spec = gated(config).with_attention(qkv_bias=bias, o_bias=bias)
    return spec.with_mlp(bias=bool(config.get("mlp_bias", False)))


def mistral(config: HFConfig) -> DecoderSpec:
    return replace(gated(config), sliding_window=config.get("sliding_window"))


def qwen2(config: HFConfig) -> DecoderSpec:
    """`gated` with biases of q, k and v."""
    spec = gated(config).with_attention(qkv_bias=True)
    return replace(spec, sliding_window=_qwen_window(config))


def qwen3(config: HFConfig) -> DecoderSpec:
    """`gated` with an RMS norm of each head of q and k."""
    bias = bool(config.get("attention_bias", False))
    spec = gated(config, _QWEN3_HEAD_DIM)
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias, qk_norm=True)
    return replace(spec, sliding_window=_qwen_window(config))


def _qwen_window(config: HFConfig) -> int | None:
    return config.get("sliding_window") if config.get("use_sliding_window") else None
