"""OLMo 2: norms of the outputs of attention and MLP, and of all heads of q and k together."""

from dataclasses import replace

from parrot.engine.models.families.common import gated
from parrot.engine.models.spec import DecoderSpec, HFConfig, Norms, NormSpec, TensorNames

_NAMES = TensorNames(
    attn_out_norm="post_attention_layernorm", mlp_out_norm="post_feedforward_layernorm"
)
_NORMS = Norms(attn=False, attn_out=True, mlp=False, mlp_out=True)


def olmo2(config: HFConfig) -> DecoderSpec:
    bias = bool(config.get("attention_bias", False))
    spec = gated(config, norm=NormSpec(eps=float(config.get("rms_norm_eps", 1e-5))))
    spec = spec.with_attention(qkv_bias=bias, o_bias=bias, qk_norm="width")
    return replace(spec.with_layer_fields(norms=_NORMS), names=_NAMES)
