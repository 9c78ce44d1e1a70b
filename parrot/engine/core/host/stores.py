"""Selects the GPU blocks that are copied to CPU memory.

Blocks are copied before they are evicted, so that eviction never waits. The next `margin` blocks to
be allocated are kept ready: blank, or with a copy. While the engine is idle, all published blocks
are copied to blank slots. Next to a step that would only slow the step down. When CPU memory is
full, copies of blocks that the GPU still has are dropped first.

                 GPU blocks                                         slots in CPU memory
    in use                                                          (copies are dropped first)
    free         | in queue . . . . . . . . . . . . | ready: copied |  copies are dropped last
    evicted                                                         other slots, oldest first
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.ready import ReadyQueue
from parrot.engine.core.shares import ShareGroup

# Fraction of all GPU blocks that are kept ready. A larger value copies earlier and evicts more.
_MARGIN_FRACTION = 1 / 16


class Store(NamedTuple):
    """A copy of a block to a slot."""

    block: int
    slot: int
    key: bytes


class LoadedWindow(NamedTuple):
    """A window whose transfer has finished."""

    key: bytes
    slot: int  # On the GPU.
    source: int  # In CPU memory.
    succeeded: bool


class _PendingStore(NamedTuple):
    """A slot that is being written for a group."""

    slot: int
    group: ShareGroup


class HostStores:
    """Watches the GPU's block pool, and selects copies to the slots of `host`."""

    def __init__(
        self, pool: BlockPool, host: HostPool, on_invalidate: Callable[[bytes], None]
    ) -> None:
        """`on_invalidate` is called with each key whose KV may be wrong."""
        self._pool = pool
        self._host = host
        self._on_invalidate = on_invalidate
        self.margin = max(1, int(_MARGIN_FRACTION * pool.num_blocks))
        self.may_have_stores = False
        self._pending_stores: dict[bytes, _PendingStore] = {}  # By key.
        # Copies of blocks that were evicted since the last `choose_stores`.
        self._evicted_stores: list[Store] = []
        self._uncopied: dict[int, None] = {}  # Published blocks without a copy, in use or free.
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
        """Copy a block that is not ready. The copy happens before the block is written to."""
        if block in self._uncopied and (slot := self._take_slot()) is not None:
            self._store(Store(block, slot, self._key_of(block)), self._evicted_stores)
            self.may_have_stores = True

    def on_unpublished(self, block: int, key: bytes) -> None:
        self._uncopied.pop(block, None)
        self.may_have_stores = True
        self._host.touch(key)

    def _has_copy(self, key: bytes) -> bool:
        """Whether a copy exists or is being written."""
        return key in self._host or key in self._pending_stores

    def on_abandoned(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            # The last key is touched last, so the end of the prefix is evicted first.
            self._host.touch(key, goes_first=True)

    def on_invalidated(self, key: bytes) -> None:
        self._host.discard(key)
        self._pending_stores.pop(key, None)
        self._on_invalidate(key)

    def choose_stores(self, most: int, *, is_idle: bool) -> list[Store]:
        """The copies to start now: evicted blocks, and others while fewer than `most` are pending.

        Returns nothing again until a block changes or the engine is idle."""
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
        """Take a blank slot, or evict a copy; None if no copy may be evicted."""
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
        """Whether the GPU still has the block, but is about to evict it."""
        block = self._pool.find(key)
        return block is not None and self._queue.is_ready(block)

    def finish_store(self, key: bytes, slot: int, succeeded: bool) -> None:
        """Record a finished or failed copy. A key that was invalidated meanwhile is dropped."""
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
        """`being_written`: the slots that transfers in flight write, by key."""
        for key, (slot, _) in self._pending_stores.items():
            assert being_written.get(key) == slot, f"slot {slot} is not being written"
            assert key not in self._host, f"the key of slot {slot} has a copy already"
        for block in self._uncopied:
            assert not self._has_copy(self._key_of(block)), f"block {block} has a copy"
