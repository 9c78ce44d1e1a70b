"""The transfers between GPU and CPU memory: planned, in flight and finished.

The tier holds the blocks of a load until the whole load has finished and the waiting job has
adopted the blocks. A block whose key is invalidated meanwhile is not published."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.stores import HostStores, LoadedWindow, Store
from parrot.engine.core.shares import ShareGroup
from parrot.engine.core.steps import BlockCopy, Landed, Transfer
from parrot.protocol.engine_api import HostTierInfo
from parrot.utils.ids import IdCounter

_TRANSFER_BYTES = 64 << 20  # Most bytes of one transfer. At this size a transfer takes about 1 ms.
_MAX_STORE_BYTES = 512 << 20  # Most bytes in flight to CPU memory.
_SMOOTHING = 0.2  # Weight of the newest transfer in the average load time. Larger adapts faster.
_LOAD_OVERHEAD_S = 1e-3  # Assumed fixed cost of a load, in seconds. Larger values load less often.

if TYPE_CHECKING:  # Only engines with windows import it.
    from parrot.engine.core.host.windows import Missing, WindowCopies

W = TypeVar("W")


@dataclass(slots=True, eq=False)
class PendingLoad(Generic[W]):
    """Blocks that are loading from CPU memory."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    waiter: W | None  # The job that waits for the blocks.
    num_in_flight: int = 0  # Transfers that have not finished.
    # Only with windows: the windows whose transfers have finished, and the blocks whose slots the
    # load holds.
    windows: list[LoadedWindow] = field(default_factory=list)
    slot_blocks: list[int] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Flight(Generic[W]):
    """A planned transfer, or one in flight."""

    transfer: Transfer
    keys: tuple[bytes, ...]
    pending_load: PendingLoad[W] | None  # None: a store.


@dataclass(slots=True)
class TierTotals:
    """Blocks and windows copied so far, their bytes, and transfers that failed."""

    num_stored: int = 0
    num_loaded: int = 0
    stored_bytes: int = 0
    loaded_bytes: int = 0
    num_failed: int = 0


class HostTier(Generic[W]):
    """Owns the slots in CPU memory and plans the transfers between them and `pool`.

    The core passes the transfers to the runner and reports the finished ones."""

    def __init__(
        self,
        pool: BlockPool,
        num_slots: int,
        block_bytes: int,
        prefill_s: Callable[[], float | None],
        windows: "WindowCopies | None" = None,
    ) -> None:
        """`prefill_s` returns the seconds to compute a token, or None while they are unknown."""
        self._pool = pool
        self.host = HostPool(num_slots, pool.shares)
        self._block_bytes = block_bytes
        self._prefill_s = prefill_s
        self._windows = windows
        self._block_s: float | None = None  # Average seconds to load a block.
        self._slot_s: float | None = None  # Average seconds to load a window slot.
        self._blocks_per_transfer = max(1, _TRANSFER_BYTES // max(1, block_bytes))
        self._max_storing = max(1, _MAX_STORE_BYTES // max(1, block_bytes))
        self._loading_keys: dict[bytes, PendingLoad[W]] = {}
        self._pending_loads: dict[PendingLoad[W], None] = {}
        self._stores = HostStores(pool, self.host, self._on_invalidated)
        self.totals = TierTotals()
        self._ids = IdCounter()
        self._planned: list[_Flight[W]] = []
        self._in_flight: dict[int, _Flight[W]] = {}

    @property
    def margin(self) -> int:
        """The number of GPU blocks that should be blank, or free with a copy in CPU memory."""
        return self._stores.margin

    @property
    def num_slots(self) -> int:
        return self.host.num_slots

    @property
    def has_work(self) -> bool:
        """Whether transfers are in flight, or can be started."""
        if self._windows is not None and self._windows.has_stores:
            return True
        return bool(self._in_flight or self._planned or self._stores.may_have_stores)

    @property
    def is_waiting(self) -> bool:
        """Whether transfers are in flight."""
        return bool(self._in_flight)

    # -- loads -------------------------------------------------------------------------------

    def is_loading(self, key: bytes) -> bool:
        return key in self._loading_keys

    def is_worth_loading(self, keys: Sequence[bytes]) -> bool:
        """Whether a load of the first keys is possible and faster than to compute their KV."""
        if not (num_blocks := sum(1 for _ in self._run(keys))):
            return False
        token_s, block_s = self._prefill_s(), self._block_s
        if token_s is None or block_s is None:
            return True
        computing_s = num_blocks * self._pool.block_size * token_s
        return _LOAD_OVERHEAD_S + num_blocks * block_s < computing_s

    def is_worth_loading_windows(self, missing: "Missing") -> bool:
        """Whether loading what is missing is faster than computing the KV of `missing.keys`."""
        token_s, block_s, slot_s = self._prefill_s(), self._block_s or 0.0, self._slot_s
        if token_s is None or slot_s is None:
            return True
        num_blocks = sum(self._pool.find(key) is None for key in missing.keys)
        computing_s = len(missing.keys) * self._pool.block_size * token_s
        loading_s = num_blocks * block_s + len(missing.window_keys) * slot_s
        return _LOAD_OVERHEAD_S + loading_s < computing_s

    def _run(self, keys: Iterable[bytes]) -> Iterator[int]:
        """The slots of the first keys whose KV is only in CPU memory, up to the first other key."""
        for key in keys:
            slot = self.host.find(key)
            if slot is None or self._pool.find(key) is not None or key in self._loading_keys:
                return
            yield slot

    def load(
        self, keys: Sequence[bytes], waiter: W | None, group: ShareGroup | None = None
    ) -> PendingLoad[W] | None:
        """Plan to load the KV of the first keys for a group, up to the first gap.

        Returns None if there is nothing to load, or if too few blocks are free."""
        slots = tuple(self._run(keys))
        # Pin before `allocate`, which may evict blocks to slots.
        for slot in slots:
            self.host.pin(slot)
        blocks = self._pool.allocate(len(slots), group) if slots else None
        if blocks is None:
            for slot in slots:
                self.host.unpin(slot)
            return None
        keys = tuple(keys[: len(slots)])
        load = PendingLoad(keys, tuple(blocks), waiter)
        self._pending_loads[load] = None
        self._loading_keys.update(dict.fromkeys(keys, load))
        self._plan_parts(load.blocks, slots, keys, load)
        return load

    def load_windows(
        self, missing: "Missing", waiter: W | None, group: ShareGroup | None = None
    ) -> PendingLoad[W] | None:
        """Plan to load blocks and windows, and hold those that are on the GPU.

        Returns None if too few blocks or slots are free."""
        windows, pool = self._windows, self._pool
        assert windows is not None, "there are no windows"
        found = [block for key in missing.keys if (block := pool.find(key)) is not None]
        keys = tuple(key for key in missing.keys if pool.find(key) is None)
        slots = tuple(slot for key in keys if (slot := self.host.find(key)) is not None)
        assert len(slots) == len(keys), "a block is neither on the GPU nor in CPU memory"
        pool.share(found)  # First: `allocate` may evict these blocks.
        for slot in slots:
            self.host.pin(slot)
        sources = windows.pin(missing.window_keys)
        blocks = pool.allocate(len(slots), group)
        load = PendingLoad(keys, (*(blocks or ()), *found), waiter)
        load.slot_blocks = [block for block in found if windows.slots.has(block)]
        windows.slots.hold(load.slot_blocks)
        taken = None if blocks is None else windows.begin_load(missing.window_keys, load)
        if blocks is None or taken is None:
            for slot in slots:
                self.host.unpin(slot)
            for source in sources:
                windows.host.unpin(source)
            windows.slots.release(load.slot_blocks, keep=True)
            pool.release(load.blocks)
            return None
        self._pending_loads[load] = None
        self._loading_keys.update(dict.fromkeys(keys, load))
        self._plan_parts(blocks, slots, keys, load)
        self._plan_parts(taken, sources, missing.window_keys, load, of_windows=True)
        return load

    def close(self, load: PendingLoad[W]) -> None:
        """Release the blocks of a load after its waiter has adopted them."""
        del self._pending_loads[load]
        if self._windows is not None:
            self._windows.slots.release(load.slot_blocks, keep=True)
        self._pool.release(load.blocks)

    # -- transfers ---------------------------------------------------------------------------

    def take_transfers(self, copies: Collection[BlockCopy], *, is_idle: bool) -> list[Transfer]:
        """Take the transfers to start before the step that was planned last runs.

        `copies`: those of the step. Loads into their sources wait. Stores never wait, because the
        step may write to their blocks."""
        if self._stores.may_have_stores:
            chosen = self._stores.choose_stores(self._max_storing, is_idle=is_idle)
            self._plan_stores(chosen)
        if self._windows is not None and self._windows.has_stores:
            self._plan_stores(self._windows.take_stores(), of_windows=True)
        busy = {(False, copy.source) for copy in copies}
        busy |= {(True, copy.source_slot) for copy in copies}
        # Stores come first: a load may write to a block that a store reads.
        self._planned.sort(key=_is_load)
        begun = [f for f in self._planned if not _is_load(f) or busy.isdisjoint(_targets(f))]
        self._planned = [f for f in self._planned if f not in begun] if busy else []
        self._in_flight.update({flight.transfer.transfer_id: flight for flight in begun})
        return [flight.transfer for flight in begun]

    def _plan_stores(self, chosen: Sequence[Store], *, of_windows: bool = False) -> None:
        if chosen:
            blocks, slots, keys = zip(*chosen, strict=True)
            self._plan_parts(blocks, slots, keys, None, of_windows=of_windows)

    def _plan_parts(
        self,
        blocks: Sequence[int],
        slots: Sequence[int],
        keys: Sequence[bytes],
        load: PendingLoad[W] | None,
        *,
        of_windows: bool = False,
    ) -> None:
        """Plan the transfers of a load, or of stores without one."""
        for at in range(0, len(slots), self._blocks_per_transfer):
            part = slice(at, at + self._blocks_per_transfer)
            pairs = tuple(blocks[part]), tuple(slots[part])
            transfer = Transfer(self._ids.next(), load is None, *pairs, of_windows)
            self._planned.append(_Flight(transfer, tuple(keys[part]), load))
            if load is not None:
                load.num_in_flight += 1

    def landed(self, reports: Iterable[Landed]) -> list[PendingLoad[W]]:
        """Process finished transfers, and return the finished loads.

        Their blocks are published. The caller must `close` each of the loads."""
        over = []
        for report in reports:
            flight = self._in_flight.pop(report.transfer_id)
            self.totals.num_failed += not report.succeeded
            if flight.pending_load is None:
                self._finish_store(flight, report.succeeded)
                continue
            load = flight.pending_load
            if flight.transfer.of_windows:
                self._record_windows(flight, load, report)
            else:
                self._finish_load(flight, load, report)
            if not load.num_in_flight:
                self._attach_windows(load)
                over.append(load)
        return over

    def _finish_store(self, flight: _Flight[W], succeeded: bool) -> None:
        of_windows = flight.transfer.of_windows
        stores = self._windows if of_windows else self._stores
        assert stores is not None, "there are no windows"
        self.totals.num_stored += succeeded * len(flight.keys)
        self.totals.stored_bytes += succeeded * self._num_bytes(flight)
        for key, slot in zip(flight.keys, flight.transfer.slots, strict=True):
            stores.finish_store(key, slot, succeeded)

    def _num_bytes(self, flight: _Flight[W]) -> int:
        windows = self._windows if flight.transfer.of_windows else None
        size = self._block_bytes if windows is None else windows.slot_bytes
        return size * len(flight.keys)

    def _record_windows(self, flight: _Flight[W], load: PendingLoad[W], report: Landed) -> None:
        """Windows are attached when all of the load has finished."""
        load.num_in_flight -= 1
        if report.succeeded:
            self._count_loaded(flight)
            self._slot_s = _averaged(self._slot_s, report.seconds / len(flight.keys))
        parts = zip(flight.keys, flight.transfer.blocks, flight.transfer.slots, strict=True)
        load.windows += [LoadedWindow(*part, report.succeeded) for part in parts]

    def _count_loaded(self, flight: _Flight[W]) -> None:
        self.totals.num_loaded += len(flight.keys)
        self.totals.loaded_bytes += self._num_bytes(flight)

    def _attach_windows(self, load: PendingLoad[W]) -> None:
        windows = self._windows
        for window in load.windows:
            assert windows is not None, "there are no windows"
            if (block := windows.finish_load(window, load)) is not None:
                load.slot_blocks.append(block)

    def _on_invalidated(self, key: bytes) -> None:
        self._loading_keys.pop(key, None)
        if self._windows is not None:
            self._windows.on_invalidated(key)

    def _finish_load(self, flight: _Flight[W], load: PendingLoad[W], report: Landed) -> None:
        load.num_in_flight -= 1
        transfer = flight.transfer
        if report.succeeded:
            self._count_loaded(flight)
            self._block_s = _averaged(self._block_s, report.seconds / len(flight.keys))
        for key, block, slot in zip(flight.keys, transfer.blocks, transfer.slots, strict=True):
            self.host.unpin(slot)
            if self._loading_keys.get(key) is not load:
                continue  # The key was invalidated meanwhile.
            del self._loading_keys[key]
            if report.succeeded:
                self._pool.publish(block, key)
                self.host.touch(key, goes_first=True)
            else:
                self.host.discard(key)

    def info(self) -> HostTierInfo:
        totals = self.totals
        return HostTierInfo(
            num_max_blocks=self.num_slots,
            num_free_blocks=self.host.num_blank,
            stored_bytes=totals.stored_bytes,
            returned_bytes=totals.loaded_bytes,
            failed_transfers=totals.num_failed,
        )

    @property
    def token_s(self) -> float:
        """Measured seconds to load a token; 0 before the first load."""
        return (self._block_s or 0.0) / self._pool.block_size

    def check_integrity(self) -> None:
        flights = [*self._in_flight.values(), *self._planned]
        if self._windows is not None:
            self._windows.check_integrity(
                [flight.transfer for flight in flights if flight.transfer.of_windows],
                [window.slot for load in self._pending_loads for window in load.windows],
            )
        flights = [flight for flight in flights if not flight.transfer.of_windows]
        stores = [flight for flight in flights if flight.pending_load is None]
        self.host.check_integrity([slot for f in stores for slot in f.transfer.slots])
        being_written = {
            key: slot for f in stores for key, slot in zip(f.keys, f.transfer.slots, strict=True)
        }
        self._stores.check_integrity(being_written)
        for key, load in self._loading_keys.items():
            assert load in self._pending_loads, f"{load} is not pending"
            assert key in load.keys, load

    def held_blocks(self) -> Iterator[Sequence[int]]:
        """The blocks of each pending load."""
        for load in self._pending_loads:
            yield load.blocks

    def held_slots(self) -> Iterator[Sequence[int]]:
        """The blocks whose slots each pending load holds."""
        for load in self._pending_loads:
            yield load.slot_blocks

    def owners(self) -> list[ShareGroup]:
        """The group of each slot in CPU memory that holds a copy or is being read."""
        windows = () if self._windows is None else self._windows.host.owners()
        return [*self.host.owners(), *windows]


def _is_load(flight: _Flight[W]) -> bool:
    return flight.pending_load is not None


def _targets(flight: _Flight[W]) -> list[tuple[bool, int]]:
    return [(flight.transfer.of_windows, block) for block in flight.transfer.blocks]


def _averaged(average: float | None, new: float) -> float:
    return new if average is None else average + _SMOOTHING * (new - average)
