"""The host tier's memory: a slot of bytes for each block.

A slot has a block's parts one after the other, each as it lies in one of the pool's tensors:

    slot   | k and v of layer 0, 1, 2, ... | what else belongs to a block, ... |
"""

import logging
import weakref
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

import torch

from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
_SHARE_OF_FREE = 0.5
_MAX_DEFAULT = 32 * GIB
_MAX_TIMES_DEVICE = 4


def host_slots(host_kv_gb: float | None, block_bytes: int, num_blocks: int, free: int) -> int:
    """How many blocks the host tier holds. By default (None) half of the `free` memory, at most 32
    GiB, and at most four times what the device's `num_blocks` hold. `block_bytes`: on all ranks.

    Raises `ConfigError` for more than is free, or less than a block."""
    if host_kv_gb is None:
        most = min(_MAX_DEFAULT, _MAX_TIMES_DEVICE * num_blocks * block_bytes)
        return int(min(_SHARE_OF_FREE * free, most)) // block_bytes
    wanted = int(host_kv_gb * GIB)
    if wanted > free:
        raise ConfigError(
            f"`instance.host_kv_gb`: {host_kv_gb:g} GiB are wanted, but {free / GIB:.1f} are free"
        )
    if 0 < wanted < block_bytes:
        raise ConfigError(f"`instance.host_kv_gb`: one block of KV takes {block_bytes / GIB:g} GiB")
    return wanted // block_bytes


def block_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views uint8 [rows, blocks, bytes] of tensors [layers, 2, kv_heads, blocks, ...], in which
    the bytes of a row of a block are contiguous."""
    parts = []
    for tensor in tensors:
        is_paged = not tensor.is_contiguous()
        memory = tensor.transpose(2, 3) if is_paged else tensor
        rows = memory.flatten(0, 1 if is_paged else 2).flatten(2)
        assert rows.data_ptr() == tensor.data_ptr(), "a block's rows are not contiguous"
        parts.append(rows.view(torch.uint8))
    return parts


class HostMemory:
    """`slots`: uint8 [num_slots, bytes of a block]. Pinned if wanted and possible."""

    def __init__(self, parts: Sequence[torch.Tensor], num_slots: int) -> None:
        """`parts`: see `block_parts`."""
        sizes = [part.shape[0] * part.shape[2] for part in parts]
        self._ends = list(accumulate(sizes))
        self._rows = [part.shape[0] for part in parts]
        self.slots = torch.empty((num_slots, self._ends[-1]), dtype=torch.uint8)
        self.is_pinned = num_slots > 0 and parts[0].is_cuda and _pin(self.slots)

    def split(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """The parts of some slots, [slots, bytes of a block]: views [slots, rows, bytes]."""
        starts = [0, *self._ends[:-1]]
        ranges = zip(starts, self._ends, self._rows, strict=True)
        return [
            slots[:, start:end].view(len(slots), rows, (end - start) // rows)
            for start, end, rows in ranges
        ]


def _pin(memory: torch.Tensor) -> bool:
    """Pin it in place; False, after a warning, if that is not possible. Touching all of it first,
    with many threads, takes less time than pinning what is not there."""
    memory.zero_()
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer, size = memory.data_ptr(), memory.nbytes
    if error := int(runtime.cudaHostRegister(pointer, size, 0)):
        with suppress(RuntimeError):  # or another kernel would report the error
            torch.zeros(1, device="cuda").add_(1)
        logger.warning(
            "%.1f GiB of host memory cannot be pinned (CUDA error %d): copies of KV are slower",
            size / GIB,
            error,
        )
        return False
    finalizer = weakref.finalize(memory, _unpin, pointer)
    finalizer.atexit = False  # the process's end unpins it sooner
    return True


def _unpin(pointer: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]
