"""Checkpoints with matrices of four bits, rounded to nearest, in the formats of AWQ, GPTQ and
compressed-tensors.

This module follows the descriptions of the formats and does not use the engine's reader. AWQ packs
eight outputs of an input in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ packs eight inputs of an output,
and its first version stores zeros minus one. compressed-tensors packs eight inputs, and stores
signed codes plus eight."""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True)
class Rounded:
    """A rounded matrix: number = (code - zero) * scale. Codes and zeros are integers, and scales
    are float16."""

    codes: np.ndarray[Any, Any]  # Shape: [out, in].
    scales: torch.Tensor  # Shape: [out, groups].
    zeros: np.ndarray[Any, Any]  # Shape: [out, groups].

    def numbers(self) -> torch.Tensor:
        group = self.codes.shape[1] // self.zeros.shape[1]
        whole = torch.from_numpy(self.codes - np.repeat(self.zeros, group, axis=1)).double()
        return (whole * self.scales.double().repeat_interleave(group, 1)).float()


def rounded(numbers: torch.Tensor, group: int, *, symmetric: bool) -> Rounded:
    """Round each number to the nearest code, with a scale and a zero for each group."""
    parts = numbers.double().reshape(len(numbers), -1, group)
    if symmetric:
        scales = (parts.abs().amax(2) / 7.5).half()
        zeros = torch.full(scales.shape, 8.0, dtype=torch.float64)
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / 15).clamp(min=1e-6).half()
        zeros = (-low / scales.double()).round().clamp(0, 15)
    codes = (parts / scales.double().unsqueeze(2)).round() + zeros.unsqueeze(2)
    whole = codes.clamp(0, 15).reshape(numbers.shape)
    return Rounded(whole.long().numpy(), scales, zeros.long().numpy())


def packed_words(codes: np.ndarray[Any, Any], axis: int, order: tuple[int, ...]) -> torch.Tensor:
    """Pack eight codes along an axis into each int32. Code order[i] has bits 4 i to 4 i + 3."""
    moved = np.moveaxis(codes, axis, -1)
    words = np.zeros((*moved.shape[:-1], moved.shape[-1] // 8), dtype=np.uint32)
    for i, place in enumerate(order):
        words |= (moved[..., place::8].astype(np.uint32) & 15) << np.uint32(4 * i)
    return torch.from_numpy(np.ascontiguousarray(np.moveaxis(words, -1, axis)).view(np.int32))


NATURAL = tuple(range(8))


def awq(module: str, one: Rounded) -> Tensors:
    return {
        f"{module}.qweight": packed_words(one.codes.T, 1, AWQ_ORDER),
        f"{module}.qzeros": packed_words(one.zeros.T, 1, AWQ_ORDER),
        f"{module}.scales": one.scales.t().contiguous(),
    }


def gptq(module: str, one: Rounded, *, version: int = 1) -> Tensors:
    zeros = packed_words(one.zeros.T, 1, NATURAL)
    if version == 1:
        zeros = (zeros.long() - 0x11111111).to(torch.int32)
    size = one.codes.shape[1]
    return {
        f"{module}.qweight": packed_words(one.codes.T, 0, NATURAL),
        f"{module}.qzeros": zeros,
        f"{module}.scales": one.scales.t().contiguous(),
        f"{module}.g_idx": (torch.arange(size) // (size // one.zeros.shape[1])).int(),
    }


def gptq_v2(module: str, one: Rounded) -> Tensors:
    return gptq(module, one, version=2)


def pack_quantized(module: str, one: Rounded) -> Tensors:
    tensors = {
        f"{module}.weight_packed": packed_words(one.codes, 1, NATURAL),
        f"{module}.weight_scale": one.scales,
        f"{module}.weight_shape": torch.tensor(one.codes.shape),
    }
    if (one.zeros != 8).any():
        tensors[f"{module}.weight_zero_point"] = packed_words(one.zeros, 0, NATURAL)
    return tensors


_SCHEME = {"weights": {"num_bits": 4, "type": "int", "strategy": "group"}}
FORMATS: dict[str, tuple[Callable[[str, Rounded], Tensors], dict[str, Any]]] = {
    "awq": (awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "desc_act": False}),
    "gptq v2": (gptq_v2, {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}),
    "pack-quantized": (
        pack_quantized,
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": _SCHEME},
        },
    ),
}


def quantise_folder(
    folder: Path, out: Path, kind: str, group: int, *, symmetric: bool = False
) -> Tensors:
    """Copy a model's folder and store the matrices of its layers in four bits. Returns the tensors
    of the same model in plain numbers."""
    shutil.copytree(folder, out)
    packs, config = FORMATS[kind]
    numbers = load_file(folder / "model.safetensors")
    tensors: Tensors = {}
    for name, tensor in numbers.items():
        if not name.endswith("proj.weight"):
            tensors[name] = tensor
            continue
        one = rounded(tensor, group, symmetric=symmetric)
        numbers[name] = one.numbers()
        tensors |= packs(name.removesuffix(".weight"), one)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    path = out / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": config}))
    return numbers
