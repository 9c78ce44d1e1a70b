"""Collectives of a host's ranks: by gloo on CPUs, and by NCCL on CUDA devices, where small ones go
through memory that all ranks can reach."""

import os
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from parrot.engine.kernels.ranks.memory import MemoryLayout
from parrot.engine.runner.ranks.peers import reaches_all

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from parrot.engine.kernels.ranks.exchanges import Exchanges

TIMEOUT = timedelta(seconds=120)
"""How long a rank waits in a step for another, which may compile kernels meanwhile."""

START_PATIENCE = timedelta(minutes=5)
"""For each thing that a rank does while it starts, such as to pin memory: it may be terabytes."""

BACKEND_TIMEOUT = START_PATIENCE + timedelta(seconds=20)
"""Longer, since backends end the process (NCCL) or cannot tell who is late. A unit can."""

_LOOPBACK = "127.0.0.1"

Options = TypeVar("Options", AllgatherOptions, AllreduceOptions, BroadcastOptions)


class RankGroup:
    """`Ranks` over a process group of its own, once it is connected."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.exchanges: Exchanges | None = None
        self._group: Any = None

    def connect(
        self,
        store: "Store",
        device: torch.device,
        layout: MemoryLayout | None = None,
        timeout: timedelta = BACKEND_TIMEOUT,
    ) -> None:
        """Return when all ranks are there. `store`: where they find each other; it must be private,
        since whoever can write to it takes part. `layout`: of the memory that they share; None for
        none."""
        self._device = device
        self._group = _make_group(store, self.rank, self.size, device, timeout)
        # Nothing is left to be set up in a graph then.
        if self.least(layout is not None and reaches_all(self.rank, self.size, device)):
            from parrot.engine.runner.ranks.symmetric import share_memory  # needs Triton

            assert layout is not None
            self.exchanges = share_memory(store, self.rank, layout, device)
            self.least(0)  # or the store is gone while another rank still reads it

    def connect_by_file(
        self, path: str, device: torch.device, layout: MemoryLayout | None = None
    ) -> None:
        """`connect` through a file in a folder that nobody else may enter; it is not needed
        afterwards."""
        store = dist.FileStore(path, self.size)  # type: ignore[attr-defined]
        store.set_timeout(BACKEND_TIMEOUT)
        self.connect(store, device, layout, BACKEND_TIMEOUT)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel():
            _wait(self._group.allreduce([x], _in_this_stream(AllreduceOptions())))
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        if self.exchanges is not None and self.exchanges.fit(x):
            return self.exchanges.gather(x)
        rows, columns = x.shape
        found = x.new_empty((self.size * rows, columns))
        if x.numel():
            options = _in_this_stream(AllgatherOptions())
            _wait(self._group._allgather_base(found, x.contiguous(), options))
        by_rank = found.view(self.size, rows, columns).transpose(0, 1)
        return by_rank.contiguous().view(rows, self.size * columns)

    def broadcast(self, x: torch.Tensor) -> None:
        if self.exchanges is not None and self.exchanges.fit(x):
            self.exchanges.broadcast(x)
        else:
            _wait(self._group.broadcast([x], _in_this_stream(BroadcastOptions())))

    def least(self, number: int) -> int:
        """The least of the ranks' numbers."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        found = torch.tensor([number], device=self._device)
        _wait(self._group.allreduce([found], options))
        return int(found.item())

    def abort(self) -> None:
        """Let those go that wait in a collective for a rank that is not there any more. They
        raise, or go on with anything. Returns when there are no CUDA graphs with collectives any
        more, of which NCCL counts those that are captured."""
        if self.exchanges is not None:
            self.exchanges.release()
        if self._group is not None:
            with suppress(RuntimeError):  # gloo cannot: its collectives fail on their own
                self._group.abort()


def _in_this_stream(options: Options) -> Options:
    """Let NCCL's kernels be launched in the current stream, and not in one of their own between two
    events. torch can from 2.8 on."""
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    """`work` is None where the current stream waits anyway."""
    if work is not None:
        work.wait()


def _make_group(
    store: "Store", rank: int, size: int, device: torch.device, timeout: timedelta
) -> Any:
    """A backend; torch's type of it has no collectives."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # where its ranks first meet
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # Its thread would look into the ranks' store, which is gone by then, and so never end.
        os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "0")
        nccl = dist.ProcessGroupNCCL.Options()
        nccl._timeout = timeout
        return dist.ProcessGroupNCCL(store, rank, size, nccl)
    gloo = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    gloo._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
    gloo._timeout = timeout
    return dist.ProcessGroupGloo(store, rank, size, gloo)
