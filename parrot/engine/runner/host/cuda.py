"""Copies between the KV pool on a CUDA device and the host's slots, beside the steps.

Each direction has a stream, and a piece of memory on the device in which blocks lie as they do in
a slot, so that every copy across the bus is a large one:

    steps   | N            | N + 1                  | N + 2 ...
    out                    | gather | copy to slots | gather | copy to slots
    back                   | copy from slots | scatter | copy from slots | scatter

A transfer begins when the steps launched before it have run. What orders the rest are events: a
step that writes to a block which is still to be gathered waits for that, and so does what comes
back into such a block. A step reads what came back only after the host has seen it land.
"""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from parrot.engine.core.plan import Landed, StepPlan, Transfer
from parrot.engine.kernels.block_copies import gather_blocks, scatter_blocks
from parrot.engine.runner.device import noticing_loss
from parrot.engine.runner.host.memory import HostMemory, block_parts

logger = logging.getLogger(__name__)

_STAGED_BYTES = 64 << 20  # of each direction's memory on the device, or one block


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A transfer under way. `blocks` are those of the device that it reads, until its event `read`;
    none if it comes back."""

    transfer_id: int
    blocks: frozenset[int]
    began: torch.cuda.Event
    read: torch.cuda.Event
    done: torch.cuda.Event


class _Lane:
    """One direction: a stream, and memory for a few blocks."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        slot_bytes = memory.slots.shape[1]
        count = max(1, _STAGED_BYTES // slot_bytes)
        self.staged = torch.empty((count, slot_bytes), dtype=torch.uint8, device=device)
        self.parts = [part.view(torch.int64) for part in memory.split(self.staged)]
        self.flights: deque[_Flight] = deque()


class CudaCopies:
    """`HostCopies` of one pool. Called from the thread that launches steps, when all those before
    are launched."""

    def __init__(self, tensors: Sequence[torch.Tensor], block_size: int, num_slots: int) -> None:
        """`tensors`: see `KVCache.block_tensors`, of a paged one."""
        parts = block_parts(tensors)
        memory = HostMemory(parts, num_slots)
        self._device = tensors[0].device
        self._block_size = block_size
        self._slots = memory.slots
        self._parts = [part.view(torch.int64) for part in parts]
        self._out, self._back = _Lane(memory, self._device), _Lane(memory, self._device)
        self._failed: list[Landed] = []

    @torch.inference_mode()
    def warm_up(self, block: int) -> None:
        """Compile the kernels; `block` must be nobody's."""
        places = torch.tensor([block], dtype=torch.int32, device=self._device)
        for part, piece in zip(self._parts, self._out.parts, strict=True):
            gather_blocks(part, places, piece[:1])
            scatter_blocks(piece[:1], places, part)

    @torch.inference_mode()
    def transfer(self, transfers: Sequence[Transfer]) -> None:
        with noticing_loss(self._device):
            launched = _event()
            launched.record()
            for transfer in transfers:
                self._begin(transfer, launched)

    def _begin(self, transfer: Transfer, launched: torch.cuda.Event) -> None:
        lane = self._out if transfer.to_host else self._back
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(launched)
            if not transfer.to_host:
                self._wait_for_readers(lane.stream, transfer.blocks)
            blocks = frozenset(transfer.blocks if transfer.to_host else ())
            began, done = _event(timed=True), _event(timed=True)
            flight = _Flight(transfer.transfer_id, blocks, began, _event(), done)
            began.record()
            try:
                self._copy(transfer, lane, flight.read)
            except RuntimeError:
                lane.stream.synchronize()  # nothing of it is on its way any more
                logger.exception("%d blocks could not be copied", len(transfer.blocks))
                self._failed.append(Landed(transfer.transfer_id, False, 0.0))
                return
            done.record()
        lane.flights.append(flight)

    def _copy(self, transfer: Transfer, lane: _Lane, read: torch.cuda.Event) -> None:
        """On the lane's stream, as many blocks at a time as it has memory for."""
        is_cuda = self._device.type == "cuda"
        places = torch.tensor(transfer.blocks, dtype=torch.int32, pin_memory=is_cuda)
        blocks = places.to(self._device, non_blocking=True)
        for at in range(0, len(transfer.blocks), len(lane.staged)):
            slots = transfer.slots[at : at + len(lane.staged)]
            some = blocks[at : at + len(slots)]
            pieces = [piece[: len(slots)] for piece in lane.parts]
            pairs = list(zip(self._parts, pieces, strict=True))
            if transfer.to_host:
                for part, piece in pairs:
                    gather_blocks(part, some, piece)
                read.record()  # the last time counts
                for slot, staged in zip(slots, lane.staged, strict=False):
                    self._slots[slot].copy_(staged, non_blocking=True)
            else:
                for slot, staged in zip(slots, lane.staged, strict=False):
                    staged.copy_(self._slots[slot], non_blocking=True)
                for part, piece in pairs:
                    scatter_blocks(piece, some, part)

    def _wait_for_readers(self, stream: torch.cuda.Stream, blocks: Iterable[int]) -> None:
        """The stream may write to these blocks next."""
        for flight in self._out.flights:
            if not flight.blocks.isdisjoint(blocks):
                stream.wait_event(flight.read)

    def guard(self, plan: StepPlan) -> None:
        if not self._out.flights:
            return
        written = {copy.target for copy in plan.copies}
        for sequence in plan.sequences:
            written.update(sequence.block_ids[sequence.start // self._block_size :])
        self._wait_for_readers(torch.cuda.current_stream(self._device), written)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        landed, self._failed = self._failed, []
        with noticing_loss(self._device):
            lanes = [lane for lane in (self._back, self._out) if lane.flights]
            if wait and lanes and not landed:
                lanes[0].flights[0].done.synchronize()
            for lane in lanes:
                while lane.flights and lane.flights[0].done.query():  # type: ignore[no-untyped-call]
                    flight = lane.flights.popleft()
                    seconds = flight.began.elapsed_time(flight.done) / 1e3
                    landed.append(Landed(flight.transfer_id, True, seconds))
        return landed


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
