"""Whether a model fits in the memory of its device, before it is loaded."""

import logging
from dataclasses import replace
from math import prod

import torch

from parrot.engine.config import BuiltinInstance
from parrot.engine.models.parallel import tokens_of_rank
from parrot.engine.models.spec import DecoderSpec
from parrot.engine.models.tensors import head_shape, num_matrix_weights, num_weights
from parrot.engine.runner.host.copies import available_memory
from parrot.engine.runner.sizes import KvSizes
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

_GIB = 1 << 30


def require_fit(
    source: str,
    spec: DecoderSpec,
    sizes: KvSizes,
    instance: BuiltinInstance,
    device: torch.device,
    *,
    matrix_bytes: float | None = None,
    head_bytes: float | None = None,
) -> None:
    """Raise `ConfigError` if the weights and the KV of a rank exceed the free memory.

    `spec` and `sizes` are those of one rank. `matrix_bytes`: bytes of a number of
    the matrices of layers, if they are quantised. `head_bytes`: the same of the matrix that
    computes logits. Ranks divide its tokens, and those of the embedding."""
    layout = sizes.layout
    is_cuda = device.type == "cuda"
    if is_cuda:
        free, total = torch.cuda.mem_get_info(device)
        where = f"of the {total / _GIB:.1f} GiB of {device} {free / _GIB:.1f} are free"
    else:
        free = available_memory() // instance.tensor_parallel
        where = f"{free / _GIB:.1f} GiB of CPU memory are free"
    own = replace(spec, vocab_size=tokens_of_rank(spec, instance.tensor_parallel))
    weights = num_weights(own) * layout.dtype.itemsize
    takes = f"its weights take {weights / _GIB:.1f} GiB as {layout.dtype}"
    if head_bytes is not None:
        # A tied embedding also stays in the model's type.
        replaced = 0 if spec.tie_embeddings else layout.dtype.itemsize
        weights += int(prod(head_shape(own)) * (head_bytes - replaced))
    if matrix_bytes is not None:
        weights -= int(num_matrix_weights(spec) * (layout.dtype.itemsize - matrix_bytes))
    if matrix_bytes is not None or head_bytes is not None:
        takes = f"its weights take {weights / _GIB:.1f} GiB with quantised matrices"
    if weights > free:
        raise ConfigError(
            f"{source} does not fit: {takes}, and {where}; use a smaller model, or divide it with "
            "`instance.tensor_parallel`"
        )
    # Pools in CPU memory take memory only for blocks that are written.
    if is_cuda and weights + sizes.num_bytes > free:
        most = (free - weights) * sizes.num_blocks // sizes.num_bytes
        raise ConfigError(
            f"{source} does not fit: {takes}, {sizes.num_blocks} KV blocks of {layout.block_size} "
            f"tokens take {sizes.num_bytes / _GIB:.1f} GiB, and {where}; set "
            f"`instance.num_kv_cache_blocks` to at most {most}, or use a smaller model"
        )
    token_kib = layout.block_bytes / layout.block_size / 1024
    logger.info(
        "%s: %s, KV %.1f KiB per token%s; %s", source, takes, token_kib, _inside(sizes), where
    )


def _inside(sizes: KvSizes) -> str:
    """A remark about the KV inside of windows; empty without window slots."""
    layout = sizes.layout
    if not sizes.num_slots:
        return ""
    return f", and {layout.slot_bytes / layout.block_size / 1024:.1f} KiB inside of windows"
