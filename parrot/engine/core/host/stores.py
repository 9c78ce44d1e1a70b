"""Which blocks of the device are copied to the host.

Copies are made early, beside steps and while the engine is idle, so that giving a block away costs
nothing. While the host has blank slots, all that is published is copied. Then the tiers shall not
hold the same: the copy of a block in use goes first, and copied are only the blocks that are about
to be given away: as many of those as `margin` says are free with a copy, or blank.

                blocks of the device                               slots of the host
    in use      | . . . . . . . . . . . . . . |                    | (first to go)    |
    free        | . . . . . | cold, no copy | margin: with copies  | kept for last    |
    given away                                                     | the rest, oldest first
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.host.pool import HostPool

_MARGIN = 1 / 8  # of all blocks


class Store(NamedTuple):
    """A block is to be copied to a slot."""

    block: int
    slot: int
    key: bytes


class HostStores:
    """`Watcher` of the device's `pool`; fills the slots of `host`."""

    def __init__(
        self, pool: BlockPool, host: HostPool, on_distrust: Callable[[bytes], None]
    ) -> None:
        """`on_distrust` is called with each key that is distrusted."""
        self._pool = pool
        self._host = host
        self._on_distrust = on_distrust
        self.margin = max(1, int(_MARGIN * pool.num_blocks))
        self.may_choose = False
        self._storing: dict[bytes, int] = {}  # key -> slot that is being written
        # Published blocks without a copy: in use, and free, longest free first.
        self._unsaved: dict[int, None] = {}
        self._cold: dict[int, None] = {}
        pool.watcher = self

    def published(self, block: int, key: bytes) -> None:
        if key not in self._host and key not in self._storing:
            self._unsaved[block] = None
            self.may_choose = True

    def released(self, block: int) -> None:
        if block in self._unsaved:
            del self._unsaved[block]
            self._cold[block] = None
            self.may_choose = True

    def taken(self, block: int) -> None:
        if block in self._cold:
            del self._cold[block]
            self._unsaved[block] = None
        self.may_choose = True  # the margin is smaller now

    def forgotten(self, block: int, key: bytes) -> None:
        self._unsaved.pop(block, None)
        self._cold.pop(block, None)
        self._host.touch(key)
        self.may_choose = True

    def abandoned(self, keys: Sequence[bytes]) -> None:
        for key in keys:
            self._host.touch(key, goes_first=True)  # the end of the prefix before its beginning

    def distrusted(self, key: bytes) -> None:
        self._host.discard(key)
        self._storing.pop(key, None)
        self._on_distrust(key)

    def choose(self, most: int) -> list[Store]:
        """Up to `most` blocks on their way and to be copied now; none again until something
        changes."""
        chosen: list[Store] = []
        self.may_choose = False
        while len(self._storing) < most and (pair := self._next()) is not None:
            block, slot = pair
            key = self._pool.key_of(block)
            assert key is not None, f"block {block} has no key"
            self._cold.pop(block, None)
            self._unsaved.pop(block, None)
            self._storing[key] = slot
            chosen.append(Store(block, slot, key))
        return chosen

    def _next(self) -> tuple[int, int] | None:
        """The block to be copied next, and the slot that it goes to."""
        block = next(iter(self._cold or self._unsaved), None)
        if block is None:
            return None
        slot = self._host.take()
        if slot is None and self._cold and self._pool.num_free - len(self._cold) < self.margin:
            slot = self._evict()
        return None if slot is None else (block, slot)

    def _evict(self) -> int | None:
        evicted = self._host.evict(self._is_last_copy_soon)
        if evicted is None:
            return None
        slot, key = evicted
        if (block := self._pool.find(key)) is not None:
            self._unsaved[block] = None
        return slot

    def _is_last_copy_soon(self, key: bytes) -> bool:
        """Whether the device still has it, but in a block that may be given away."""
        block = self._pool.find(key)
        return block is not None and self._pool.num_refs(block) == 0

    def over(self, key: bytes, slot: int, succeeded: bool) -> None:
        """A copy has been made, or not. A key that was distrusted meanwhile is not kept."""
        self.may_choose = True
        is_kept = self._storing.get(key) == slot
        if is_kept:
            del self._storing[key]
        if is_kept and succeeded:
            self._host.put(slot, key)
        else:
            self._host.give_back(slot)

    def check_integrity(self, being_written: dict[bytes, int]) -> None:
        """`being_written`: the slots that transfers under way write, by key."""
        for key, slot in self._storing.items():
            assert being_written.get(key) == slot, f"slot {slot} is said to be written"
            assert key not in self._host, f"slot {slot} is written for nothing"
        for block in (*self._unsaved, *self._cold):
            assert self._pool.key_of(block) is not None, f"block {block} has no key"
            assert (self._pool.num_refs(block) == 0) == (block in self._cold), block
