"""Copies between the KV pool in GPU memory and the slots in CPU memory, in parallel with steps.

Each direction has a stream and a staging buffer in GPU memory. A kernel gathers blocks into the
buffer in the layout of a slot, so each copy over PCIe is one large copy:

    steps   | N            | N + 1                  | N + 2 ...
    out                    | gather | copy to slots | gather | copy to slots
    back                   | copy from slots | scatter | copy from slots | scatter

A transfer starts when all previously launched steps have run. Events order the rest:

- A step that writes to a block waits until pending transfers out have gathered that block.
- A transfer back into a block waits for the same event.
- A step reads a block only after the CPU has seen that the transfer back has finished.

With tensor parallelism each rank runs the same transfers for its shard of every block. Only rank 0
checks which transfers have finished. It sends their ids to the other ranks, in order with the
steps. On receiving an id, the other rank does not block. Its streams wait instead:

- Steps wait until a finished transfer back is done, and until a finished transfer out has gathered.
- Later transfers wait for those steps. So a slot is overwritten only after it was read.
- Later transfers back also wait until finished transfers out have filled their slots.

So a message that follows the id finds the transfer finished on every rank. A rank waits only for
work that it received earlier, so ranks cannot deadlock.
"""

import logging
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from parrot.engine.core.steps import Landed, StepPlan, Transfer
from parrot.engine.kernels.block_copies import gather_blocks, scatter_blocks
from parrot.engine.runner.device import detect_device_loss
from parrot.engine.runner.host.copies import HostMemory, RankTransfers, block_parts

logger = logging.getLogger(__name__)

# Size of each direction's staging buffer, in bytes. It holds at least one block.
_STAGED_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, eq=False)
class _Flight:
    """A transfer in flight, or a transfer that failed to start."""

    transfer_id: int
    blocks: frozenset[int]  # The blocks that a transfer out reads; empty for a transfer back.
    began: torch.cuda.Event
    read: torch.cuda.Event  # Recorded once all of `blocks` are gathered.
    done: torch.cuda.Event
    has_begun: bool  # False if the copies could not be launched.


class _Lane:
    """One direction: a stream and its staging buffer."""

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        slot_bytes = memory.slots.shape[1]
        count = max(1, _STAGED_BYTES // slot_bytes)
        self.staged = torch.empty((count, slot_bytes), dtype=torch.uint8, device=device)
        self.parts = [part.view(torch.int64) for part in memory.split(self.staged)]
        self.flights: deque[_Flight] = deque()


class CudaCopies:
    """`HostCopies` for a paged pool in GPU memory.

    All calls come from the thread that launches steps, after all earlier steps are launched."""

    def __init__(self, tensors: Sequence[torch.Tensor], block_size: int, num_slots: int) -> None:
        """`tensors`: `KVCache.block_tensors` of a paged pool."""
        parts = block_parts(tensors)
        memory = HostMemory(parts, num_slots)
        self._device = tensors[0].device
        self._block_size = block_size
        self._slots = memory.slots
        self._parts = [part.view(torch.int64) for part in parts]
        self._out, self._back = _Lane(memory, self._device), _Lane(memory, self._device)

    @torch.inference_mode()
    def warm_up(self, block: int) -> None:
        """Compile the kernels. `block` must be unused."""
        places = torch.tensor([block], dtype=torch.int32, device=self._device)
        for part, piece in zip(self._parts, self._out.parts, strict=True):
            gather_blocks(part, places, piece[:1])
            scatter_blocks(piece[:1], places, part)

    @torch.inference_mode()
    def transfer(self, transfers: Sequence[Transfer]) -> None:
        with detect_device_loss(self._device):
            launched = _event()
            launched.record()
            for transfer in transfers:
                self._begin(transfer, launched)

    def _begin(self, transfer: Transfer, launched: torch.cuda.Event) -> None:
        lane = self._out if transfer.to_host else self._back
        with torch.cuda.stream(lane.stream):
            lane.stream.wait_event(launched)
            if not transfer.to_host:
                for flight in self._readers(transfer.blocks):
                    lane.stream.wait_event(flight.read)
            blocks = frozenset(transfer.blocks if transfer.to_host else ())
            began, read, done = _event(timed=True), _event(), _event(timed=True)
            began.record()
            has_begun = True
            try:
                self._copy(transfer, lane, read)
            except RuntimeError:
                lane.stream.synchronize()  # Part of the transfer may already be in flight.
                logger.exception("%d blocks could not be copied", len(transfer.blocks))
                has_begun = False
            done.record()
        flight = _Flight(transfer.transfer_id, blocks, began, read, done, has_begun)
        lane.flights.append(flight)

    def _copy(self, transfer: Transfer, lane: _Lane, read: torch.cuda.Event) -> None:
        """Launch the copies on the lane's stream, one staging buffer of blocks at a time."""
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
                read.record()  # The last record replaces the earlier ones.
                for slot, staged in zip(slots, lane.staged, strict=False):
                    self._slots[slot].copy_(staged, non_blocking=True)
            else:
                for slot, staged in zip(slots, lane.staged, strict=False):
                    staged.copy_(self._slots[slot], non_blocking=True)
                for part, piece in pairs:
                    scatter_blocks(piece, some, part)

    def _readers(self, blocks: Iterable[int]) -> list[_Flight]:
        """Transfers out that may still read some of `blocks`."""
        return [flight for flight in self._out.flights if not flight.blocks.isdisjoint(blocks)]

    def guard(self, plan: StepPlan) -> Sequence[int]:
        if not self._out.flights:
            return ()
        written = {copy.target for copy in plan.copies} | plan.written_blocks(self._block_size)
        readers = self._readers(written)
        for flight in readers:
            self._steps.wait_event(flight.read)
        return [flight.transfer_id for flight in readers]

    def follow(self, transfers: RankTransfers) -> None:
        # A transfer that has finished on rank 0 may still be in flight on this rank.
        for flight in _pop_finished(self._back, transfers.landed):
            self._steps.wait_event(flight.done)
        for flight in _pop_finished(self._out, transfers.landed):
            self._steps.wait_event(flight.read)
            self._back.stream.wait_event(flight.done)
        if transfers.begun:
            self.transfer(transfers.begun)
        for flight in (*self._back.flights, *self._out.flights):
            if not flight.has_begun:
                raise RuntimeError("a transfer between the tiers has failed on this rank")
            if flight.transfer_id in transfers.awaited:
                self._steps.wait_event(flight.read)

    @property
    def _steps(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self._device)

    def landed(self, *, wait: bool) -> Sequence[Landed]:
        landed = []
        with detect_device_loss(self._device):
            lanes = [lane for lane in (self._back, self._out) if lane.flights]
            if wait and lanes:
                lanes[0].flights[0].done.synchronize()
            for lane in lanes:
                while lane.flights and lane.flights[0].done.query():  # type: ignore[no-untyped-call]
                    flight = lane.flights.popleft()
                    seconds = flight.began.elapsed_time(flight.done) / 1e3
                    landed.append(Landed(flight.transfer_id, flight.has_begun, seconds))
        return landed


def _pop_finished(lane: _Lane, transfer_ids: Collection[int]) -> Iterator[_Flight]:
    """Remove and yield the oldest transfers of a lane while their ids are in `transfer_ids`."""
    while lane.flights and lane.flights[0].transfer_id in transfer_ids:
        yield lane.flights.popleft()


def _event(*, timed: bool = False) -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
