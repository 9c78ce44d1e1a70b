"""The architectures of the builtin engine: functions from a model's configuration to its spec.

A new architecture is a function in a module of this package and an entry in `ARCHITECTURES`. Only
the module of the loaded architecture is imported."""

from importlib import import_module

from parrot.engine.models.spec import DecoderSpec, HFConfig
from parrot.utils.config import ConfigError

ARCHITECTURES = {  # Module and function, by the name in config.json.
    "Cohere2ForCausalLM": "cohere.cohere2",
    "CohereForCausalLM": "cohere.cohere",
    "GPT2LMHeadModel": "gpt.gpt2",
    "GPTNeoXForCausalLM": "gpt.gpt_neox",
    "Gemma2ForCausalLM": "gemma.gemma2",
    "Gemma3ForCausalLM": "gemma.gemma3",
    "Gemma3ForConditionalGeneration": "gemma.gemma3_with_images",
    "GemmaForCausalLM": "gemma.gemma",
    "Glm4ForCausalLM": "glm.glm4",
    "GraniteForCausalLM": "llama.granite",
    "LlamaForCausalLM": "llama.llama",
    "Mistral3ForConditionalGeneration": "llama.mistral3",
    "MistralForCausalLM": "llama.mistral",
    "OPTForCausalLM": "opt.opt",
    "Olmo2ForCausalLM": "olmo.olmo2",
    "Phi3ForCausalLM": "phi.phi3",
    "Qwen2ForCausalLM": "llama.qwen2",
    "Qwen3ForCausalLM": "llama.qwen3",
    "SmolLM3ForCausalLM": "llama.smollm3",
    "StableLmForCausalLM": "stablelm.stablelm",
}


def spec_from_config(config: HFConfig, source: str) -> DecoderSpec:
    """The spec for a configuration.

    Raises `ConfigError` that names `source` if the engine cannot run the model exactly."""
    architectures = config.get("architectures") or ["(none)"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(
            f"{source}: architecture {name!r:.200} is not supported by the builtin engine; "
            f"it runs {known}"
        )
    if config.get("quantization_config"):
        raise ConfigError(f"{source}: quantized safetensors are not supported; use a GGUF file")
    module, _, function = found.partition(".")
    try:
        spec: DecoderSpec = getattr(import_module(f"{__name__}.{module}"), function)(config)
    except KeyError as error:
        raise ConfigError(f"{source}: config.json has no {error.args[0]!r}") from None
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{source}: {error}") from None
    return spec.for_length(None)
