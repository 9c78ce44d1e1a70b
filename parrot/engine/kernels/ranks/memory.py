"""Symmetric memory: a rank's memory that all ranks can read and write, and its layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

# Most programs in a collective kernel. Each program has a flag for each other rank.
MAX_PROGRAMS = 1024

MESSAGE_ROWS = 64  # Most rows whose sum is sent as messages.

EXCHANGE_BYTES = 64 << 10  # Most bytes that a rank sends in one exchange.

# Number of slots. Other ranks may read a slot until they reach the next sum, so the next sum must
# use another slot. Two slots alternate between the sums of a layer. The third is for the sum of a
# step's embeddings, which follows the last layer's sum. A sum of 0 rows must synchronize as well: a
# one-layer model in a step without sampling has no other sums after the sum of the embeddings.
NUM_SLOTS = 3

_ALIGNMENT = 256  # Alignment of flags and slots, in bytes.


@dataclass(frozen=True, slots=True)
class MemoryLayout:
    """The layout of a rank's memory, as offsets in bytes.

    In order: `over`, the flags, two alternating inboxes of exchanges, two of messages, and the
    slots. An inbox has space for every rank."""

    size: int  # Number of ranks.
    row_bytes: int  # Bytes of a row of hidden states.
    slot_bytes: int  # Bytes of a slot.

    @classmethod
    def of(cls, size: int, row_bytes: int, max_rows: int) -> "MemoryLayout":
        """The layout for sums of up to `max_rows` rows."""
        # Each rank reads all parts, which is optimal for two ranks. With more ranks NCCL sends less
        # for large sums. So more ranks only use slots for the parts of messages, up to two splits.
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
        """Bytes of one inbox of exchanges."""
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
    """One rank's view of all ranks' memory. Tensors are in GPU memory except `asked`."""

    rank: int
    layout: MemoryLayout
    own: torch.Tensor  # uint8 [bytes], initially 0.
    # int64 [size + 1]: the addresses of each rank's memory in this process, and of `asked`.
    addresses: torch.Tensor
    turns: torch.Tensor  # int64 [MAX_PROGRAMS], initially 0.
    asked: torch.Tensor  # int64 [1] in pinned CPU memory. 1 releases all waiting kernels.
    keeps: object  # Keeps the other ranks' memory mapped.

    @classmethod
    def of(
        cls,
        rank: int,
        layout: MemoryLayout,
        own: torch.Tensor,
        begins: Sequence[int],
        keeps: object,
    ) -> "SymmetricMemory":
        """`begins`: the addresses of each rank's memory."""
        # Pinned memory has the same address on the GPU as on the CPU.
        asked = torch.zeros(1, dtype=torch.int64, pin_memory=own.is_cuda)
        addresses = torch.tensor([*begins, asked.data_ptr()], dtype=torch.int64)
        turns = torch.zeros(MAX_PROGRAMS, dtype=torch.int64, device=own.device)
        return cls(rank, layout, own, addresses.to(own.device), turns, asked, keeps)

    def slot(self, index: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """The memory for a part of a sum; None if the part is larger than a slot."""
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        if num_bytes > self.layout.slot_bytes:
            return None
        place = self.layout.slot(index)
        return self.own[place : place + num_bytes].view(dtype).view(shape)
