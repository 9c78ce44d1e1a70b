"""The host tier's memory, and copies between it and the KV pool, one after the other."""

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
    """A slot of bytes for each block: `slots` uint8 [num_slots, bytes of a block], pinned if wanted
    and possible. A slot has a block's parts one after the other, each as it lies in one of the
    pool's tensors:

        slot   | k and v of layer 0, 1, 2, ... | what else belongs to a block, ... |
    """

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


_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can have without swapping, also if it is one of a group with a limit;
    half of all memory where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = _left_in_group(_CONTROL_GROUP)
    return free << 10 if left is None else min(free << 10, left)


def _left_in_group(folder: Path) -> int | None:
    """Bytes that a control group may still take, the files that it has read aside; None if it has
    no limit, or does not say."""
    try:
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    is_there = "inactive_file" in stat
    cached = int(stat[stat.index("inactive_file") + 1]) if is_there else 0
    return max(0, limit - used + cached)


@dataclass(frozen=True, slots=True)
class ToldTransfers:
    """Rank 0's word of transfers to the other ranks: those that it begins, and the ids of those
    that have `landed` there, and of those that are to have read before the next step writes."""

    begun: tuple[Transfer, ...] = ()
    landed: tuple[int, ...] = ()
    awaited: tuple[int, ...] = ()


NO_TRANSFERS = ToldTransfers()


class HostCopies(Protocol):
    """Does what `TieredRunner` promises of transfers."""

    def warm_up(self, block: int) -> None:
        """Prepare what takes a while once. `block` must be nobody's."""
        ...

    def transfer(self, transfers: Sequence[Transfer]) -> None: ...

    def landed(self, *, wait: bool) -> Sequence[Landed]: ...

    def guard(self, plan: StepPlan) -> Sequence[int]:
        """This step is run next: it must not write to what is still to be read. Returns the
        transfers that it waits for."""
        ...

    def follow(self, told: ToldTransfers) -> None:
        """On a rank besides rank 0, do what that tells, in order with its steps; nobody asks what
        has landed here. Raises if a transfer fails."""
        ...


class PlainCopies:
    """Copies at once, and waits: for pools in the host's memory, or where nothing is gained by
    doing it beside steps."""

    def __init__(self, tensors: Sequence[torch.Tensor], num_slots: int) -> None:
        """`tensors`: see `KVCache.block_tensors`."""
        self._parts = block_parts(tensors)
        memory = HostMemory(self._parts, num_slots)
        self._slots = memory.split(memory.slots)
        self._landed: list[Landed] = []

    def warm_up(self, block: int) -> None:
        """There is nothing to prepare."""

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
        """All was read at once."""
        return ()

    def follow(self, told: ToldTransfers) -> None:
        self.transfer(told.begun)
        self._landed.clear()
