"""The architectures of the builtin engine: functions from a model's configuration to its spec.

A new architecture is a function in a module of this package and an entry in `ARCHITECTURES`. Only
the module of the loaded architecture is imported."""

from importlib import import_module
from typing import NamedTuple

from parrot.engine.models.quantisation import require_readable
from parrot.engine.models.spec import DecoderSpec, HFConfig
from parrot.utils.config import ConfigError


class Architecture(NamedTuple):
    build: str  # Module and function of this package.
    models: str  # Well-known models, for the docs.


ARCHITECTURES = {  # By the name in config.json.
    "Cohere2ForCausalLM": Architecture("cohere.cohere2", "Command R7B, Command A"),
    "CohereForCausalLM": Architecture("cohere.cohere", "Command R, Aya"),
    "Ernie4_5ForCausalLM": Architecture("llama.ernie", "ERNIE 4.5 0.3B"),
    "GPT2LMHeadModel": Architecture("gpt.gpt2", "GPT-2"),
    "GPTNeoXForCausalLM": Architecture("gpt.gpt_neox", "GPT-NeoX, Pythia"),
    "Gemma2ForCausalLM": Architecture("gemma.gemma2", "Gemma 2"),
    "Gemma3ForCausalLM": Architecture("gemma.gemma3", "Gemma 3 1B and 270M"),
    "Gemma3ForConditionalGeneration": Architecture(
        "gemma.gemma3_with_images", "Gemma 3 4B, 12B and 27B, without images"
    ),
    "Gemma4ForCausalLM": Architecture("gemma.gemma4", "Gemma 4 12B and 31B"),
    "Gemma4ForConditionalGeneration": Architecture(
        "gemma.gemma4_with_images", "Gemma 4 12B and 31B, without images"
    ),
    "GemmaForCausalLM": Architecture("gemma.gemma", "Gemma"),
    "Glm4ForCausalLM": Architecture("glm.glm4", "GLM-4-0414"),
    "GraniteForCausalLM": Architecture("llama.granite", "Granite 3"),
    "LlamaForCausalLM": Architecture("llama.llama", "Llama 2 and 3, Vicuna, SmolLM2, many others"),
    "MinistralForCausalLM": Architecture("llama.ministral", "Ministral 8B"),
    "Mistral3ForConditionalGeneration": Architecture(
        "llama.mistral3", "Mistral Small 3.1 and 3.2, without images"
    ),
    "MistralForCausalLM": Architecture(
        "llama.mistral", "Mistral 7B, Mistral Nemo, Mistral Small 3"
    ),
    "OPTForCausalLM": Architecture("opt.opt", "OPT"),
    "Olmo2ForCausalLM": Architecture("olmo.olmo2", "OLMo 2"),
    "Olmo3ForCausalLM": Architecture("olmo.olmo3", "OLMo 3"),
    "Phi3ForCausalLM": Architecture("phi.phi3", "Phi-3, Phi-3.5, Phi-4, Phi-4-mini"),
    "Qwen2ForCausalLM": Architecture("llama.qwen2", "Qwen2, Qwen2.5, QwQ"),
    "Qwen3ForCausalLM": Architecture("llama.qwen3", "Qwen3 without experts"),
    "SeedOssForCausalLM": Architecture("llama.seed_oss", "Seed-OSS 36B"),
    "SmolLM3ForCausalLM": Architecture("llama.smollm3", "SmolLM3"),
    "Starcoder2ForCausalLM": Architecture("gpt.starcoder2", "StarCoder2"),
    "StableLmForCausalLM": Architecture("stablelm.stablelm", "StableLM 2, StableLM 3B"),
}

# What the engine lacks for other well-known architectures: substrings of their names.
_MISSING = {
    "Moe": "mixtures of experts",
    "Mixtral": "mixtures of experts",
    "GptOss": "mixtures of experts and attention sinks",
    "Llama4": "mixtures of experts and chunked attention",
    "Deepseek": "latent attention and mixtures of experts",
    "KimiK2": "latent attention and mixtures of experts",
    "Gemma3n": "embeddings of each layer",
    "Qwen3Next": "linear attention",
    "Qwen3_5": "linear attention",
    "Mamba": "recurrent layers",
    "Jamba": "recurrent layers",
    "FalconH1": "recurrent layers",
    "Bloom": "positions by ALiBi",
    "MPT": "positions by ALiBi",
    "VL": "images",
    "Llava": "images",
    "ConditionalGeneration": "images or audio",
}
_ELSEWHERE = (
    "use `engine_type: huggingface`, or serve the model with vLLM or SGLang and start "
    "`parrot up URL`"
)


def spec_from_config(config: HFConfig, source: str) -> DecoderSpec:
    """The spec for a configuration.

    Raises `ConfigError` that names `source` if the engine cannot run the model exactly."""
    architectures = config.get("architectures") or ["(none)"]
    name = architectures[0] if isinstance(architectures, list) else architectures
    found = ARCHITECTURES.get(name) if isinstance(name, str) else None
    if found is None:
        raise ConfigError(f"{source}: {_refusal(str(name))}")
    module, _, function = found.build.partition(".")
    try:
        require_readable(config)
        spec: DecoderSpec = getattr(import_module(f"{__name__}.{module}"), function)(config)
    except KeyError as error:
        raise ConfigError(f"{source}: config.json has no {error.args[0]!r}") from None
    except (ConfigError, TypeError, ValueError, ArithmeticError) as error:
        raise ConfigError(f"{source}: {error}") from None
    return spec.for_length(None)


def _refusal(architecture: str) -> str:
    lacks = next((lack for part, lack in _MISSING.items() if part in architecture), "")
    reason = f": it has no {lacks}" if lacks else ""
    return (
        f"architecture {architecture!r:.200} is not supported by the builtin engine{reason}; "
        f"{_ELSEWHERE}. The engine runs {', '.join(ARCHITECTURES)}"
    )
