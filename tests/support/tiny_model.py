"""Small model folders for tests, with weights that give varied outputs."""

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
_VOCAB_SIZE = 259  # One token per byte, BOS, EOS, and an id that the tokenizer does not have.
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

_GEMMA = _GATED | {
    "head_dim": 16,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "pad_token_id": 0,
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
    "smollm3": _GATED
    | {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "num_hidden_layers": 4,
        "pad_token_id": 0,
    },
    "granite": _GATED
    | {
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "embedding_multiplier": 3.0,
        "attention_multiplier": 0.2,
        "residual_multiplier": 0.4,
        "logits_scaling": 0.5,
    },
    "phi3": _GATED
    | {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "sliding_window": 20,
        "pad_token_id": 0,
    },
    "olmo2": _GATED
    | {"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2", "pad_token_id": 0},
    "olmo3": _GATED
    | {
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "rope_theta": 500000.0,
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "pad_token_id": 0,
    },
    "ministral": _GATED
    | {
        "architectures": ["MinistralForCausalLM"],
        "model_type": "ministral",
        "head_dim": 8,
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "seed_oss": _GATED
    | {
        "architectures": ["SeedOssForCausalLM"],
        "model_type": "seed_oss",
        "head_dim": 16,
        "attention_out_bias": True,
    },
    "ernie4_5": _GATED
    | {
        "architectures": ["Ernie4_5ForCausalLM"],
        "model_type": "ernie4_5",
        "head_dim": 16,
        "use_bias": True,
        "pad_token_id": 0,
    },
    "starcoder2": _COMMON
    | {
        "architectures": ["Starcoder2ForCausalLM"],
        "model_type": "starcoder2",
        "num_key_value_heads": 2,
        "intermediate_size": 80,
        "sliding_window": 20,
    },
    "glm4": _GATED
    | {
        "architectures": ["Glm4ForCausalLM"],
        "model_type": "glm4",
        "head_dim": 16,
        "attention_bias": True,
        "pad_token_id": 0,
    },
    "stablelm": _GATED
    | {
        "architectures": ["StableLmForCausalLM"],
        "model_type": "stablelm",
        "hidden_size": 96,
        "partial_rotary_factor": 0.25,
        "use_qkv_bias": True,
    },
    "cohere": _GATED
    | {
        "architectures": ["CohereForCausalLM"],
        "model_type": "cohere",
        "tie_word_embeddings": True,
        "logit_scale": 0.5,
        "pad_token_id": 0,
    },
    "cohere2": _GATED
    | {
        "architectures": ["Cohere2ForCausalLM"],
        "model_type": "cohere2",
        "num_hidden_layers": 4,
        "sliding_window": 20,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
    },
    "gemma": _GEMMA | {"architectures": ["GemmaForCausalLM"], "model_type": "gemma"},
    "gemma2": _GEMMA
    | {
        "architectures": ["Gemma2ForCausalLM"],
        "model_type": "gemma2",
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 5.0,
    },
    "gemma3": _GEMMA
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "query_pre_attn_scalar": 24,
        "sliding_window": 20,
        "sliding_window_pattern": 2,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "rope_local_base_freq": 5000.0,
    },
    "gemma4": _GEMMA
    | {
        "architectures": ["Gemma4ForCausalLM"],
        "model_type": "gemma4_text",
        "num_attention_heads": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 20,
        "hidden_size_per_layer_input": 0,
        "global_head_dim": 32,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "final_logit_softcapping": 5.0,
    },
    "gpt2": {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "vocab_size": _VOCAB_SIZE,
        "n_embd": 48,
        "n_layer": 2,
        "n_head": 6,
        "n_positions": 512,
        "bos_token_id": BOS_ID,
        "eos_token_id": EOS_ID,
    },
    "gpt_neox": _COMMON
    | {
        "architectures": ["GPTNeoXForCausalLM"],
        "model_type": "gpt_neox",
        "hidden_size": 96,
        "intermediate_size": 80,
        "rotary_pct": 0.25,
    },
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
        if tensor.dim() == 1 and name.endswith(".weight"):  # The weights of norms are around 1.
            tensor.add_(1.0)
    return tensors
