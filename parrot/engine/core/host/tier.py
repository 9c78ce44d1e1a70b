"""The transfers between the tiers: what is planned, what is under way, and what has landed.

What is brought back goes into blocks that this tier holds until all of it is there and whoever
waited has taken it over. A block whose key is distrusted meanwhile is not published."""

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

_TRANSFER_BYTES = 64 << 20  # of one transfer, so that waiting for one takes about a millisecond
_MAX_STORE_BYTES = 512 << 20  # on their way to the host
_SMOOTHING = 0.2
_LOAD_OVERHEAD_S = 1e-3  # of bringing anything back

W = TypeVar("W")


@dataclass(slots=True, eq=False)
class PendingLoad(Generic[W]):
    """Blocks on their way from the host, for `waiter` if there is one. `num_in_flight` of its
    transfers are not over."""

    keys: tuple[bytes, ...]
    blocks: tuple[int, ...]
    waiter: W | None
    num_in_flight: int = 0


@dataclass(slots=True, eq=False)
class _Flight(Generic[W]):
    """A transfer under way. `pending_load` None: it goes to the host."""

    transfer: Transfer
    keys: tuple[bytes, ...]
    pending_load: PendingLoad[W] | None


@dataclass(slots=True)
class TierTotals:
    """Blocks copied so far, and transfers that failed."""

    num_stored: int = 0
    num_loaded: int = 0
    num_failed: int = 0


class HostTier(Generic[W]):
    """Owns the host's slots, beside the device's `pool`. It decides on transfers; the core hands
    them to the runner, and reports what has landed."""

    def __init__(
        self,
        pool: BlockPool,
        num_slots: int,
        block_bytes: int,
        prefill_s: Callable[[], float | None],
    ) -> None:
        """`prefill_s`: what computing a token costs, if it is known."""
        self._pool = pool
        self.host = HostPool(num_slots, pool.shares)
        self._block_bytes = block_bytes
        self._prefill_s = prefill_s
        self._block_s: float | None = None  # to bring one back, as measured
        self._blocks_per_transfer = max(1, _TRANSFER_BYTES // max(1, block_bytes))
        self._max_storing = max(1, _MAX_STORE_BYTES // max(1, block_bytes))
        self._loading_keys: dict[bytes, PendingLoad[W]] = {}
        self._pending_loads: dict[PendingLoad[W], None] = {}
        self._stores = HostStores(pool, self.host, self._distrusted)
        self.totals = TierTotals()
        self._ids = IdCounter()
        self._planned: list[_Flight[W]] = []
        self._in_flight: dict[int, _Flight[W]] = {}

    @property
    def margin(self) -> int:
        """The number of blocks that should be free with a copy on the host, or blank."""
        return self._stores.margin

    @property
    def num_slots(self) -> int:
        return self.host.num_slots

    @property
    def has_work(self) -> bool:
        """Whether transfers are under way, or can be begun."""
        return bool(self._in_flight or self._planned or self._stores.may_have_stores)

    @property
    def is_waiting(self) -> bool:
        """Whether transfers are under way."""
        return bool(self._in_flight)

    # -- bringing back -----------------------------------------------------------------------

    def is_loading(self, key: bytes) -> bool:
        return key in self._loading_keys

    def is_worth_loading(self, keys: Sequence[bytes]) -> bool:
        """Whether the first of these is on the host only, and `load` takes less time than to
        compute what it brings."""
        if not (num_blocks := sum(1 for _ in self._run(keys))):
            return False
        token_s, block_s = self._prefill_s(), self._block_s
        if token_s is None or block_s is None:
            return True
        computing_s = num_blocks * self._pool.block_size * token_s
        return _LOAD_OVERHEAD_S + num_blocks * block_s < computing_s

    def _run(self, keys: Iterable[bytes]) -> Iterator[int]:
        """The slots of the first keys that only the host has."""
        for key in keys:
            slot = self.host.find(key)
            if slot is None or self._pool.find(key) is not None or key in self._loading_keys:
                return
            yield slot

    def load(
        self, keys: Sequence[bytes], waiter: W | None, group: ShareGroup | None = None
    ) -> PendingLoad[W] | None:
        """Plan to copy back for a group what only the host has, as far as these keys go without a
        gap; None if there is nothing, or no room."""
        slots = tuple(self._run(keys))
        for slot in slots:  # first: what is given away for these blocks goes to other slots
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
        """Give up the blocks of a load that its waiter has taken over."""
        del self._pending_loads[load]
        self._pool.release(load.blocks)

    # -- transfers ---------------------------------------------------------------------------

    def take_transfers(self, copied_blocks: Collection[int], *, is_idle: bool) -> list[Transfer]:
        """Take the copies that are due, to be begun before anything else is planned, and before the
        step planned last runs, if one is. That step first copies some blocks: until then nothing is
        written to these, although they were given away. What leaves the device waits for nothing:
        the step may write to it."""
        if self._stores.may_have_stores:
            chosen = self._stores.choose_stores(self._max_storing, is_idle=is_idle)
            for at in range(0, len(chosen), self._blocks_per_transfer):
                blocks, slots, keys = zip(*chosen[at : at + self._blocks_per_transfer], strict=True)
                self._plan(True, blocks, slots, keys)
        busy = set(copied_blocks)
        self._planned.sort(key=_is_load)  # into blocks that may have to be copied before
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
        """Enter the outcomes of transfers. Returns the arrivals that are over: what they brought is
        published, and each must be closed."""
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

    def _distrusted(self, key: bytes) -> None:
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
                continue  # distrusted meanwhile
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
        """Seconds to bring back a token, as measured; 0 before the first."""
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
            assert load in self._pending_loads, f"{load} is not kept"
            assert key in load.keys, load

    def held_blocks(self) -> Iterator[Sequence[int]]:
        """The blocks of each load."""
        for load in self._pending_loads:
            yield load.blocks


def _is_load(flight: _Flight[W]) -> bool:
    return flight.pending_load is not None
