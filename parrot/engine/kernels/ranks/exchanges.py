"""Launches the collective kernels. All ranks must launch the same kernels in the same order."""

import torch
import triton
import triton.language as tl

from parrot.engine.kernels.launch import early_launch, starts_early
from parrot.engine.kernels.ranks.kernels import (
    exchange_kernel,
    sum_and_norm_kernel,
    sum_few_and_norm_kernel,
)
from parrot.engine.kernels.ranks.memory import (
    EXCHANGE_BYTES,
    MAX_PROGRAMS,
    MESSAGE_ROWS,
    SymmetricMemory,
)

_KINDS = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}
_WORD = 4  # Bytes of a word.
_BLOCK = 1024  # Words that an exchange copies at once.
_WARPS = 8
# A waiting kernel checks for an abort once per this number of polls, which takes a GPU about 50 ms.
_POLLS = 1 << 16
_INTERPRETER_POLLS = 64  # The same number in Triton's interpreter.


class Exchanges:
    """Collectives between the ranks, through symmetric memory."""

    def __init__(self, memory: SymmetricMemory) -> None:
        self._memory = memory
        self._asked = memory.asked.numpy()
        self._every = _POLLS if memory.own.is_cuda else _INTERPRETER_POLLS
        # The operand of a broadcast whose result is not used.
        self._word = torch.zeros(1, dtype=torch.int32, device=memory.own.device)

    def slot(self, index: int, num_splits: int, like: torch.Tensor) -> torch.Tensor | None:
        """The memory [num_splits, rows, size] for this rank's part of a sum. `like`: its residual.

        None if there are too many rows. Only sums of few rows may have more than one split."""
        return self._memory.slot(index, (num_splits, *like.shape), like.dtype)

    def sum_and_norm(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        *,
        add: bool = True,
    ) -> torch.Tensor:
        """residual += the sum of all ranks' parts (without `add`: = the sum), in place.

        Returns rms_norm(residual) * weight. Sums are in float32, and identical on all ranks.

        part  [splits, rows, size], a slot. Its splits are summed as well"""
        num_rows, width = residual.shape
        assert part.shape[1:] == residual.shape, (part.shape, residual.shape)
        assert part.dtype == residual.dtype == weight.dtype
        assert residual.is_contiguous()
        out = torch.empty_like(residual)
        if not num_rows:
            self.broadcast(self._word)  # Every sum must synchronize the ranks: see NUM_SLOTS.
            return out
        if num_rows <= MESSAGE_ROWS:
            self._sum_few(part, residual, weight, eps, out, add=add)
            return out
        assert len(part) == 1, part.shape
        memory, layout = self._memory, self._memory.layout
        sum_and_norm_kernel[(min(num_rows, MAX_PROGRAMS),)](
            memory.addresses,
            memory.turns,
            residual,
            weight,
            out,
            layout.flags,
            part.data_ptr() - memory.own.data_ptr(),
            eps,
            num_rows,
            RANK=memory.rank,
            SIZE=layout.size,
            EVERY=self._every,
            FLAGS=MAX_PROGRAMS,
            WIDTH=width,
            BLOCK=triton.next_power_of_2(width),
            ADD=add,
            num_warps=_WARPS,
        )
        return out

    def _sum_few(
        self,
        part: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
        *,
        add: bool,
    ) -> None:
        memory, layout = self._memory, self._memory.layout
        assert residual.shape[1] * residual.element_size() == layout.row_bytes
        assert layout.row_bytes % _WORD == 0, layout.row_bytes
        num_words = layout.row_bytes // _WORD
        sum_few_and_norm_kernel[(len(residual),)](
            memory.addresses,
            memory.turns,
            part.view(torch.int32),
            residual.view(torch.int32),
            weight.view(torch.int32),
            out.view(torch.int32),
            layout.messages,
            eps,
            len(residual),
            RANK=memory.rank,
            SIZE=layout.size,
            EVERY=self._every,
            ROWS=MESSAGE_ROWS,
            SPLITS=len(part),
            WORDS=num_words,
            BLOCK=triton.next_power_of_2(num_words),
            KIND=_KINDS[residual.dtype],
            ADD=add,
            num_warps=_WARPS,
            **early_launch(starts_early(residual.device)),
        )

    @staticmethod
    def fit(x: torch.Tensor) -> bool:
        """Whether `gather` and `broadcast` support x."""
        return x.dtype == torch.int32 and 0 < x.numel() * _WORD <= EXCHANGE_BYTES

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        """x int32 [rows, columns] -> [rows, size * columns], in the order of ranks."""
        rows, columns = x.shape
        out = x.new_empty((rows, self._memory.layout.size * columns))
        self._exchange(x.contiguous(), out, columns, only_first=False)
        return out

    def broadcast(self, x: torch.Tensor) -> None:
        """Overwrite x (int32, contiguous) with rank 0's x."""
        assert x.is_contiguous()
        self._exchange(x, x, x.numel(), only_first=True)

    def _exchange(
        self, x: torch.Tensor, out: torch.Tensor, columns: int, *, only_first: bool
    ) -> None:
        assert self.fit(x), (x.shape, x.dtype)
        memory, layout = self._memory, self._memory.layout
        exchange_kernel[(1,)](
            memory.addresses,
            memory.turns,
            x,
            out,
            layout.flags,
            layout.exchanges,
            layout.exchange_bytes,
            x.numel(),
            columns,
            RANK=memory.rank,
            SIZE=layout.size,
            EVERY=self._every,
            FLAGS=MAX_PROGRAMS,
            BLOCK=_BLOCK,
            ONLY_FIRST=only_first,
            num_warps=_WARPS,
        )

    def release(self) -> None:
        """Release all kernels that wait for a lost rank, now and later. Callable from any thread.

        Their results are undefined."""
        # This sets a word in pinned memory. A launch could block, because the GPU's queue may be
        # full.
        self._asked[0] = 1
