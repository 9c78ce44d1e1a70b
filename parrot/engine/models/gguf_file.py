"""Reads a GGUF file: metadata, and tensors under their Hugging Face names.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. This module parses the header
itself, because the `gguf` package takes seconds for the 100,000 strings of a tokenizer."""

import mmap
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from parrot.engine.models.codes import CodedMatrix, CodeFormat
from parrot.engine.models.ggml_blocks import CPU_TYPES, GPU_FORMATS, CutOff, coded, dequantise
from parrot.engine.models.parallel import Part
from parrot.engine.models.spec import HFConfig
from parrot.utils.config import ConfigError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
# Limits of a header. A malformed file may claim any sizes.
_MAX_HEADER = 2**28  # Bytes of the header.
_MAX_STRING = 2**24  # Bytes of a string.
_MAX_ITEMS = 2**22  # Items of an array.
_MAX_ENTRIES = 2**16  # Tensors, and metadata values.
_MAX_NESTED = 4  # Levels of nested arrays.
_MAX_DIMS = 8  # Dimensions of a tensor.
# Format codes of `struct`, by GGUF value type.
_SCALARS = dict(enumerate(["B", "b", "H", "h", "I", "i", "f", "?"])) | {10: "Q", 11: "q", 12: "d"}

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Hugging Face's module names -> llama.cpp's names, for a model and for one of its layers.
_MODULES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_LAYER_MODULES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = "model.layers."
_ROPE_FACTORS = "rope_freqs.weight"


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    shape: tuple[int, ...]
    kind: int
    offset: int


class _Header:
    """A cursor over the header of a mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = len(_MAGIC)

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(code, self._data, self.position)
        self.position += struct.calcsize(code)
        return value

    def string(self) -> str:
        length = _bounded(self.scalar("<Q"), _MAX_STRING, "bytes of a string")
        begin, self.position = self.position, self.position + length
        return self._data[begin : self.position].decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        _bounded(self.position, _MAX_HEADER, "bytes of the header")
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar("<" + _SCALARS[kind])
        item_kind, count = self.scalar("<I"), self.scalar("<Q")
        _bounded(count, _MAX_ITEMS, "items of an array")
        _bounded(depth, _MAX_NESTED, "levels of nested arrays")
        if item_kind in _SCALARS:
            values = np.frombuffer(self._data, "<" + _SCALARS[item_kind], count, self.position)
            self.position += values.nbytes
            return values.tolist()
        return [self.value(item_kind, depth + 1) for _ in range(count)]

    def tensor(self) -> tuple[str, _TensorInfo]:
        name = self.string()
        num_dims = _bounded(self.scalar("<I"), _MAX_DIMS, "dimensions")
        dims = [self.scalar("<Q") for _ in range(num_dims)]
        return name, _TensorInfo(tuple(reversed(dims)), self.scalar("<I"), self.scalar("<Q"))


def _bounded(count: int, most: int, what: str) -> int:
    if count > most:
        raise ValueError(f"{count} {what}; the limit is {most}")
    return count


class GGUFFile:
    """`metadata` has llama.cpp's keys. `config` and tensors have Hugging Face's names."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                # A private mapping is writable, which torch requires.
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
            self.metadata, self._tensors, self._data_start = self._read_header()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
        except (struct.error, KeyError, ValueError) as error:
            raise ConfigError(f"{path}: not a usable GGUF file: {error}") from None

    @cached_property
    def config(self) -> HFConfig:
        architecture = str(self.metadata.get("general.architecture"))
        if architecture not in _ARCHITECTURES:
            known = ", ".join(_ARCHITECTURES)
            raise ConfigError(
                f"{self.path}: GGUF architecture {architecture!r} is not supported; use {known}"
            )
        try:
            return self._hf_config(architecture)
        except KeyError as error:
            raise ConfigError(f"{self.path}: the GGUF metadata has no {error.args[0]!r}") from None

    def __contains__(self, name: str) -> bool:
        return _ggml_name(name) in self._tensors

    def get(self, name: str, device: torch.device, part: Part | None = None) -> torch.Tensor:
        """A tensor on a device, in float32, in the layout of Hugging Face checkpoints."""
        whole = self._ordered(name, self._dequantise(_ggml_name(name)))
        fits = part is not None and whole.shape[part.dim] == part.size
        return (part.of(whole) if part is not None and fits else whole).to(device)

    def packed(
        self, name: str, device: torch.device, part: Part | None = None
    ) -> CodedMatrix | None:
        """A matrix of codes in the layout of Hugging Face checkpoints; None for types that the
        device does not multiply as codes."""
        types = CPU_TYPES if device.type == "cpu" else GPU_FORMATS
        matrix = self._coded(name) if self._tensors[_ggml_name(name)].kind in types else None
        if part is not None and matrix is not None and matrix.codes.shape[part.dim] == part.size:
            matrix = part.of_codes(matrix)
        return None if matrix is None else matrix.map(lambda rows: rows.to(device))

    def gpu_formats(self, names: Iterable[str]) -> dict[str, CodeFormat]:
        """The formats, on a GPU, of the matrices that it multiplies as codes."""
        kinds = {name: self._tensors[_ggml_name(name)].kind for name in names}
        return {name: GPU_FORMATS[kind] for name, kind in kinds.items() if kind in GPU_FORMATS}

    def _coded(self, name: str) -> CodedMatrix | None:
        own_name = _ggml_name(name)
        info = self._tensors[own_name]
        with self._reading(own_name):
            matrix = coded(self._data_of(info), info.kind, info.shape)
        return None if matrix is None else matrix.map(partial(self._ordered, name))

    def _ordered(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
        module = name.split(".")[-2]
        if self.metadata["general.architecture"] == "llama" and module in heads:
            return _unpermute(rows, self.config[heads[module]])
        return rows

    def _read_header(self) -> tuple[dict[str, Any], dict[str, _TensorInfo], int]:
        if self._data[: len(_MAGIC)] != _MAGIC:
            raise ValueError("it does not begin with 'GGUF'")
        header = _Header(self._data)
        version = header.scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version} is not one of {_VERSIONS}")
        num_tensors = _bounded(header.scalar("<Q"), _MAX_ENTRIES, "tensors")
        num_values = _bounded(header.scalar("<Q"), _MAX_ENTRIES, "values")
        metadata = {header.string(): header.value(header.scalar("<I")) for _ in range(num_values)}
        tensors = dict(header.tensor() for _ in range(num_tensors))
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an invalid alignment: {alignment!r:.80}")
        return metadata, tensors, -(-header.position // alignment) * alignment

    def _hf_config(self, architecture: str) -> HFConfig:
        get = self.metadata.get
        hidden = self.metadata[f"{architecture}.embedding_length"]
        heads = self.metadata[f"{architecture}.attention.head_count"]
        kv_heads = get(f"{architecture}.attention.head_count_kv", heads)
        if not isinstance(heads, int) or not isinstance(kv_heads, int):
            raise ConfigError(f"{self.path}: head counts that differ by layer are not supported")
        return {
            "architectures": [_ARCHITECTURES[architecture]],
            "hidden_size": hidden,
            "num_hidden_layers": self.metadata[f"{architecture}.block_count"],
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": get(f"{architecture}.attention.key_length", hidden // heads),
            "intermediate_size": self.metadata[f"{architecture}.feed_forward_length"],
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "max_position_embeddings": self.metadata[f"{architecture}.context_length"],
            "rms_norm_eps": self.metadata[f"{architecture}.attention.layer_norm_rms_epsilon"],
            "rope_parameters": self._rope_parameters(architecture),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "sliding_window": get(f"{architecture}.attention.sliding_window"),
        }

    def _rope_parameters(self, architecture: str) -> dict[str, Any]:
        get = self.metadata.get
        theta = get(f"{architecture}.rope.freq_base", 10000.0)
        if _ROPE_FACTORS in self._tensors:  # llama.cpp stores Llama 3.1's scaling as factors.
            factors = self._dequantise(_ROPE_FACTORS).tolist()
            return {"rope_theta": theta, "rope_type": "factors", "factors": factors}
        kind = get(f"{architecture}.rope.scaling.type", "none")
        if kind == "none":
            return {"rope_theta": theta, "rope_type": "default"}
        if kind != "linear":
            raise ConfigError(
                f"{self.path}: rope scaling {kind!r} is not supported in GGUF files; "
                "use the model's safetensors"
            )
        factor = get(f"{architecture}.rope.scaling.factor", 1.0)
        return {"rope_theta": theta, "rope_type": kind, "factor": factor}

    def _dequantise(self, name: str) -> torch.Tensor:
        info = self._tensors[name]
        with self._reading(name):
            return dequantise(self._data_of(info), info.kind, info.shape)

    def _data_of(self, info: _TensorInfo) -> memoryview:
        return memoryview(self._data)[self._data_start + info.offset :]

    @contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        try:
            yield
        except CutOff:
            raise ConfigError(
                f"{self.path}: tensor {name!r} is cut off; the file is incomplete"
            ) from None
        except NotImplementedError as error:
            raise ConfigError(
                f"{self.path}: {name!r} has type {error}, which cannot be dequantized"
            ) from None
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"{self.path}: tensor {name!r} cannot be read: {error}") from None


def _ggml_name(name: str) -> str:
    """llama.cpp's name of a tensor for its Hugging Face name."""
    module, _, parameter = name.rpartition(".")
    if not module.startswith(_LAYER):
        return f"{_MODULES[module]}.{parameter}"
    index, _, part = module.removeprefix(_LAYER).partition(".")
    return f"blk.{index}.{_LAYER_MODULES[part]}.{parameter}"


def _unpermute(weight: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Restore Hugging Face's order of the rows of q and k of the llama architecture."""
    # llama.cpp rotates adjacent pairs of dimensions. Hugging Face pairs dimension i with i + d / 2.
    # llama.cpp's converter reorders the rows accordingly.
    pairs = weight.reshape(num_heads, -1, 2, *weight.shape[1:])
    return pairs.transpose(1, 2).reshape(weight.shape)
