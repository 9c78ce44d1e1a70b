"""Builds the decoder of a checkpoint on a device."""

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from parrot.engine.models.checkpoint import Checkpoint
from parrot.engine.models.decoder import Decoder
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def resolve_device(name: str) -> torch.device:
    """`auto` is the GPU if there is one. Raises `ConfigError` for a GPU that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ConfigError(f"`device`: {name} is configured, but torch sees no CUDA device")
    return torch.device(name)


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` is bfloat16 wherever the hardware multiplies it: on such CPUs decoding is nearly
    twice as fast as in float32. CPUs without it would emulate it slowly, so they get float32."""
    if name != "auto":
        return _DTYPES[name]
    if device.type != "cpu":
        return torch.bfloat16
    capabilities: dict[str, bool] = getattr(
        torch.cpu, "get_capabilities", dict
    )()  # newer than our oldest torch
    fast = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
    return torch.bfloat16 if fast else torch.float32


def load_decoder(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> Decoder:
    """Read, convert and pack the weights, a layer per thread at a time."""
    if device.type == "cuda":
        _require_room(checkpoint, dtype, device)

    def take(name: str) -> torch.Tensor:
        return checkpoint.take(name, device).to(device=device, dtype=dtype)

    started = time.perf_counter()
    logger.info("loading %s (%s) as %s", checkpoint.source, checkpoint.spec.architecture, dtype)
    with ThreadPoolExecutor(max(1, min(4, os.cpu_count() or 1))) as pool:
        decoder = Decoder(checkpoint.spec, take, dtype, device, pool.map)
    logger.info("loaded in %.1f s", time.perf_counter() - started)
    return decoder


def _require_room(checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> None:
    count = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    free, total = torch.cuda.mem_get_info(device)
    need = count * dtype.itemsize
    if need > free:
        raise ConfigError(
            f"{checkpoint.source} does not fit: its weights take {need / GIB:.1f} GiB as {dtype}, "
            f"and of the {total / GIB:.1f} GiB of {device} {free / GIB:.1f} are free"
        )
