"""The window slots of the host tier: copies of kept windows, and loads of windows.

A kept slot is copied to CPU memory when it is reused, or when its block is evicted. The copy is
found by the key of the block, also while the block is still on the GPU. To continue after a prefix,
a job needs the blocks of the prefix and the windows at its end. A load brings what is missing of
both. A slot is attached to its block once all of the load has finished.
"""

from collections.abc import Sequence
from typing import NamedTuple

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool
from parrot.engine.core.host.stores import LoadedWindow, Store
from parrot.engine.core.shares import ShareGroup
from parrot.engine.core.steps import Transfer, WindowInfo
from parrot.engine.core.window_pool import WindowPool, last_complete


class Missing(NamedTuple):
    """The blocks and windows that a job lacks to continue after a longer prefix."""

    keys: Sequence[bytes]  # Of all blocks that the job does not have yet, on the GPU or not.
    window_keys: Sequence[bytes]  # Of the windows that are only in CPU memory.


class _PendingStore(NamedTuple):
    slot: int
    group: ShareGroup


class WindowCopies:
    """Owns the window slots in CPU memory, `host`."""

    def __init__(self, pool: BlockPool, slots: WindowPool, info: WindowInfo) -> None:
        self._pool = pool
        self.slots = slots
        self.slot_bytes = info.slot_bytes
        self._span = pool.blocks_for(info.num_tokens)
        self.host = HostPool(info.num_host_slots, pool.shares)
        self._pending: dict[bytes, _PendingStore] = {}
        self._stores: list[Store] = []  # Copies that were not started yet. Blocks are slots.
        self.loading: dict[bytes, object] = {}  # The load of each window that is loading.
        slots.on_lost = self._on_lost

    def _on_lost(self, block: int, slot: int) -> None:
        """Copy a kept slot, which is about to be reused, before it is written to."""
        key = self._pool.key_of(block)
        if key is None or key in self._pending:
            return
        if key in self.host:
            self.host.touch(key)
            return
        if (taken := self._take_slot()) is not None:
            self._pending[key] = _PendingStore(taken, self._pool.owner(block))
            self._stores.append(Store(slot, taken, key))

    def _take_slot(self) -> int | None:
        taken = self.host.take()
        if taken is None and (evicted := self.host.evict(lambda _: False)) is not None:
            taken = evicted[0]
        return taken

    @property
    def has_stores(self) -> bool:
        return bool(self._stores)

    def take_stores(self) -> list[Store]:
        """The copies to start now."""
        stores, self._stores = self._stores, []
        return stores

    def finish_store(self, key: bytes, slot: int, succeeded: bool) -> None:
        """Record a finished or failed copy. A key that was invalidated meanwhile is dropped."""
        pending = self._pending.get(key)
        if pending is None or pending.slot != slot:
            self.host.return_blank(slot)
            return
        del self._pending[key]
        if succeeded:
            self.host.put(slot, key, pending.group)
        else:
            self.host.return_blank(slot)

    def on_invalidated(self, key: bytes) -> None:
        self.host.discard(key)
        self._pending.pop(key, None)
        self.loading.pop(key, None)

    def missing(self, keys: Sequence[bytes], first: int, blocks: HostPool) -> Missing | None:
        """The blocks and windows that a job lacks to continue after as many blocks as possible.

        The job has the first `first` blocks. `keys`: of all full blocks of its prompt. `blocks`:
        the blocks in CPU memory. Returns None if no load helps."""
        end = first
        while end < len(keys) and (self._is_on_gpu(keys[end]) or keys[end] in blocks):
            end += 1
        end = last_complete(end, self._span, lambda i: self._has_window(keys[i]))
        if end <= first:
            return None
        window = keys[max(0, end - self._span) : end]
        found = [key for key in window if not self._is_in_slot(key)]
        if not found and all(map(self._is_on_gpu, keys[first:end])):
            return None
        return Missing(keys[first:end], found)

    def are_loading(self, keys: Sequence[bytes]) -> bool:
        """Whether one of the windows is loading."""
        return not self.loading.keys().isdisjoint(keys)

    def _is_on_gpu(self, key: bytes) -> bool:
        return self._pool.find(key) is not None

    def _is_in_slot(self, key: bytes) -> bool:
        block = self._pool.find(key)
        return block is not None and self.slots.has(block)

    def _has_window(self, key: bytes) -> bool:
        return self._is_in_slot(key) or key in self.host or key in self.loading

    def pin(self, keys: Sequence[bytes]) -> list[int]:
        """Protect windows in CPU memory that will be loaded. Returns their slots there."""
        sources = []
        for key in keys:
            source = self.host.find(key)
            assert source is not None, "a window is not in CPU memory"
            self.host.pin(source)
            sources.append(source)
        return sources

    def begin_load(self, keys: Sequence[bytes], load: object) -> list[int] | None:
        """Take a slot on the GPU for each pinned window.

        Returns None, and takes nothing, if too few slots are free."""
        if len(keys) > self.slots.num_free:
            return None
        self.loading.update(dict.fromkeys(keys, load))
        return self.slots.take(len(keys))

    def finish_load(self, window: LoadedWindow, load: object) -> int | None:
        """Attach a loaded slot, and hold it. Returns its block.

        Returns None if the transfer has failed, or if no block can have the slot."""
        key, slot, source, succeeded = window
        self.host.unpin(source)
        is_valid = self.loading.get(key) is load
        if is_valid:
            del self.loading[key]
        if is_valid and not succeeded:
            self.host.discard(key)
        block = self._pool.find(key)
        if not (is_valid and succeeded) or block is None or self.slots.has(block):
            self.slots.give_back(slot)
            return None
        self.slots.put(slot, block)
        self.host.touch(key, goes_first=True)
        return block

    def check_integrity(self, flights: Sequence[Transfer], loaded: Sequence[int]) -> None:
        """`flights`: all transfers of windows. `loaded`: slots of loads that are not attached."""
        written = [slot for flight in flights if flight.to_host for slot in flight.slots]
        self.host.check_integrity([*written, *(store.slot for store in self._stores)])
        taken = [block for flight in flights if not flight.to_host for block in flight.blocks]
        assert {*taken, *loaded} == self.slots.taken, (taken, loaded, self.slots.taken)
