"""Launch options that depend on the device."""

from functools import cache

import torch

MATRIX_RATE = 790e12
"""FLOP/s of bfloat16 products, measured on an H200."""


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel may start, as far as its `gdc_wait`, before the one in front of it on the
    stream has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def early_launch(early: bool) -> dict[str, bool]:
    """The launch arguments of a kernel that knows whether it is DEPENDENT. All its programs must
    wait, or the kernel after it might not find what the one before it wrote."""
    return {"DEPENDENT": True, "launch_pdl": True} if early else {"DEPENDENT": False}
