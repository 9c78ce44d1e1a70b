"""Which blocks of the device are copied to the host.

Copies are made early, so that giving a block away costs nothing: of what is next to be given away,
so that `margin` blocks are ready to be, with a copy or blank. While the engine is idle, all that is
published is copied as long as the host has blank slots; beside steps that would only cost time. The
tiers shall not hold the same once the host is full: of the copies, those of what the device keeps
go first.

                 blocks of the device                               slots of the host
    in use                                                          (copies go first)
    free         | in queue . . . . . . . . . . . . | ready: copied |  kept for last
    given away                                                      the rest, oldest first
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.ready import ReadyQueue
from parrot.engine.core.shares import ShareGroup

_MARGIN_FRACTION = 1 / 16  # of all blocks


class Store(NamedTuple):
    """A block is to be copied to a slot."""

    block: int
    slot: int
    key: bytes


class _PendingStore(NamedTuple):
    """A slot that is being written for a group."""

    slot: int
    group: ShareGroup


class HostStores:
    """`Watcher` of the device's `pool`; fills the slots of `host`."""

    def __init__(
        self, pool: BlockPool, host: HostPool, on_distrust: Callable[[bytes], None]
    ) -> None:
        """`on_distrust` is called with each key that is distrusted."""
        self._pool = pool
        self._host = host
        self._on_distrust = on_distrust
        self.margin = max(1, int(_MARGIN_FRACTION * pool.num_blocks))
        self.may_have_stores = False
        self._pending_stores: dict[bytes, _PendingStore] = {}  # by key
        self._evicted_stores: list[
            Store
        ] = []  # of blocks that were given away since the last choice
        self._uncopied: dict[int, None] = {}  # published blocks, in use or free
        self._queue = ReadyQueue(pool.shares, pool.owner)
        pool.watch(self, self._queue)

    def on_published(self, block: int, key: bytes) -> None:
        if not self._has_copy(key):
            self._uncopied[block] = None
            self.may_have_stores = True

    def on_released(self, block: int) -> None:
        self.may_have_stores = True

    def on_acquired(self, block: int) -> None:
        self.may_have_stores = True
        self._host.touch(self._key_of(block), goes_first=True)

    def on_evicted(self, block: int) -> None:
        """Nearly always it is ready. Else it is copied before anybody writes to it."""
        if block in self._uncopied and (slot := self._take_slot()) is not None:
            self._store(Store(block, slot, self._key_of(block)), self._evicted_stores)
            self.may_have_stores = True

    def on_unpublished(self, block: int, key: bytes) -> None:
        self._uncopied.pop(block, None)
        self.may_have_stores = True
        self._host.touch(key)

    def _has_copy(self, key: bytes) -> bool:
        """True also while the copy is being made."""
        return key in self._host or key in self._pending_stores

    def on_abandoned(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._host.touch(key, goes_first=True)  # the end of the prefix before its beginning

    def on_invalidated(self, key: bytes) -> None:
        self._host.discard(key)
        self._pending_stores.pop(key, None)
        self._on_distrust(key)

    def choose_stores(self, most: int, *, is_idle: bool) -> list[Store]:
        """The blocks to be copied now: those given away, and others while no more than `most` are
        on their way; none again until something changes, or the engine is idle."""
        chosen, self._evicted_stores = self._evicted_stores, []
        self.may_have_stores = False
        while len(self._pending_stores) < most and (store := self._next(is_idle)) is not None:
            self._store(store, chosen)
        self.may_have_stores = not is_idle and bool(self._uncopied) and self._host.num_blank > 0
        return chosen

    def _store(self, store: Store, stores: list[Store]) -> None:
        self._pending_stores[store.key] = _PendingStore(store.slot, self._pool.owner(store.block))
        del self._uncopied[store.block]
        stores.append(store)

    def _next(self, is_idle: bool) -> Store | None:
        queue, num_blank = self._queue, self._pool.num_free - len(self._queue)
        while num_blank + queue.num_ready < self.margin:
            if (block := queue.first()) is None:
                break
            key = self._key_of(block)
            slot = self._take_slot() if block in self._uncopied else None
            if slot is None and block in self._uncopied:
                return None
            queue.make_ready(block)
            if slot is not None:
                return Store(block, slot, key)
            self._host.touch(key)
        first = next(iter(self._uncopied), None) if is_idle else None
        blank = None if first is None else self._host.take()
        return None if first is None or blank is None else Store(first, blank, self._key_of(first))

    def _key_of(self, block: int) -> bytes:
        key = self._pool.key_of(block)
        assert key is not None, f"block {block} has no key"
        return key

    def _take_slot(self) -> int | None:
        """A blank slot, or else one whose copy goes."""
        slot = self._host.take()
        if slot is not None:
            return slot
        evicted = self._host.evict(self._is_last_copy_soon)
        if evicted is None:
            return None
        slot, key = evicted
        if (block := self._pool.find(key)) is not None:
            self._uncopied[block] = None
        return slot

    def _is_last_copy_soon(self, key: bytes) -> bool:
        """Whether the device still has it, but is about to give it away."""
        block = self._pool.find(key)
        return block is not None and self._queue.is_ready(block)

    def finish_store(self, key: bytes, slot: int, succeeded: bool) -> None:
        """A copy has been made, or not. A key that was distrusted meanwhile is not kept."""
        self.may_have_stores = True
        storing = self._pending_stores.get(key)
        is_kept = storing is not None and storing.slot == slot
        if is_kept:
            del self._pending_stores[key]
        if storing is not None and is_kept and succeeded:
            self._host.put(slot, key, storing.group)
        else:
            self._host.return_blank(slot)

    def check_integrity(self, being_written: dict[bytes, int]) -> None:
        """`being_written`: the slots that transfers under way write, by key."""
        for key, (slot, _) in self._pending_stores.items():
            assert being_written.get(key) == slot, f"slot {slot} is said to be written"
            assert key not in self._host, f"slot {slot} is written for nothing"
        for block in self._uncopied:
            assert not self._has_copy(self._key_of(block)), f"block {block} has a copy"
