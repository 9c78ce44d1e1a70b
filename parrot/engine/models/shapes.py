"""Configurations of well-known models, for `load_format: dummy` (random weights)."""

from typing import Any

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-5,
}

_LLAMA_3 = _LLAMA | {
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "head_dim": 128,
    "num_key_value_heads": 8,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}

_MISTRAL: dict[str, Any] = {
    "architectures": ["MistralForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32768,
    "max_position_embeddings": 32768,
    "sliding_window": None,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}

_GEMMA_3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "head_dim": 256,
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "query_pre_attn_scalar": 256,
    "sliding_window": 1024,
    "rope_scaling": {"rope_type": "linear", "factor": 8.0},
}

KNOWN_SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-7b": _LLAMA
    | {"intermediate_size": 11008, "vocab_size": 32000, "max_position_embeddings": 4096},
    "llama-2-13b": _LLAMA
    | {
        "hidden_size": 5120,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "intermediate_size": 13824,
        "vocab_size": 32000,
        "max_position_embeddings": 4096,
    },
    "llama-3.1-8b": _LLAMA_3 | {"intermediate_size": 14336},
    "llama-3.1-70b": _LLAMA_3
    | {
        "hidden_size": 8192,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "intermediate_size": 28672,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "qwen3-8b": _QWEN3
    | {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
    },
    "qwen2.5-7b": {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "mistral-7b": _MISTRAL,
    "gemma-2-9b": {
        "architectures": ["Gemma2ForCausalLM"],
        "hidden_size": 3584,
        "intermediate_size": 14336,
        "num_hidden_layers": 42,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
    },
    "gemma-3-4b": _GEMMA_3
    | {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "gemma-3-12b": _GEMMA_3
    | {
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
    },
    "gemma-3-27b": _GEMMA_3
    | {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_hidden_layers": 62,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "head_dim": 128,
        "query_pre_attn_scalar": 168,
    },
    "phi-3-mini": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 32064,
        "max_position_embeddings": 4096,
        "sliding_window": 2047,
        "rms_norm_eps": 1e-5,
    },
    "phi-4": {
        "architectures": ["Phi3ForCausalLM"],
        "hidden_size": 5120,
        "intermediate_size": 17920,
        "num_hidden_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 10,
        "vocab_size": 100352,
        "max_position_embeddings": 16384,
        "rms_norm_eps": 1e-5,
        "rope_theta": 250000.0,
    },
    "olmo-2-7b": {
        "architectures": ["Olmo2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 11008,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "vocab_size": 100352,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 500000.0,
    },
    "granite-3.3-8b": {
        "architectures": ["GraniteForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 12800,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 49159,
        "max_position_embeddings": 131072,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.0078125,
        "residual_multiplier": 0.22,
        "logits_scaling": 16.0,
        "rope_theta": 1e7,
        "tie_word_embeddings": True,
    },
    "smollm3-3b": {
        "architectures": ["SmolLM3ForCausalLM"],
        "hidden_size": 2048,
        "intermediate_size": 11008,
        "num_hidden_layers": 36,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "vocab_size": 128256,
        "max_position_embeddings": 65536,
        "rope_theta": 5e6,
    },
    "glm-4-9b": {
        "architectures": ["Glm4ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 13696,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "vocab_size": 151552,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-5,
    },
    "command-r7b": {
        "architectures": ["Cohere2ForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 256000,
        "max_position_embeddings": 132096,
        "sliding_window": 4096,
        "rope_theta": 50000.0,
        "logit_scale": 0.25,
    },
}
