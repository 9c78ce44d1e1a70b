"""Whether a model fits in the memory of its device, before it is loaded."""

import logging

import torch

from parrot.engine.config import BuiltinInstance
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.models.tensors import num_weights
from parrot.engine.runner.host.copies import available_memory
from parrot.engine.runner.kv_cache import KVLayout
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def require_fit(
    source: str,
    spec: DecoderSpec,
    layout: KVLayout,
    instance: BuiltinInstance,
    device: torch.device,
) -> None:
    """Raise `ConfigError` if the weights and the KV of a rank exceed the free memory.

    `spec` and `layout` are those of one rank."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        free, total = torch.cuda.mem_get_info(device)
        where = f"of the {total / _GIB:.1f} GiB of {device} {free / _GIB:.1f} are free"
    else:
        free = available_memory() // instance.tensor_parallel
        where = f"{free / _GIB:.1f} GiB of CPU memory are free"
    weights = num_weights(spec) * layout.dtype.itemsize
    takes = f"its weights take {weights / _GIB:.1f} GiB as {layout.dtype}"
    if weights > free:
        raise ConfigError(
            f"{source} does not fit: {takes}, and {where}; use a smaller model, or divide it with "
            "`instance.tensor_parallel`"
        )
    num_blocks = instance.num_kv_cache_blocks or 1
    blocks = num_blocks * layout.block_bytes
    # Pools in CPU memory take memory only for blocks that are written.
    if is_cuda and weights + blocks > free:
        most = (free - weights) // layout.block_bytes
        raise ConfigError(
            f"{source} does not fit: {takes}, {num_blocks} KV blocks of {layout.block_size} tokens "
            f"take {blocks / _GIB:.1f} GiB, and {where}; set `instance.num_kv_cache_blocks` to at "
            f"most {most}, or use a smaller model"
        )
    token_bytes = layout.block_bytes / layout.block_size
    logger.info("%s: %s, KV %.1f KiB per token; %s", source, takes, token_bytes / 1024, where)
