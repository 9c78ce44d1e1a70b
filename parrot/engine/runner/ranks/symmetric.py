"""Memory that the ranks of one host share, over NVLink or PCIe."""

import faulthandler
import os
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

from parrot.engine.kernels.ranks.exchanges import Exchanges
from parrot.engine.kernels.ranks.memory import MemoryLayout, SymmetricMemory
from parrot.engine.runner.ranks.group import START_PATIENCE

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_GROUP = "parrot-ranks"
_STDERR = 2


def share_memory(
    store: "Store", rank: int, layout: MemoryLayout, device: torch.device
) -> Exchanges:
    """All ranks must call it, once in a process: torch counts what ranks tell each other through
    their stores by process, and keeps the group. Returns when all have. It is freed with the
    process."""
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # nothing uses it
    # torch finds the ranks and the store by the name of a group; nothing else uses it.
    group = dist.ProcessGroup(store, rank, layout.size)
    group._set_group_name(_GROUP)  # type: ignore[arg-type]
    _register_process_group(_GROUP, group)  # type: ignore[arg-type]
    own = _SymmetricMemory.empty_strided_p2p((layout.num_bytes,), (1,), torch.uint8, device, _GROUP)
    own.zero_()
    torch.cuda.synchronize(device)  # before another rank writes to it
    # torch waits for the others with the interpreter's lock held, so that no thread could watch.
    patience_s = START_PATIENCE.total_seconds()
    faulthandler.dump_traceback_later(patience_s, exit=True, file=_STDERR)
    try:
        handle = _SymmetricMemory.rendezvous(own)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Exchanges(SymmetricMemory.of(rank, layout, own, handle.buffer_ptrs, keeps=handle))
