"""The transfers between GPU and CPU memory: planned, in flight and finished.

The tier holds the blocks of a load until the whole load has finished and the waiting job has
adopted the blocks. A block whose key is invalidated meanwhile is not published."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.stores import HostStores
from parrot.engine.core.shares import ShareGroup
from parrot.engine.core.steps import Landed, Transfer
from parrot.protocol.engine_api import HostTierInfo
from parrot.utils.ids import IdCounter

_TRANSFER_BYTES = 64 << 20  # Most bytes of one transfer. At this size a transfer takes about 1 ms.
_MAX_STORE_BYTES = 512 << 20  # Most bytes in flight to CPU memory.
_SMOOTHING = 0.2  # Weight of the newest transfer in the average load time. Larger adapts faster.
_LOAD_OVERHEAD_S = 1e-3  # Assumed fixed cost of a load, in seconds. Larger values load less often.

W = TypeVar("W")


@dataclass(slots=True, eq=False)
class PendingLoad(Generic[W]):
    """Blocks that are loading from CPU memory."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    waiter: W | None  # The job that waits for the blocks.
    num_in_flight: int = 0  # Transfers that have not finished.


@dataclass(slots=True, eq=False)
class _Flight(Generic[W]):
    """A planned transfer, or one in flight."""

    transfer: Transfer
    keys: tuple[bytes, ...]
    pending_load: PendingLoad[W] | None  # None: a store.


@dataclass(slots=True)
class TierTotals:
    """Blocks copied so far, and transfers that failed."""

    num_stored: int = 0
    num_loaded: int = 0
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
    ) -> None:
        """`prefill_s` returns the seconds to compute a token, or None while they are unknown."""
        self._pool = pool
        self.host = HostPool(num_slots, pool.shares)
        self._block_bytes = block_bytes
        self._prefill_s = prefill_s
        self._block_s: float | None = None  # Average seconds to load a block.
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
        for at in range(0, len(slots), self._blocks_per_transfer):
            part = slice(at, at + self._blocks_per_transfer)
            self._plan(False, load.blocks[part], slots[part], keys[part], load)
            load.num_in_flight += 1
        return load

    def close(self, load: PendingLoad[W]) -> None:
        """Release the blocks of a load after its waiter has adopted them."""
        del self._pending_loads[load]
        self._pool.release(load.blocks)

    # -- transfers ---------------------------------------------------------------------------

    def take_transfers(self, copied_blocks: Collection[int], *, is_idle: bool) -> list[Transfer]:
        """Take the transfers to start before the step that was planned last runs.

        `copied_blocks`: blocks that the step copies first. Loads into these blocks wait. Stores
        never wait, because the step may write to their blocks."""
        if self._stores.may_have_stores:
            chosen = self._stores.choose_stores(self._max_storing, is_idle=is_idle)
            for at in range(0, len(chosen), self._blocks_per_transfer):
                blocks, slots, keys = zip(*chosen[at : at + self._blocks_per_transfer], strict=True)
                self._plan(True, blocks, slots, keys)
        busy = set(copied_blocks)
        # Stores come first: a load may write to a block that a store reads.
        self._planned.sort(key=_is_load)
        begun = [f for f in self._planned if not _is_load(f) or busy.isdisjoint(f.transfer.blocks)]
        self._planned = [f for f in self._planned if f not in begun] if busy else []
        self._in_flight.update({flight.transfer.transfer_id: flight for flight in begun})
        return [flight.transfer for flight in begun]

    def _plan(
        self,
        to_host: bool,
        blocks: Sequence[int],
        slots: Sequence[int],
        keys: Sequence[bytes],
        load: PendingLoad[W] | None = None,
    ) -> None:
        transfer = Transfer(self._ids.next(), to_host, tuple(blocks), tuple(slots))
        self._planned.append(_Flight(transfer, tuple(keys), load))

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
            self._finish_load(flight, flight.pending_load, report)
            if not flight.pending_load.num_in_flight:
                over.append(flight.pending_load)
        return over

    def _finish_store(self, flight: _Flight[W], succeeded: bool) -> None:
        self.totals.num_stored += succeeded * len(flight.keys)
        for key, slot in zip(flight.keys, flight.transfer.slots, strict=True):
            self._stores.finish_store(key, slot, succeeded)

    def _on_invalidated(self, key: bytes) -> None:
        self._loading_keys.pop(key, None)

    def _finish_load(self, flight: _Flight[W], load: PendingLoad[W], report: Landed) -> None:
        load.num_in_flight -= 1
        transfer = flight.transfer
        if report.succeeded:
            self.totals.num_loaded += len(flight.keys)
            block_s = report.seconds / len(flight.keys)
            before = block_s if self._block_s is None else self._block_s
            self._block_s = before + _SMOOTHING * (block_s - before)
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
            stored_bytes=totals.num_stored * self._block_bytes,
            returned_bytes=totals.num_loaded * self._block_bytes,
            failed_transfers=totals.num_failed,
        )

    @property
    def token_s(self) -> float:
        """Measured seconds to load a token; 0 before the first load."""
        return (self._block_s or 0.0) / self._pool.block_size

    def check_integrity(self) -> None:
        flights = [*self._in_flight.values(), *self._planned]
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


def _is_load(flight: _Flight[W]) -> bool:
    return flight.pending_load is not None
