"""Command R and Command R7B: attention and MLP in parallel after one LayerNorm without bias."""

from dataclasses import replace

from parrot.engine.models.families.common import gated, read_rope, sliding_layers, with_windows
from parrot.engine.models.spec import DecoderSpec, HFConfig, LayerSpec, Norms, NormSpec


def cohere(config: HFConfig) -> DecoderSpec:
    return _parallel(config, theta=500000.0)


def cohere2(config: HFConfig) -> DecoderSpec:
    """Only layers with a window rotate their heads."""
    spec, interval = _parallel(config, theta=10000.0), int(config.get("sliding_window_pattern", 4))
    slides = sliding_layers(config, lambda index: (index + 1) % interval != 0)
    window = config.get("sliding_window", 4096)

    def change(index: int, layer: LayerSpec) -> LayerSpec:
        rope = 0 if slides[index] and window is not None else None
        return replace(layer, attention=replace(layer.attention, rope=rope))

    return with_windows(spec.with_layers(change), window, slides)


def _parallel(config: HFConfig, theta: float) -> DecoderSpec:
    rope = read_rope(config, theta=theta, interleaved=True)
    norm = NormSpec("layer", float(config.get("layer_norm_eps") or 1e-5))
    bias = bool(config.get("attention_bias", False))
    spec = gated(config, rope=rope, norm=norm, ties=True).with_attention(
        qkv_bias=bias, o_bias=bias, qk_norm="heads" if config.get("use_qk_norm") else ""
    )
    scale = config.get("logit_scale", 0.0625)
    return replace(
        spec.with_layer_fields(parallel=True, norms=Norms(mlp=False)),
        logit_scale=1.0 if scale is None else float(scale),
    )
