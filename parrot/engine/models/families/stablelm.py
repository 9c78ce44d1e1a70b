"""StableLM 2: LayerNorm, and a quarter of each head rotates."""

from parrot.engine.models.families.common import gated, read_rope
from parrot.engine.models.spec import DecoderSpec, HFConfig, Norms, NormSpec
from parrot.utils.config import ConfigError


def stablelm(config: HFConfig) -> DecoderSpec:
    if config.get("qk_layernorm"):
        raise ConfigError("qk_layernorm: true is not supported")
    eps = float(config.get("layer_norm_eps", 1e-5))
    rope, norm = read_rope(config, partial=0.25), NormSpec("layer", eps, bias=True)
    spec = gated(config, rope=rope, norm=norm)
    spec = spec.with_attention(qkv_bias=bool(config.get("use_qkv_bias", False)))
    if not config.get("use_parallel_residual", False):
        return spec
    return spec.with_layer_fields(parallel=True, norms=Norms(mlp=False))
