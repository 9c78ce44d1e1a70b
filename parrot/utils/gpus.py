"""The GPUs of this machine."""

from collections.abc import Mapping
from pathlib import Path


def visible_gpus(environ: Mapping[str, str]) -> int:
    """The number of NVIDIA GPUs that CUDA would offer. Does not load CUDA."""
    if (chosen := environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return len([name for name in chosen.split(",") if name.strip() not in ("", "-1")])
    return len(list(Path("/dev").glob("nvidia[0-9]*")))
