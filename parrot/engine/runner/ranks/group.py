"""Links, collectives and shared memory of the ranks of one host.

Rank 0 has a private link to each other rank. Collectives use gloo on CPUs and NCCL on CUDA devices.
Small collectives on CUDA use symmetric memory over NVLink or PCIe if peer atomics exist."""

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

# Longest time of a step. It is long because another rank may compile kernels meanwhile.
TIMEOUT = timedelta(seconds=120)

# Longest time of one phase of the start. It is long because pinning terabytes takes minutes.
START_PATIENCE = timedelta(minutes=5)

# Timeout of gloo and NCCL. It is longer than `START_PATIENCE`, so that the unit reports first: NCCL
# would abort the process, and gloo cannot name the rank that hangs.
BACKEND_TIMEOUT = START_PATIENCE + timedelta(seconds=20)

_LOOPBACK = "127.0.0.1"

Options = TypeVar("Options", AllgatherOptions, AllreduceOptions, BroadcastOptions)

_GROUP = "parrot-ranks"
_STDERR = 2

_LENGTH_BYTES = 8
# Size of a link's send buffer, in bytes. It holds the messages of several steps, so that sending a
# step does not block.
_BUFFER = 1 << 20

_DRIVER = "libcuda.so.1"
_NATIVE_ATOMICS = 3  # CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED


class RankGroup:
    """`Ranks` over a process group of its own. Usable after `connect`."""

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
        """Connect to the other ranks, and return when all ranks are connected.

        The ranks find each other through `store`. It must be private: every process that can write
        to it can join. `layout` describes the symmetric memory; None uses none."""
        self._device = device
        self._group = _make_group(store, self.rank, self.size, device, timeout)
        # This first collective also sets up the backend, which is impossible in a graph capture.
        if self.least(layout is not None and reaches_all(self.rank, self.size, device)):
            assert layout is not None
            self.exchanges = _share_memory(store, self.rank, layout, device)
            self.least(0)  # The store must exist until all ranks have read from it.

    def connect_by_file(
        self, path: str, device: torch.device, layout: MemoryLayout | None = None
    ) -> None:
        """`connect` through a file in a private folder. The file can be removed afterwards."""
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
        """The minimum of `number` over all ranks."""
        options = AllreduceOptions()
        options.reduceOp = dist.ReduceOp.MIN  # type: ignore[assignment]
        found = torch.tensor([number], device=self._device)
        _wait(self._group.allreduce([found], options))
        return int(found.item())

    def abort(self) -> None:
        """Release all threads and kernels that wait in a collective for a lost rank.

        Their calls raise, or return with undefined results. NCCL makes the call wait until no
        captured CUDA graph with collectives exists."""
        if self.exchanges is not None:
            self.exchanges.release()
        if self._group is not None:
            with suppress(RuntimeError):  # gloo has no abort. Its collectives fail on their own.
                self._group.abort()


def _in_this_stream(options: Options) -> Options:
    """Make NCCL launch its kernels on the current stream instead of on a stream of its own."""
    if hasattr(options, "asyncOp"):  # torch 2.8 or later.
        options.asyncOp = False
    return options


def _wait(work: Any) -> None:
    if work is not None:  # None if the kernel was launched on the current stream.
        work.wait()


def _make_group(
    store: "Store", rank: int, size: int, device: torch.device, timeout: timedelta
) -> Any:
    """A gloo or NCCL backend. The type is `Any` because torch's stubs lack the collectives."""
    if device.type == "cuda":
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")  # The ranks bootstrap over loopback.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        # The dump's thread would read from the store, which is removed, and would never exit.
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
    """Allocate the symmetric memory of all ranks. Returns when all ranks have called it.

    Call it once per process: torch numbers the messages in the store per process and keeps the
    group. The memory is freed when the process exits."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    from parrot.engine.kernels.ranks.exchanges import Exchanges  # Imports Triton.

    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")  # The kernels do not use it.
    # torch looks up the ranks and the store by the name of a group.
    group = dist.ProcessGroup(store, rank, layout.size)
    group._set_group_name(_GROUP)  # type: ignore[arg-type]
    _register_process_group(_GROUP, group)  # type: ignore[arg-type]
    own = _SymmetricMemory.empty_strided_p2p((layout.num_bytes,), (1,), torch.uint8, device, _GROUP)
    own.zero_()
    torch.cuda.synchronize(device)  # The zeros must be written before another rank's data.
    # torch waits for the other ranks while it holds the GIL, so no Python thread could time it out.
    patience_s = START_PATIENCE.total_seconds()
    faulthandler.dump_traceback_later(patience_s, exit=True, file=_STDERR)
    try:
        handle = _SymmetricMemory.rendezvous(own)
    finally:
        faulthandler.cancel_dump_traceback_later()
    return Exchanges(SymmetricMemory.of(rank, layout, own, handle.buffer_ptrs, keeps=handle))


def reaches_all(rank: int, size: int, device: torch.device) -> bool:
    """Whether a rank's device has peer access with atomics to the devices of all other ranks.

    Triton's only operations with release semantics are atomics, so kernels signal with them. NVLink
    supports peer atomics; most PCIe systems do not. Rank r uses device `first + r`."""
    first = device.index - rank
    others = [other for other in range(first, first + size) if other != device.index]
    return all(
        torch.cuda.can_device_access_peer(device.index, other) and _has_atomics(device.index, other)
        for other in others
    )


def _has_atomics(index: int, other: int) -> bool:
    """Whether a device supports native atomics on another device's memory.

    torch does not expose this, so the function asks the driver. False if the query fails."""
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
    """A name that is equal for devices that run the same kernels, graphs and tiles.

    All ranks must be of one kind, or their collectives would not match. Memory sizes may differ:
    all ranks use the smallest number of KV blocks."""
    if device.type != "cuda":
        return device.type
    found = torch.cuda.get_device_properties(device)
    capability = f"compute capability {found.major}.{found.minor}"
    return f"{found.name} with {found.multi_processor_count} multiprocessors and {capability}"


class Link:
    """One end of an unnamed socket pair between rank 0 and another rank.

    No other process can connect to it. The operating system closes the end of a process that exits
    or crashes, so each process sees when the other one is lost."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        self._end = end
        self._reader = end.makefile("rb")

    @classmethod
    def pair(cls) -> "tuple[Link, socket.socket]":
        """A link, and the socket from which the other process makes its own link."""
        own, other = socket.socketpair()
        return cls(own), other

    def send(self, message: bytes) -> None:
        """Raises `OSError` if the other process has exited."""
        self._end.sendall(len(message).to_bytes(_LENGTH_BYTES, "little") + message)

    def receive(self) -> bytearray:
        """Block until the next message. Raises `EOFError` if the other process has exited."""
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
        """Whether `receive` would not block, after at most `timeout_s`. For the first message."""
        waiting = select.poll()
        waiting.register(self._end, select.POLLIN)
        return bool(waiting.poll(timeout_s * 1e3))

    def wait_for_end(self, timeout_s: float | None = None) -> bool:
        """True once the other process has exited or `end` was called; False after `timeout_s`."""
        waiting = select.poll()
        waiting.register(self._end, 0)  # Without flags poll reports hang-ups and ignores messages.
        return bool(waiting.poll(None if timeout_s is None else timeout_s * 1e3))

    def end(self) -> None:
        """Shut down the link. Blocked calls on both sides return or raise. Idempotent."""
        with suppress(OSError):  # The other process may have closed it already.
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. No thread may use the link during or after the call."""
        self._reader.close()
        self._end.close()
