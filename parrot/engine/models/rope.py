"""Rotary positions: the angles of each position, and turning q and k by them."""

import math

import torch

from parrot.engine.models.spec import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> torch.Tensor:
    """Radians per position of each pair of dimensions, float32 [head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / float(spec.scaling["factor"])
    if spec.kind == "factors":
        return frequencies / torch.tensor(spec.scaling["factors"], dtype=torch.float32)
    if spec.kind == "llama3":
        return _llama3(frequencies, spec)
    return frequencies


def _llama3(frequencies: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Llama 3.1: long waves are stretched by `factor`, short ones kept, those between blended."""
    factor = float(spec.scaling["factor"])
    low, high = float(spec.scaling["low_freq_factor"]), float(spec.scaling["high_freq_factor"])
    original = float(spec.scaling["original_max_position_embeddings"])
    turns = original * frequencies / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - blend) * frequencies / factor + blend * frequencies


def angle_table(spec: RopeSpec, head_dim: int, num_positions: int) -> torch.Tensor:
    """Cosines, then sines, of every position: float32 [num_positions, head_dim]."""
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(spec, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1)


class Rope:
    """Pairs dimension i with i + head_dim / 2 (the order of Hugging Face checkpoints)."""

    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(spec, head_dim).to(device)

    def angles(
        self, positions: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin [rows, 1, head_dim], the same for all layers of a step."""
        angles = positions.to(torch.float32).unsqueeze(1) * self._frequencies
        cos, sin = angles.cos(), angles.sin()
        return (
            torch.cat((cos, cos), dim=1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), dim=1).to(dtype).unsqueeze(1),
        )


def rotate_(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn heads [rows, heads, head_dim] in place."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    heads.mul_(cos).addcmul_(swapped, sin)
