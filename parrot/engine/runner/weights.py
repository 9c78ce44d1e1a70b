"""Chooses the format of a model's matrices on a device."""

import logging
from functools import reduce
from importlib.util import find_spec
from math import prod

import torch

from parrot.engine.config import BuiltinConfig
from parrot.engine.kernels.linear.words_layout import has_words
from parrot.engine.models.checkpoint import Checkpoint
from parrot.engine.models.codes import CodeFormat
from parrot.engine.models.fp8 import unaligned
from parrot.engine.models.packed import Head, Weights, code_bytes
from parrot.engine.models.parallel import Partition
from parrot.engine.models.quantisation import group_size, stays_e4m3
from parrot.engine.models.tensors import head_name, head_shape, is_matrix, products_of
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

# Lowest CUDA compute capabilities with conversions of e4m3, and with instructions for bfloat16.
E4M3 = (8, 9)
_CODES = (8, 0)


def choose_weights(
    config: BuiltinConfig,
    checkpoint: Checkpoint,
    shard: Partition | None,
    device: torch.device,
    dtype: torch.dtype,
) -> Weights:
    """How the matrices of layers are kept.

    Raises `ConfigError` for `dtype: fp8` on a device or with sizes that its kernels do not have."""
    if config.dtype not in ("auto", "fp8"):
        return Weights.PLAIN
    if device.type == "cpu" and config.dtype == "auto":
        # The kernel for four bits multiplies bfloat16.
        return Weights.KEPT if dtype is torch.bfloat16 else Weights.PLAIN
    in_e4m3 = config.dtype == "fp8" or stays_e4m3(checkpoint.config)
    reason = _without_kernels(device, E4M3 if in_e4m3 else _CODES)
    if in_e4m3 and reason is None:
        reason = unaligned(_matrix_shapes(checkpoint, shard))
    group = group_size(checkpoint.config)
    if not in_e4m3 and group is not None and not has_words(4, group):
        reason = f"has groups of {group} inputs"
    if config.dtype == "fp8":
        if reason is not None:
            raise ConfigError(f"`dtype`: fp8 {reason}; use auto")
        return Weights.E4M3
    is_quantised = checkpoint.config.get("quantization_config") or checkpoint.gpu_formats
    if reason is not None and is_quantised:
        logger.warning("quantised weights are converted to %s: their format %s", dtype, reason)
    return Weights.KEPT if reason is None else Weights.PLAIN


def bytes_of_matrices(
    weights: Weights,
    checkpoint: Checkpoint,
    shard: Partition | None,
    device: torch.device,
    dtype: torch.dtype,
) -> float | None:
    """Bytes of a number of the layers' matrices, on average; None for those of `dtype`."""
    formats = checkpoint.gpu_formats
    if weights is not Weights.KEPT or device.type != "cuda" or not formats:
        return weights.matrix_bytes(checkpoint.config, device)
    shapes = _matrix_shapes(checkpoint, shard)

    def bytes_of_product(names: list[str]) -> float:
        found = [(checkpoint.gpu_format(name), shapes[name][1]) for name in names]
        kept = [x for x, inputs in found if x is not None and inputs % x.group == 0]
        if len(kept) < len(found):
            return dtype.itemsize
        return code_bytes(reduce(CodeFormat.joined, kept))

    counts = [(names, sum(prod(shapes[name]) for name in names)) for names in products_of(shapes)]
    num_bytes = sum(bytes_of_product(names) * count for names, count in counts)
    return num_bytes / sum(count for _, count in counts)


def choose_head(
    config: BuiltinConfig,
    checkpoint: Checkpoint,
    weights: Weights,
    device: torch.device,
    dtype: torch.dtype,
) -> Head:
    """How the matrix that computes logits is kept. `weights`: see `choose_weights`.

    Raises `ConfigError` for `int8` on a device, in a type or of a width that the kernels do not
    have."""
    spec = checkpoint.spec
    if config.instance.head_dtype == "auto":
        may_keep = device.type == "cuda" and weights is Weights.KEPT and not spec.tie_embeddings
        is_coded = may_keep and checkpoint.gpu_format(head_name(spec)) is not None
        return Head.KEPT if is_coded else Head.PLAIN
    reason, (_, inputs) = _without_kernels(device, _CODES), head_shape(spec)
    if reason is None and dtype is not torch.bfloat16:
        reason = f"needs bfloat16, and `dtype` is {config.dtype}"
    if reason is None and CodeFormat.int8(inputs) is None:
        reason = f"needs a width that 16 divides, and this head has {inputs}"
    if reason is not None:
        raise ConfigError(f"`instance.head_dtype`: int8 {reason}; use auto")
    return Head.INT8


def bytes_of_head(head: Head, checkpoint: Checkpoint) -> float | None:
    """Bytes of a number of the head; None for a head in the model's type."""
    if head is Head.PLAIN:
        return None
    if head is Head.KEPT:
        found = checkpoint.gpu_format(head_name(checkpoint.spec))
    else:
        found = CodeFormat.int8(head_shape(checkpoint.spec)[1])
    return None if found is None else code_bytes(found)


def _without_kernels(device: torch.device, capability: tuple[int, int]) -> str | None:
    """Why a device cannot multiply quantised weights; None if it can."""
    has_device = device.type == "cuda" and torch.cuda.get_device_capability(device) >= capability
    if has_device and find_spec("triton") is not None:
        return None
    needed = ".".join(map(str, capability))
    return f"needs Triton and a CUDA device of compute capability {needed} or later"


def _matrix_shapes(checkpoint: Checkpoint, shard: Partition | None) -> dict[str, tuple[int, ...]]:
    """The shapes of the matrices of a rank's layers, by the decoder's names."""
    shapes = {}
    for name in filter(is_matrix, checkpoint.plans):
        whole, part = checkpoint.plans[name].shape, None if shard is None else shard.part(name)
        shapes[name] = whole if part is None else part.shape(whole)
    return shapes
