"""The slots of the host tier: each holds a copy of one block of KV, found by the block's key."""

from collections.abc import Callable, Collection

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident

_MAX_SKIPPED = 64  # at slots that are spared, before one is given up


class HostPool:
    """Slots 0..num_slots-1 of one block each. A slot is

        blank --take--> being written --put--> held --evict--> (being written again)
          ^-----------return_blank-----'            '--pin--> being read --unpin--> held

    Held ones are found by their keys, also while they are read. They go in order: of the group of
    `shares` whose turn it is, the one that was put or touched first, unless it was touched to go
    soon."""

    def __init__(self, num_slots: int, shares: KvShares | None = None) -> None:
        self.num_slots = num_slots
        self._shares = shares or KvShares(num_slots)
        self._blank = list(range(num_slots - 1, -1, -1))
        self._by_key: dict[bytes, int] = {}
        self._held: dict[int, bytes] = {}  # those not being read,
        self._queue: EvictionQueue[int] = EvictionQueue(
            self._shares, num_resident
        )  # and in which order they go
        self._owners: dict[int, ShareGroup] = {}  # of those, and of those being read
        self._pins: dict[int, int] = {}  # how often each is being read
        self._pinned_keys: dict[int, bytes] = {}  # of those, if they still have one

    def __contains__(self, key: object) -> bool:
        return key in self._by_key

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def take(self) -> int | None:
        """A blank slot, to be written; None if there is none."""
        return self._blank.pop() if self._blank else None

    def evict(self, is_protected: Callable[[bytes], bool]) -> tuple[int, bytes] | None:
        """Take the slot that is to go first, to be written; with the key that it had. Those whose
        keys are spared are moved to the end. None: no slot was found, or not soon enough."""
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
        """A slot was written, and holds what belongs to `key`, which nobody else has, and to a
        group."""
        assert key not in self._by_key, f"slot {slot} holds what another one holds"
        self._by_key[key] = slot
        self._add_held(slot, key, self._shares.add_cached(group))

    def _add_held(self, slot: int, key: bytes, group: ShareGroup) -> None:
        self._held[slot] = key
        self._owners[slot] = group
        self._queue.add(group, slot)

    def _release_slot(self, slot: int) -> None:
        """A held slot, or one that was read, holds nothing any more."""
        group = self._owners.pop(slot)
        if self._held.pop(slot, None) is not None:
            self._queue.discard(group, slot)
        self._shares.remove_cached(group)

    def return_blank(self, slot: int) -> None:
        """A slot that was to be written is blank again."""
        self._blank.append(slot)

    def touch(self, key: bytes, *, goes_first: bool = False) -> None:
        """If there is a copy, it is the last to go, or else the first."""
        slot = self._by_key.get(key)
        if slot is not None and slot in self._held:
            self._queue.add(self._owners[slot], slot, goes_first=goes_first)

    def pin(self, slot: int) -> None:
        """A held slot is being read."""
        if slot in self._held:
            self._pinned_keys[slot] = self._held.pop(slot)
            self._queue.discard(self._owners[slot], slot)
        assert slot in self._pinned_keys, f"slot {slot} holds nothing"
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        """It was read."""
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
        """The copy, if there is one, must not be found any more."""
        if (slot := self._by_key.pop(key, None)) is None:
            return
        if slot in self._pins:
            del self._pinned_keys[slot]
        else:
            self._release_slot(slot)
            self._blank.append(slot)

    def owners(self) -> Collection[ShareGroup]:
        """Whose the slots are, each, that hold something or are still read."""
        return self._owners.values()

    def check_integrity(self, being_written: Collection[int]) -> None:
        keys = {**self._held, **self._pinned_keys}
        assert self._by_key == {key: slot for slot, key in keys.items()}, "keys and slots differ"
        assert set(self._pinned_keys) <= set(self._pins), (self._pinned_keys, self._pins)
        assert all(count > 0 for count in self._pins.values()), self._pins
        slots = [*self._blank, *self._held, *self._pins, *being_written]
        assert sorted(slots) == list(range(self.num_slots)), f"a slot is lost or twice: {slots}"
        assert self._owners.keys() == {*self._held, *self._pins}, self._owners
        assert set(self._queue) == set(self._held), self._queue
        self._queue.check_integrity()
