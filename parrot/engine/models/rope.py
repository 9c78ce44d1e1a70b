"""Frequencies of rotary positions."""

import math

import torch
import torch.nn.functional as F

from parrot.engine.models.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2].

    They are 0 for the last pairs if a part of the dimensions does not rotate."""
    size = spec.rotated(head_dim)
    exponents = torch.arange(0, size, 2, dtype=torch.float32) / size
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        frequencies = frequencies / float(spec.scaling["factor"])
    elif spec.kind in ("factors", "longrope"):
        frequencies = frequencies / torch.tensor(spec.scaling["factors"], dtype=torch.float32)
    elif spec.kind == "llama3":
        frequencies = _llama3(frequencies, spec)
    elif spec.kind == "yarn":
        frequencies = _yarn(frequencies, spec)
    elif spec.kind == "proportional":
        frequencies[int(float(spec.scaling["share"]) * size // 2) :] = 0.0
        frequencies = frequencies / float(spec.scaling.get("factor", 1.0))
    return F.pad(frequencies, (0, (head_dim - size) // 2))


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1's scaling: low frequencies are divided by `factor`, high frequencies are unchanged,
    and frequencies between them are interpolated."""
    factor = float(spec.scaling["factor"])
    low, high = float(spec.scaling["low_freq_factor"]), float(spec.scaling["high_freq_factor"])
    original = float(spec.scaling["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def _yarn(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """YaRN's scaling, which interpolates between pairs by their number instead of their turns."""
    get, size = spec.scaling.get, 2 * len(frequencies)
    original = float(spec.scaling["original_max_position_embeddings"])

    def pair(turns: float) -> float:
        """The pair that makes this number of turns in the original length."""
        return size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    first, last = pair(float(get("beta_fast") or 32)), pair(float(get("beta_slow") or 1))
    if get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    width = last - first or 0.001
    blend = 1 - ((torch.arange(len(frequencies)) - first) / width).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / float(spec.scaling["factor"]) + blend * frequencies


def angle_table(spec: RopeSpec | None, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position: float32 [num_positions, head_dim].

    `spec` None: no rotation."""
    if spec is None:
        half = torch.ones(num_positions, head_dim // 2)
        return torch.cat((half, torch.zeros_like(half)), dim=1)
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1) * amplitudes(spec, head_dim).repeat(2)


def amplitudes(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """The factor of the cosine and the sine of each pair of dimensions."""
    rotated = torch.full((spec.rotated(head_dim) // 2,), spec.amplitude)
    return F.pad(rotated, (0, head_dim // 2 - len(rotated)), value=1.0)
