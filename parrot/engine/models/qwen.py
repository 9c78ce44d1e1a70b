"""Qwen2 (biases on q, k, v) and Qwen3 (RMSNorm on each head of q and k)."""

from parrot.engine.models.llama import gated_decoder
from parrot.engine.models.spec import DecoderSpec, HFConfig

_QWEN3_HEAD_DIM = 128


def qwen2_spec(config: HFConfig) -> DecoderSpec:
    return gated_decoder(config, qkv_bias=True, sliding_window=_window(config))


def qwen3_spec(config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    return gated_decoder(
        config,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        head_dim=_QWEN3_HEAD_DIM,
        sliding_window=_window(config),
    )


def _window(config: HFConfig) -> int | None:
    return config.get("sliding_window") if config.get("use_sliding_window") else None
