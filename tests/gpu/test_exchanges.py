"""Exchanges of two ranks through memory that their GPUs share. Each rank is a process."""

import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.group import RankGroup
from tests.support.exchange_rounds import run_ranks, run_rounds

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(120),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs a CUDA device: two of them"),
]
ROUNDS, WIDTH, MAX_ROWS = 40, 4096, 512


def test_sums_and_exchanges_are_right_whichever_rank_is_late(tmp_path: Path) -> None:
    run_ranks(__name__, 2, str(tmp_path / "store"))


def test_a_rank_whose_peer_has_stopped_is_released(tmp_path: Path) -> None:
    run_ranks(__name__, 2, "alone", str(tmp_path / "store"))


def connected(store: str, rank: int) -> tuple[RankGroup, torch.device]:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = RankGroup(rank, 2)
    group.connect_by_file(store, device, MemoryLayout.of(2, 2 * WIDTH, MAX_ROWS))
    assert group.exchanges is not None
    return group, device


def meet(exchanges: Exchanges, device: torch.device) -> None:
    residual = torch.zeros((1, WIDTH), device=device, dtype=torch.bfloat16)
    part = exchanges.slot(0, 1, residual)
    assert part is not None
    exchanges.sum_and_norm(part, residual, residual[0], 1e-5)
    exchanges.broadcast(torch.zeros(4, dtype=torch.int32, device=device))


def main(store: str, rank: int, *, alone: bool) -> None:
    group, device = connected(store, rank)
    exchanges = group.exchanges
    assert exchanges is not None
    if not alone:
        run_rounds(exchanges, rank, 2, ROUNDS, (WIDTH, MAX_ROWS), device)
        group.abort()
        return
    meet(exchanges, device)  # Load the kernels now: loading waits for running kernels.
    torch.cuda.synchronize()
    if rank == 0:  # Rank 1 does not answer.
        meet(exchanges, device)
        done = torch.cuda.Event()
        done.record()
        time.sleep(timedelta(seconds=1).total_seconds())
        assert not done.query(), "the kernels did not wait for the other rank"
        exchanges.release()
        done.synchronize()
    group.abort()


if __name__ == "__main__":
    main(sys.argv[-2], int(sys.argv[-1]), alone="alone" in sys.argv)
