"""How a row's token is to be drawn, as eight 32-bit numbers that go to the device (numpy only)."""

import math

import numpy as np
import numpy.typing as npt

from parrot.protocol.sampling import SamplingConfig

NUM_SETTINGS = 8
KEY_0, KEY_1, INVERSE_TEMPERATURE, FLOOR, TOP_K, TOP_P = range(6)
"""Columns. The keys are noise.py's. INVERSE_TEMPERATURE: float32; zero for the largest logit, and
then the rest does not matter. FLOOR: float32, the least score that may be drawn; a score is a
logit's distance to the largest, scaled. TOP_K: zero if any. TOP_P: float32, one if any."""

MIN_TEMPERATURE = 1e-6


def draw_settings(config: SamplingConfig) -> npt.NDArray[np.int32]:
    """All but the keys."""
    row = np.zeros(NUM_SETTINGS, dtype=np.int32)
    if config.takes_the_largest:
        return row
    floats = row.view(np.float32)
    floats[INVERSE_TEMPERATURE] = 1.0 / max(config.temperature, MIN_TEMPERATURE)
    floats[FLOOR] = math.log(config.min_p) if config.min_p else -math.inf
    row[TOP_K] = config.top_k or 0
    floats[TOP_P] = config.top_p
    return row
