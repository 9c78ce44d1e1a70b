"""GLM-4 (0414): norms on both sides of attention and MLP, and half of each head rotates."""

from dataclasses import replace

from parrot.engine.models.families.common import gated, read_rope
from parrot.engine.models.spec import DecoderSpec, HFConfig, Norms, TensorNames

_NAMES = TensorNames(
    attn_out_norm="post_self_attn_layernorm",
    mlp_out_norm="post_mlp_layernorm",
    gate="mlp.gate_up_proj",
    up="mlp.gate_up_proj",
)
_NORMS = Norms(attn_out=True, mlp_out=True)
_HEAD_DIM = 128  # Head size if the configuration has none.


def glm4(config: HFConfig) -> DecoderSpec:
    config = {"head_dim": _HEAD_DIM, **config}
    spec = gated(config, rope=read_rope(config, partial=0.5, interleaved=True))
    spec = spec.with_attention(qkv_bias=bool(config.get("attention_bias", True)))
    return replace(spec.with_layer_fields(norms=_NORMS), names=_NAMES)
