"""Links, collectives and shared memory of the ranks of one host. Rank 0 has a private way to each
other rank. Collectives go by gloo on CPUs, and by NCCL on CUDA devices, where small ones go through
memory that all ranks share, over NVLink or PCIe."""

import ctypes
import faulthandler
import os
import select
import socket
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, AllreduceOptions, BroadcastOptions

from parrot.engine.kernels.ranks.memory import MemoryLayout, SymmetricMemory

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

_GROUP = "parrot-ranks"
_STDERR = 2

_LENGTH_BYTES = 8
_BUFFER = 1 << 20  # room for the messages of some steps, so that telling one waits for nobody

_DRIVER = "libcuda.so.1"
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


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
            assert layout is not None
            self.exchanges = _share_memory(store, self.rank, layout, device)
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


def _share_memory(
    store: "Store", rank: int, layout: MemoryLayout, device: torch.device
) -> "Exchanges":
    """All ranks must call it, once in a process: torch counts what ranks tell each other through
    their stores by process, and keeps the group. Returns when all have. It is freed with the
    process."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    from parrot.engine.kernels.ranks.exchanges import Exchanges  # needs Triton

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


def reaches_all(rank: int, size: int, device: torch.device) -> bool:
    """Whether a rank's device can read and write the memory of the other ranks' devices, and has
    atomics on it: ranks signal what they have written by atomics, since Triton has no other
    operation with release semantics. NVLink has them; PCIe mostly does not. The ranks' devices have
    indices that follow each other."""
    first = device.index - rank
    others = [other for other in range(first, first + size) if other != device.index]
    return all(
        torch.cuda.can_device_access_peer(device.index, other) and _has_atomics(device.index, other)
        for other in others
    )


def _has_atomics(index: int, other: int) -> bool:
    """Whether a device has atomics on the memory of another. torch does not tell, so the driver is
    asked, which has been loaded for torch. False if it does not know, either."""
    try:
        driver = ctypes.CDLL(_DRIVER)
        devices = [ctypes.c_int(), ctypes.c_int()]
        for device, number in zip(devices, (index, other), strict=True):
            if driver.cuDeviceGet(ctypes.byref(device), number):
                return False
        found = ctypes.c_int()
        failed = driver.cuDeviceGetP2PAttribute(ctypes.byref(found), _NATIVE_ATOMICS, *devices)
    except (OSError, AttributeError):
        return False
    return not failed and found.value == 1


def device_kind(device: torch.device) -> str:
    """Everything that decides which kernels, graphs and tiles a rank uses, and so in which order it
    meets the others. Its memory does not: all ranks have as many blocks of KV as the one with the
    fewest."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    capability = f"compute capability {found.major}.{found.minor}"
    return f"{found.name} with {found.multi_processor_count} multiprocessors and {capability}"


class Link:
    """A private way between rank 0 and another rank: messages both ways, and word of the other's
    end. It is a pair of sockets without a name, of which each process holds one: nobody else can
    reach it, and however a process ends, the kernel closes its own."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._end = end
        self._reader = end.makefile("rb")

    @classmethod
    def pair(cls) -> "tuple[Link, socket.socket]":
        """A link, and what the other process makes its own of."""
        own, other = socket.socketpair()
        return cls(own), other

    def send(self, message: bytes) -> None:
        """Raises `OSError` if the other has ended."""
        self._end.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def receive(self) -> bytearray:
        """Wait for the next message. Raises `EOFError` if the other has ended."""
        length = int.from_bytes(self._read(_LENGTH_BYTES), "little")
        return self._read(length)

    def _read(self, length: int) -> bytearray:
        data = bytearray(length)
        try:
            count = self._reader.readinto(data)
        except OSError:
            count = 0
        if count < length:
            raise EOFError("the other rank has ended")
        return data

    def wait_for_message(self, timeout_s: float) -> bool:
        """Whether there is something to `receive`, or the end. For the first message."""
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1e3))

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """Return True when the other has ended, or this link; False after `timeout_s`."""
        waiting = select.poll()
        waiting.register(self._end, 0)  # an end is told always, messages are not
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def end(self) -> None:
        """Let both sides see the end, in whatever they wait for. May be called twice."""
        with suppress(OSError):  # the other may have closed it before
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """To be called when nobody waits any more."""
        self._reader.close()
        self._end.close()
