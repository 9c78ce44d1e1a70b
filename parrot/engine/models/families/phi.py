"""Phi-3, Phi-3.5 and Phi-4: Llama with joined tensors and two sets of frequencies."""

from dataclasses import replace

from parrot.engine.models.families.common import gated, read_rope, with_windows
from parrot.engine.models.spec import DecoderSpec, HFConfig, TensorNames

_NAMES = TensorNames(
    q="self_attn.qkv_proj",
    k="self_attn.qkv_proj",
    v="self_attn.qkv_proj",
    gate="mlp.gate_up_proj",
    up="mlp.gate_up_proj",
)
_ORIGINAL_POSITIONS = 4096  # Original length if the configuration has none.


def phi3(config: HFConfig) -> DecoderSpec:
    parameters = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    if (parameters.get("rope_type") or parameters.get("type") or "default") != "default":
        parameters["rope_type"] = "longrope"  # Older configurations call it su or yarn.
    config = {"original_max_position_embeddings": _ORIGINAL_POSITIONS, **config}
    rope = read_rope(config, parameters=parameters)
    spec = replace(gated(config, rope=rope), names=_NAMES)
    return with_windows(spec, config.get("sliding_window"), [True] * spec.num_layers)
