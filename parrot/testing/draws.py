"""Rows to draw tokens for, as the CPU's sampler and as the kernels want them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from parrot.engine.kernels.draw_settings import KEY_0, KEY_1, draw_settings
from parrot.engine.noise_keys import noise_keys
from parrot.engine.plan import SampleSpec
from parrot.protocol.sampling import SamplingConfig

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {},
    {"temperature": 0.5},
    {"temperature": 30.0},
    {"top_k": 7},
    {"top_p": 0.8},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"top_k": 20, "top_p": 0.9, "temperature": 0.6},
    {"top_k": 30, "top_p": 0.95, "min_p": 0.02},
]


def specs_of(configs: Sequence[SamplingConfig], first: int = 0) -> list[SampleSpec]:
    return [SampleSpec(i, c, 2**40 + i, 3 * i + 1) for i, c in enumerate(configs, first)]


def settings_of(specs: Sequence[SampleSpec], device: str = "cpu") -> torch.Tensor:
    rows = np.stack([draw_settings(spec.sampling) for spec in specs])
    keys = noise_keys([s.seed for s in specs], [s.position for s in specs])
    rows[:, KEY_0 : KEY_1 + 1] = keys
    return torch.from_numpy(rows).to(device)
