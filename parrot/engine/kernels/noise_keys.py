"""What the noise of a sample depends on, as two 32-bit numbers (numpy only)."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """64 bits for each (seed, position), by SplitMix64: int32 [n, 2]."""
    with np.errstate(over="ignore"):
        mixed = _mix64(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        mixed = _mix64(mixed + np.asarray(positions).astype(np.uint64) * _GOLDEN)
    return mixed.view(np.int32).reshape(-1, 2)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
