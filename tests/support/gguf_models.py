"""Tiny models in GGUF files, as llama.cpp's converter would write them."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

Arrays = dict[str, np.ndarray[Any, Any]]
Kind = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


def write_gguf(
    path: Path,
    architecture: str = "llama",
    change: Callable[[Arrays, gguf.GGUFWriter], None] | None = None,
    kind: Kind | Mapping[str, Kind] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Arrays:
    """Returns the tensors that the file holds before they are quantised, under their Hugging Face
    names and in their layout.

    `kind`: the type of all matrices, or of those whose names contain a string."""
    own = SIZES | dict(sizes or {})
    config = TINY_CONFIGS[architecture] | own
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "tie_word_embeddings": True}
    folder = make_tiny_model(path.parent / "twin", architecture, overrides=config)
    tensors = {k: v.numpy() for k, v in load_file(folder / "model.safetensors").items()}
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(2)
    writer.add_context_length(512)
    writer.add_embedding_length(own["hidden_size"])
    writer.add_feed_forward_length(own["intermediate_size"])
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_key_length(own["head_dim"])
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture.upper()], 2)
    stored = {}
    for name, value in tensors.items():
        data = value
        if architecture == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = 2 if "q_proj" in name else 1
            data = value.reshape(heads, 2, -1, value.shape[1]).swapaxes(1, 2).reshape(value.shape)
        stored[f"{names.get_name(name.removesuffix('.weight'))}.weight"] = data
    if change is not None:
        change(stored, writer)
    for name, data in stored.items():
        own_kind = kind
        if isinstance(kind, Mapping):
            own_kind = next((found for part, found in kind.items() if part in name), None)
        if own_kind is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, own_kind), raw_dtype=own_kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
