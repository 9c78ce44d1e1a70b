"""Rounds of exchanges through the ranks' memory. Each rank checks its own results.

All ranks draw the data of all ranks from the same seed, so the expected results need no
communication."""

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from parrot.engine.kernels.ranks import memory
from parrot.engine.kernels.ranks.exchanges import Exchanges


@dataclass(frozen=True, slots=True)
class Round:
    """The data of all ranks: parts [ranks, splits, rows, width] and integers [ranks, 2, count]."""

    parts: torch.Tensor
    before: torch.Tensor
    weight: torch.Tensor
    integers: torch.Tensor

    @classmethod
    def drawn(cls, number: int, size: int, shape: tuple[int, int], dtype: torch.dtype) -> "Round":
        width, max_rows = shape
        generator = torch.Generator().manual_seed(number)
        rows = int(torch.randint(1, max_rows + 1, (), generator=generator))
        rows = rows if number % 3 == 0 else 1 + rows % memory.MESSAGE_ROWS
        splits = 2 if rows <= memory.MESSAGE_ROWS and number % 2 else 1
        return cls(
            torch.randn((size, splits, rows, width), generator=generator).to(dtype),
            torch.randn((rows, width), generator=generator).to(dtype),
            torch.randn(width, generator=generator).to(dtype),
            torch.randint(0, 1 << 30, (size, 2, 1 + rows // 4), generator=generator).int(),
        )

    def check_sum(self, residual: torch.Tensor, normed: torch.Tensor) -> None:
        want = self.before.float() + self.parts.float().sum(dim=(0, 1))
        scale = torch.rsqrt(want.square().mean(-1, keepdim=True) + 1e-5)
        is_exact = residual.dtype == torch.float32
        assert (residual.float().cpu() - want).abs().max() < (1e-4 if is_exact else 0.1)
        difference = normed.float().cpu() - want * scale * self.weight.float()
        assert difference.abs().max() < (1e-3 if is_exact else 0.3)


def run_ranks(
    module: str, size: int, *arguments: str, start: Callable[[list[str]], Any] = subprocess.Popen
) -> None:
    """Run a module as one process for each rank. The last argument is the rank. All processes must
    succeed."""
    command = [sys.executable, "-m", module, *arguments]
    ranks = [start([*command, str(rank)]) for rank in range(size)]
    try:
        assert [rank.wait(100) for rank in ranks] == [0] * size
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def run_rounds(
    exchanges: Exchanges,
    rank: int,
    size: int,
    num_rounds: int,
    shape: tuple[int, int],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """`shape` is (width, maximum number of rows). In some rounds, a rank sleeps before its
    exchange. The results are checked after the last round, so that only the exchanges synchronize
    the ranks."""
    rounds = [Round.drawn(number, size, shape, dtype) for number in range(num_rounds)]
    own = [
        [
            x.to(device)
            for x in (one.parts[rank], one.before.clone(), one.weight, one.integers[rank])
        ]
        for one in rounds
    ]
    sums, gathered, received = [], {}, {}
    for number, (part, residual, weight, integers) in enumerate(own):
        if number % size == rank and number % 5 == 0:
            time.sleep(0.02)
        slot = exchanges.slot(number % 3, len(part), residual)
        assert slot is not None
        slot.copy_(part)
        sums.append((residual, exchanges.sum_and_norm(slot, residual, weight, 1e-5)))
        if number % 2 == 0:
            gathered[number] = exchanges.gather(integers)
            received[number] = integers.flatten().clone()
            exchanges.broadcast(received[number])
    for number, one in enumerate(rounds):
        one.check_sum(*sums[number])
        if number in gathered:
            assert torch.equal(gathered[number].cpu(), one.integers.transpose(0, 1).flatten(1))
            assert torch.equal(received[number].cpu(), one.integers[0].flatten())
