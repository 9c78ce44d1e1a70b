"""Copies between the KV pool and the host's slots, one after the other."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from parrot.engine.core.plan import Landed, StepPlan, Transfer
from parrot.engine.runner.host.memory import HostMemory, block_parts


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
