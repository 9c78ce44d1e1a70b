"""Model folders small enough to make in a test, with weights that give lively outputs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from parrot.engine.models.families import spec_from_config
from parrot.engine.models.tensors import source_shapes, tensor_plans
from tests.support.byte_tokenizer import plain_byte_tokenizer

_WEIGHT_STD = 0.2
_VOCAB_SIZE = 259  # one token per byte, then bos, eos and one that the tokenizer does not know
BOS_ID, EOS_ID = 256, 257

_COMMON: dict[str, Any] = {
    "vocab_size": _VOCAB_SIZE,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 512,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
}

_GATED = _COMMON | {
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "llama": _GATED | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "mistral": _GATED
    | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "qwen2": _GATED
    | {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "qwen3": _GATED
    | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16},
    "opt": _COMMON
    | {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "ffn_dim": 80,
        "word_embed_proj_dim": 48,
        "do_layer_norm_before": True,
        "activation_function": "relu",
        "tie_word_embeddings": True,
        "pad_token_id": 1,
    },
}


def make_tiny_model(
    folder: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    overrides: Mapping[str, Any] | None = None,
) -> Path:
    """Write config.json, model.safetensors and tokenizer.json (one token per byte) to `folder`,
    which is created. The same arguments give the same weights."""
    config = TINY_CONFIGS[family] | dict(overrides or {})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer = plain_byte_tokenizer(config["vocab_size"], {"<s>": BOS_ID, "</s>": EOS_ID})
    (folder / "tokenizer.json").write_text(tokenizer.tokenizer_json)
    settings = {"bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    save_file(_random_tensors(config, seed), folder / "model.safetensors", {"format": "pt"})
    return folder


def _random_tensors(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = source_shapes(tensor_plans(spec_from_config(config, "tiny model")))
    tensors = {
        name: torch.empty(shape).normal_(0.0, _WEIGHT_STD, generator=generator)
        for name, shape in sorted(shapes.items())
    }
    for name, tensor in tensors.items():
        if tensor.dim() == 1 and name.endswith(".weight"):  # norms scale around one
            tensor.add_(1.0)
    return tensors
