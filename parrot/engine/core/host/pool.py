"""The slots of the host tier. Each slot holds a copy of one KV block, found by the block's key."""

from collections.abc import Callable, Collection

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident

_MAX_SKIPPED = 64  # Protected slots that one eviction skips at most before it fails.


class HostPool:
    """Slots 0..num_slots-1 of one block each. The states of a slot are

        blank --take--> being written --put--> held --evict--> (being written again)
          ^----------return_blank---'            '--pin--> being read --unpin--> held

    Held slots are found by their keys, also while they are read. The next slot to evict is the
    least recently touched one of the group that loses first."""

    def __init__(self, num_slots: int, shares: KvShares | None = None) -> None:
        self.num_slots = num_slots
        self._shares = shares or KvShares(num_slots)
        self._blank = list(range(num_slots - 1, -1, -1))
        self._by_key: dict[bytes, int] = {}
        self._held: dict[int, bytes] = {}  # Keys of held slots that are not being read.
        self._queue: EvictionQueue[int] = EvictionQueue(self._shares, num_resident)  # Of `_held`.
        self._owners: dict[int, ShareGroup] = {}  # Of held slots and of slots being read.
        self._pins: dict[int, int] = {}  # Number of readers of each slot being read.
        self._pinned_keys: dict[int, bytes] = {}  # Keys of slots being read, unless discarded.

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def take(self) -> int | None:
        """Take a blank slot for writing; None if there is none."""
        return self._blank.pop() if self._blank else None

    def evict(self, is_protected: Callable[[bytes], bool]) -> tuple[int, bytes] | None:
        """Evict the next slot for writing, and return the slot and its former key.

        Slots with protected keys move to the end of the queue. Returns None if no slot was found
        among the first `_MAX_SKIPPED`."""
        for _ in range(min(len(self._held), _MAX_SKIPPED)):
            slot = self._queue.first()
            assert slot is not None, "a held slot is lost"
            key = self._held[slot]
            if is_protected(key):
                self._queue.add(self._owners[slot], slot)
                continue
            del self._by_key[key]
            self._release_slot(slot)
            return slot, key
        return None

    def put(self, slot: int, key: bytes, group: ShareGroup | None = None) -> None:
        """Record that a slot was written for a group. No other slot may have `key`."""
        assert key not in self._by_key, f"slot {slot} has the key of another slot"
        self._by_key[key] = slot
        self._add_held(slot, key, self._shares.add_cached(group))

    def _add_held(self, slot: int, key: bytes, group: ShareGroup) -> None:
        self._held[slot] = key
        self._owners[slot] = group
        self._queue.add(group, slot)

    def _release_slot(self, slot: int) -> None:
        """Remove the owner and the queue entry of a slot whose copy was dropped."""
        group = self._owners.pop(slot)
        if self._held.pop(slot, None) is not None:
            self._queue.discard(group, slot)
        self._shares.remove_cached(group)

    def return_blank(self, slot: int) -> None:
        """Return a slot that was taken for writing and not written."""
        self._blank.append(slot)

    def touch(self, key: bytes, *, goes_first: bool = False) -> None:
        """Move the copy of `key`, if there is one, to the end of the queue, or to the front."""
        slot = self._by_key.get(key)
        if slot is not None and slot in self._held:
            self._queue.add(self._owners[slot], slot, goes_first=goes_first)

    def pin(self, slot: int) -> None:
        """Protect a held slot while it is read."""
        if slot in self._held:
            self._pinned_keys[slot] = self._held.pop(slot)
            self._queue.discard(self._owners[slot], slot)
        assert slot in self._pinned_keys, f"slot {slot} holds nothing"
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """Release a slot after a read."""
        self._pins[slot] -= 1
        if self._pins[slot]:
            return
        del self._pins[slot]
        if (key := self._pinned_keys.pop(slot, None)) is None:
            self._release_slot(slot)
            self._blank.append(slot)
        else:
            self._add_held(slot, key, self._owners[slot])

    def discard(self, key: bytes) -> None:
        """Drop the copy of `key`, if there is one."""
        if (slot := self._by_key.pop(key, None)) is None:
            return
        if slot in self._pins:
            del self._pinned_keys[slot]
        else:
            self._release_slot(slot)
            self._blank.append(slot)

    def owners(self) -> Collection[ShareGroup]:
        """The group of each slot that holds a copy or is being read."""
        return self._owners.values()

    def check_integrity(self, being_written: Collection[int]) -> None:
        keys = {**self._held, **self._pinned_keys}
        assert self._by_key == {key: slot for slot, key in keys.items()}, "keys and slots differ"
        assert set(self._pinned_keys) <= set(self._pins), (self._pinned_keys, self._pins)
        assert all(count > 0 for count in self._pins.values()), self._pins
        slots = [*self._blank, *self._held, *self._pins, *being_written]
        assert sorted(slots) == list(range(self.num_slots)), f"a slot is missing or double: {slots}"
        assert self._owners.keys() == {*self._held, *self._pins}, self._owners
        assert set(self._queue) == set(self._held), self._queue
        self._queue.check_integrity()
