"""The host tier's memory, and synchronous copies between it and the KV pool."""

import logging
import os
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import torch

from parrot.engine.core.steps import Landed, StepPlan, Transfer
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

GIB = 1 << 30
_SHARE_OF_FREE = 0.5  # The default size is at most this share of the free CPU memory.
_MAX_DEFAULT = 32 * GIB  # The default size is at most this many bytes.
_MAX_TIMES_DEVICE = 4  # The default size is at most this multiple of the KV pool.


def host_slots(host_kv_gb: float | None, block_bytes: int, num_blocks: int, free: int) -> int:
    """The number of blocks in the host tier.

    `host_kv_gb` is in GiB. None selects half of the `free` bytes, at most 32 GiB and at most four
    times the size of the pool with `num_blocks`. `block_bytes` is the sum over all ranks.
    Raises `ConfigError` if the size exceeds the free memory or is less than one block."""
    if host_kv_gb is None:
        most = min(_MAX_DEFAULT, _MAX_TIMES_DEVICE * num_blocks * block_bytes)
        return int(min(_SHARE_OF_FREE * free, most)) // block_bytes
    wanted = int(host_kv_gb * GIB)
    if wanted > free:
        raise ConfigError(
            f"`instance.host_kv_gb` is {host_kv_gb:g}, but only {free / GIB:.1f} GiB are free"
        )
    if 0 < wanted < block_bytes:
        raise ConfigError(f"`instance.host_kv_gb`: one KV block takes {block_bytes / GIB:g} GiB")
    return wanted // block_bytes


def block_parts(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views uint8 [rows, blocks, bytes] of tensors [layers, 2, kv_heads, blocks, ...].

    The bytes of one row of one block are contiguous."""
    parts = []
    for tensor in tensors:
        is_paged = not tensor.is_contiguous()
        memory = tensor.transpose(2, 3) if is_paged else tensor
        rows = memory.flatten(0, 1 if is_paged else 2).flatten(2)
        assert rows.data_ptr() == tensor.data_ptr(), "a block's rows are not contiguous"
        parts.append(rows.view(torch.uint8))
    return parts


class HostMemory:
    """`slots` uint8 [num_slots, bytes of a block], pinned if the pool is in GPU memory.

    A slot holds the parts of one block, each in the layout of its tensor in the pool:

        slot   | k and v of layer 0, 1, 2, ... | exponents of layer 0, 1, 2, ... (e4m3 only) |
    """

    def __init__(self, parts: Sequence[torch.Tensor], num_slots: int) -> None:
        """`parts`: the result of `block_parts`."""
        sizes = [part.shape[0] * part.shape[2] for part in parts]
        self._ends = list(accumulate(sizes))
        self._rows = [part.shape[0] for part in parts]
        self.slots = torch.empty((num_slots, self._ends[-1]), dtype=torch.uint8)
        self.is_pinned = num_slots > 0 and parts[0].is_cuda and _pin(self.slots)

    def split(self, slots: torch.Tensor) -> list[torch.Tensor]:
        """Split slots [slots, bytes of a block] into one view [slots, rows, bytes] per part."""
        starts = [0, *self._ends[:-1]]
        ranges = zip(starts, self._ends, self._rows, strict=True)
        return [
            slots[:, start:end].view(len(slots), rows, (end - start) // rows)
            for start, end, rows in ranges
        ]


def _pin(memory: torch.Tensor) -> bool:
    """Pin `memory` in place. Returns False and logs a warning if CUDA refuses."""
    memory.zero_()  # torch's threads fault the pages in faster than pinning does.
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pointer, size = memory.data_ptr(), memory.nbytes
    if error := int(runtime.cudaHostRegister(pointer, size, 0)):
        with suppress(RuntimeError):  # Clear the error, or the next kernel would report it.
            torch.zeros(1, device="cuda").add_(1)
        logger.warning(
            "%.1f GiB of host memory cannot be pinned (CUDA error %d): copies of KV are slower",
            size / GIB,
            error,
        )
        return False
    finalizer = weakref.finalize(memory, _unpin, pointer)
    finalizer.atexit = False  # The end of the process unpins the memory faster.
    return True


def _unpin(pointer: int) -> None:
    torch.cuda.synchronize()
    torch.cuda.cudart().cudaHostUnregister(pointer)  # type: ignore[no-untyped-call]


_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can allocate without swapping, within the limit of its cgroup.

    Half of the physical memory if the system does not report the available memory."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = _left_in_group(_CONTROL_GROUP)
    return free << 10 if left is None else min(free << 10, left)


def _left_in_group(folder: Path) -> int | None:
    """Bytes left below a cgroup's limit, or None without a limit or without a report.

    Inactive file cache counts as free, because the kernel reclaims it."""
    try:
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    is_there = "inactive_file" in stat
    cached = int(stat[stat.index("inactive_file") + 1]) if is_there else 0
    return max(0, limit - used + cached)


@dataclass(frozen=True, slots=True)
class RankTransfers:
    """Rank 0's message about transfers to the other ranks."""

    begun: tuple[Transfer, ...] = ()  # Transfers to start now.
    landed: tuple[int, ...] = ()  # Ids of transfers that have finished on rank 0.
    awaited: tuple[int, ...] = ()  # Ids of transfers whose reads the next step must wait for.


NO_TRANSFERS = RankTransfers()


class HostCopies(Protocol):
    """Implements the transfers of `TieredRunner`."""

    def warm_up(self, block: int) -> None:
        """Do one-time work, such as compiling kernels. `block` must be unused."""
        ...

    def transfer(self, transfers: Sequence[Transfer]) -> None: ...

    def landed(self, *, wait: bool) -> Sequence[Landed]: ...

    def guard(self, plan: StepPlan) -> Sequence[int]:
        """Make the next step wait for transfers that still read blocks to which it writes.

        Returns the ids of these transfers."""
        ...

    def follow(self, transfers: RankTransfers) -> None:
        """On ranks other than 0, apply a message of rank 0, in order with the steps.

        `landed` is never called there. Raises `RuntimeError` if a transfer has failed."""
        ...


class PlainCopies:
    """Copies synchronously. Used for pools in CPU memory and for pools that are not paged."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        """`tensors`: `KVCache.block_tensors`."""
        self._parts = block_parts(tensors)
        memory = HostMemory(self._parts, num_slots)
        self._slots = memory.split(memory.slots)
        self._landed: list[Landed] = []

    def warm_up(self, block: int) -> None:
        """Nothing to do."""

    @torch.inference_mode()
    def transfer(self, transfers: Sequence[Transfer]) -> None:
        for transfer in transfers:
            began = time.perf_counter()
            for part, slots in zip(self._parts, self._slots, strict=True):
                for block, slot in zip(transfer.blocks, transfer.slots, strict=True):
                    if transfer.to_host:
                        slots[slot].copy_(part[:, block])
                    else:
                        part[:, block].copy_(slots[slot])
            seconds = time.perf_counter() - began
            self._landed.append(Landed(transfer.transfer_id, True, seconds))

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        landed, self._landed = self._landed, []
        return landed

    def guard(self, plan: StepPlan) -> Sequence[int]:
        return ()  # Every transfer has finished when `transfer` returns.

    def follow(self, transfers: RankTransfers) -> None:
        self.transfer(transfers.begun)
        self._landed.clear()
