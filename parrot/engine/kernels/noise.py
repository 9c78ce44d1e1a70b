"""Gumbel noise as a function of seed, position and token.

The token with the largest `logit / temperature + noise` is a sample of the softmax. So the sample
does not depend on the batch or the device. `kernels/sampling_kernels.py` has the same function for
CUDA."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

MIX_1 = 0x21F0AAAD
MIX_2 = 0xD35A2D97
LARGEST_BELOW_ONE = 1.0 - 2.0**-24
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def noise_keys(
    seeds: Sequence[int] | npt.NDArray[np.uint64], positions: Sequence[int] | npt.NDArray[np.int32]
) -> npt.NDArray[np.int32]:
    """64 bits per (seed, position) by SplitMix64, as int32 [n, 2]."""
    with np.errstate(over="ignore"):
        mixed = _mix64(np.asarray(seeds, dtype=np.uint64) + _GOLDEN)
        mixed = _mix64(mixed + np.asarray(positions).astype(np.uint64) * _GOLDEN)
    return mixed.view(np.int32).reshape(-1, 2)


def _mix64(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def gumbel_noise(keys: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The noise float32 [n, num_tokens] of `keys` int32 [n, 2]."""
    token = torch.arange(num_tokens, dtype=torch.int32, device=keys.device)
    bits = _mix32(_mix32(token ^ keys[:, :1]).add_(keys[:, 1:]))
    uniform = bits.bitwise_and_(0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31)
    uniform.clamp_(max=LARGEST_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: torch.Tensor) -> torch.Tensor:
    """Hash the bits of `x` as unsigned numbers, in place."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF)).mul_(MIX_1)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF)).mul_(MIX_2 - 2**32)
    return x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
