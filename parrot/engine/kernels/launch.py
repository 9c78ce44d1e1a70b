"""How kernels may be launched on a device."""

from functools import cache

import torch


@cache
def starts_early(device: torch.device) -> bool:
    """Whether a kernel launched with `launch_pdl` may start, as far as its `gdc_wait`, before the
    one in front of it on the stream has ended (programmatic dependent launch)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
