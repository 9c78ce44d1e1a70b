"""Tiny models in GGUF files, in the format of llama.cpp's converter."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from zlib import crc32

import gguf
import numpy as np
from safetensors.torch import load_file

from tests.support.tiny_model import TINY_CONFIGS, make_tiny_model

Arrays = dict[str, np.ndarray[Any, Any]]
Kind = gguf.GGMLQuantizationType
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 32}


# The byte offsets of the float16 scales in a super-block of 256 numbers. The `gguf` package does
# not write these types.
_SUPER_BLOCKS = {Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,)}


def random_super_blocks(kind: Kind, shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    """A random matrix as bytes [rows, bytes per row]. Its numbers are about 0.2 in size."""
    if kind not in _SUPER_BLOCKS:
        numbers = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
        return gguf.quantize(numbers, kind)
    rng, (_, size) = np.random.default_rng(seed), gguf.GGML_QUANT_SIZES[kind]
    blocks = rng.integers(256, size=(shape[0] * shape[1] // 256, size), dtype=np.uint8)
    for place in _SUPER_BLOCKS[kind]:
        # These scales give the numbers of Q4_K a mean of about 0: the mean of scale times code is
        # about the mean offset.
        factors = rng.uniform(0.5, 1.5, len(blocks)) * (0.0005 if place == 0 else 0.004)
        if kind is Kind.Q6_K:
            factors *= 0.05
        blocks[:, place : place + 2] = factors.astype(np.float16)[:, None].view(np.uint8)
    return blocks.reshape(shape[0], -1)


def untie(stored: Arrays, _: object) -> None:
    """A `change` of `write_gguf`: a head that is not the embedding."""
    stored["output.weight"] = stored["token_embd.weight"][::-1].copy()


def write_gguf(
    path: Path,
    architecture: str = "llama",
    change: Callable[[Arrays, gguf.GGUFWriter], None] | None = None,
    kind: Kind | Mapping[str, Kind] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Arrays:
    """Returns the tensors before they are quantised, with the names and layout of Hugging Face.

    `kind`: the type of all matrices. A mapping gives the type of the matrices whose llama.cpp names
    contain its key. Other tensors are not quantised."""
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
        if own_kind in _SUPER_BLOCKS and data.ndim == 2:
            blocks = random_super_blocks(own_kind, data.shape, crc32(name.encode()))
            writer.add_tensor(name, blocks, raw_dtype=own_kind)
        elif own_kind is not None and data.ndim == 2:
            writer.add_tensor(name, gguf.quantize(data, own_kind), raw_dtype=own_kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors
