"""Ranks as threads of one process, connected over loopback."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from typing import TypeVar

import torch
import torch.distributed as dist

from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.group import RankGroup

T = TypeVar("T")
PATIENCE = timedelta(seconds=60)


def on_ranks(
    size: int, work: Callable[[RankGroup], T], layout: MemoryLayout | None = None
) -> list[T]:
    """Run `work` on each rank. Returns the results. `layout`: see `RankGroup.connect`."""
    store = dist.HashStore()
    outcomes = [start_rank(store, rank, size, work, layout) for rank in range(size)]
    return [outcome.result(PATIENCE.total_seconds()) for outcome in outcomes]


def start_rank(
    store: dist.Store,
    rank: int,
    size: int,
    work: Callable[[RankGroup], T],
    layout: MemoryLayout | None = None,
) -> "Future[T]":
    outcome: Future[T] = Future()

    def run() -> None:
        try:
            with torch.inference_mode():
                group = RankGroup(rank, size)
                group.connect(store, torch.device("cpu"), layout, PATIENCE)
                outcome.set_result(work(group))
        except BaseException as error:  # noqa: BLE001 - the result raises it
            outcome.set_exception(error)

    threading.Thread(target=run, name=f"rank-{rank}", daemon=True).start()
    return outcome
