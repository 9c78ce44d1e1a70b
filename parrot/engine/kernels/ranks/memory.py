"""Memory of one rank that all ranks can read and write, and how it is divided."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

MAX_PROGRAMS = 1024
"""The most programs of a kernel in which ranks meet: each has a flag for each other rank."""

MESSAGE_ROWS = 64
"""The most rows whose sum is sent in messages."""

EXCHANGE_BYTES = 64 << 10
"""The most that a rank sends in one exchange."""

NUM_SLOTS = 3
"""Other ranks may read a slot until they come to the next sum, so what follows a sum through a slot
must be a sum through another: two for the layers' sums in turn, and one for a step's embeddings,
which follow the last layer's. A sum of no rows counts, too: in a step that chooses no token, a
model of one layer has no others after that of the embeddings."""

_ALIGNMENT = 256


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """Where what is in a rank's memory, by its first byte: `over`, flags, inboxes of exchanges and
    of messages (two of each, which take turns, with room for every rank), slots.

    row_bytes   of hidden states
    slot_bytes  of the largest part that is summed through a slot"""

    size: int
    row_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, size: int, row_bytes: int, max_rows: int) -> "MemoryLayout":
        """For sums of up to `max_rows` rows.

        Every rank reads all parts, which two ranks cannot do with less. More than two send less by
        reducing parts and gathering them, as NCCL does, so they sum in this way only what fits the
        two parts that a rank may have of what is sent in messages."""
        messages = 2 * MESSAGE_ROWS
        largest = row_bytes * (max(max_rows, messages) if size == 2 else messages)
        return cls(size, row_bytes, -(-largest // _ALIGNMENT) * _ALIGNMENT)

    @property
    def flags(self) -> int:
        """int64 [size, MAX_PROGRAMS]."""
        return _ALIGNMENT

    @property
    def exchanges(self) -> int:
        return self.flags + 8 * self.size * MAX_PROGRAMS

    @property
    def exchange_bytes(self) -> int:
        """The size of one of its inboxes."""
        return self.size * EXCHANGE_BYTES

    @property
    def messages(self) -> int:
        """int64 [2, size, MESSAGE_ROWS, words]."""
        return self.exchanges + 2 * self.exchange_bytes

    def slot(self, index: int) -> int:
        messages = 2 * 2 * self.size * MESSAGE_ROWS * self.row_bytes
        first = self.messages + -(-messages // _ALIGNMENT) * _ALIGNMENT
        return first + index * self.slot_bytes

    @property
    def num_bytes(self) -> int:
        return self.slot(NUM_SLOTS)


@dataclass(frozen=True, slots=True)
class SymmetricMemory:
    """One rank's view of all ranks' memory.

    own        uint8 [bytes] on the device, zero at first
    addresses  int64 [size + 1] on the device: where each rank's memory begins for this process,
               and where `asked` is
    turns      int64 [MAX_PROGRAMS] on the device, zero at first
    asked      int64 [1] on the host, where the device can read it: not zero when all is over
    keeps      what keeps the memory of the others reachable"""

    rank: int
    layout: MemoryLayout
    own: torch.Tensor
    addresses: torch.Tensor
    turns: torch.Tensor
    asked: torch.Tensor
    keeps: object

    @classmethod
    def of(
        cls,
        rank: int,
        layout: MemoryLayout,
        own: torch.Tensor,
        begins: Sequence[int],
        keeps: object,
    ) -> "SymmetricMemory":
        """`begins`: where each rank's memory does."""
        # A device reads pinned memory at the address that it has for the host.
        asked = torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda)
        addresses = torch.tensor([*begins, asked.data_ptr()], dtype=torch.int64)
        turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=own.device)
        return cls(rank, layout, own, addresses.to(own.device), turns, asked, keeps)

    def slot(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """A place for a part of a sum; None if it is too large."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes > self.layout.slot_bytes:
            return None
        place = self.layout.slot(index)
        return self.own[place : place + num_bytes].view(dtype).view(shape)
