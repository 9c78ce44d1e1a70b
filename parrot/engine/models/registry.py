"""The architectures that the builtin engine runs. A new one is an entry here."""

from collections.abc import Callable

from parrot.engine.models.llama import llama_spec, mistral_spec
from parrot.engine.models.opt import opt_spec
from parrot.engine.models.qwen import qwen2_spec, qwen3_spec
from parrot.engine.models.spec import DecoderSpec, HFConfig
from parrot.utils.config import ConfigError

ARCHITECTURES: dict[str, Callable[[HFConfig], DecoderSpec]] = {
    "LlamaForCausalLM": llama_spec,
    "MistralForCausalLM": mistral_spec,
    "OPTForCausalLM": opt_spec,
    "Qwen2ForCausalLM": qwen2_spec,
    "Qwen3ForCausalLM": qwen3_spec,
}


def spec_from_config(config: HFConfig, source: str) -> DecoderSpec:
    """Raises `ConfigError`, naming `source`, for what the engine cannot run exactly."""
    architectures = config.get("architectures") or ["(none)"]
    build = ARCHITECTURES.get(architectures[0])
    if build is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{source}: architecture {architectures[0]!r} is not supported by the builtin engine; "
            f"it runs {known}"
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantized safetensors are not supported; use a GGUF file")
    try:
        spec = build(config)
    except KeyError as error:
        raise ConfigError(f"{source}: config.json has no {error.args[0]!r}") from None
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{source}: {error}") from None
    if spec.num_heads % spec.num_kv_heads:
        raise ConfigError(
            f"{source}: {spec.num_heads} heads do not divide into {spec.num_kv_heads} KV heads"
        )
    return spec
