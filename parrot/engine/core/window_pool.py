"""The slots for the KV of layers with sliding windows, which are attached to KV blocks.

A block has the KV of all other layers. Only blocks inside of a window need a slot:

    block table    [ 3  9  4  7  2 ]     W: a window of 2 blocks
    slots            -  -  5  0  1       blocks 4, 7 and 2 have slots

A slot is held while a running context needs it. Other slots keep their KV until they are needed for
other blocks. Slots are reused in this order:

- blank slots;
- passed slots: no context is known to continue there, oldest first;
- kept slots: a context may continue there, by share group, least recently used first.

Kept slots of common prefixes, where several contexts have continued, are reused later than others.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident

# A slot of a common prefix is reused before another kept slot only if its last use is this many
# times as long ago. A larger value protects prefixes that are no longer used for longer.
_COMMON_WEIGHT = 8


def last_complete(num_blocks: int, span: int, has_window: Callable[[int], bool]) -> int:
    """The largest number of first blocks, of `num_blocks`, after which a context can continue.

    The last `span` of them must have their windows. `has_window` gets the index of a block."""
    index = end = num_blocks
    while index > max(0, end - span):
        index -= 1
        if not has_window(index):
            end = index
    return end


class WindowPool:
    """Slots 0..num_slots-1, each with the KV of one block's tokens, and their blocks.

    A slot without a block is blank. Others are held, passed or kept."""

    def __init__(
        self, num_slots: int, shares: KvShares, owner: Callable[[int], ShareGroup]
    ) -> None:
        """`owner` returns the group that a block was computed for."""
        self.num_slots = num_slots
        self._owner = owner
        self._blank = list(range(num_slots - 1, -1, -1))
        self._passed: OrderedDict[int, None] = OrderedDict()
        self._kept: EvictionQueue[int] = EvictionQueue(shares, num_resident)
        self._common: EvictionQueue[int] = EvictionQueue(shares, num_resident)
        self._groups: dict[int, ShareGroup] = {}  # Of the slots in `_kept` and `_common`.
        self._marked: set[int] = set()  # Slots of common prefixes, held or in `_common`.
        self._used: dict[int, int] = {}  # Number of `_num_uses` when a slot was last used.
        self._num_uses = 0
        self._holds: Counter[int] = Counter()  # Number of holders of each held slot.
        self._slots: dict[int, int] = {}  # By block.
        self._blocks: dict[int, int] = {}  # By slot.
        self._changes: dict[int, int] = {}  # Slots attached since `take_changes`, by block.
        self.taken: set[int] = set()  # Slots without blocks whose KV is loading.
        # Called with the block of a kept slot, and the slot, before the block loses the slot.
        self.on_lost: Callable[[int, int], None] | None = None

    @property
    def num_free(self) -> int:
        """Slots that `attach` can use."""
        return len(self._blank) + len(self._passed) + self.num_kept

    @property
    def num_held(self) -> int:
        return len(self._holds)

    @property
    def num_kept(self) -> int:
        return len(self._groups)

    def has(self, block: int) -> bool:
        return block in self._slots

    def blocks(self) -> Collection[int]:
        """The blocks that have slots."""
        return self._slots.keys()

    def slot_of(self, block: int) -> int:
        return self._slots[block]

    def attach(self, blocks: Sequence[int]) -> None:
        """Attach a slot to each block and hold it. No block may have one.

        At least `len(blocks)` slots must be free."""
        for block in blocks:
            assert block not in self._slots, f"block {block} has a slot"
            slot = self._next()
            self._holds[slot] = 1
            self._set(block, slot)

    def take(self, num_slots: int) -> list[int]:
        """Take slots for KV that is loading. At least `num_slots` must be free."""
        slots = [self._next() for _ in range(num_slots)]
        self.taken.update(slots)
        return slots

    def put(self, slot: int, block: int) -> None:
        """Attach a slot whose KV was loaded, and hold it. The block may have none."""
        assert block not in self._slots, f"block {block} has a slot"
        self.taken.remove(slot)
        self._holds[slot] = 1
        self._set(block, slot)

    def give_back(self, slot: int) -> None:
        """Return a slot whose KV was not loaded."""
        self.taken.remove(slot)
        self._blank.append(slot)

    def _next(self) -> int:
        """A blank slot, or else the next passed or kept slot, which its block loses."""
        if self._blank:
            return self._blank.pop()
        slot = next(iter(self._passed), None)
        if slot is None:
            slot = self._next_kept()
        assert slot is not None, "no slot is free"
        self._clear(slot)
        return slot

    def _next_kept(self) -> int | None:
        slot, common = self._kept.first(), self._common.first()
        if slot is None or common is None:
            return common if slot is None else slot
        age, common_age = (self._num_uses - self._used[one] for one in (slot, common))
        return common if common_age > _COMMON_WEIGHT * age else slot

    def _clear(self, slot: int) -> None:
        """Take a free slot from its block."""
        if self.on_lost is not None and slot in self._groups:
            self.on_lost(self._blocks[slot], slot)
        block = self._blocks.pop(slot)
        self._remove_from_queue(slot)
        self._marked.discard(slot)
        self._changes.pop(block, None)
        del self._slots[block]

    def _set(self, block: int, slot: int) -> None:
        self._slots[block] = slot
        self._blocks[slot] = block
        self._changes[block] = slot

    def hold(self, blocks: Iterable[int]) -> None:
        """Hold the slots of blocks once more. All blocks must have one."""
        for block in blocks:
            slot = self._slots[block]
            if slot not in self._holds:
                self._remove_from_queue(slot)
            self._holds[slot] += 1

    def _remove_from_queue(self, slot: int) -> None:
        if (group := self._groups.pop(slot, None)) is None:
            del self._passed[slot]
        else:
            (self._common if slot in self._marked else self._kept).discard(group, slot)

    def release(self, blocks: Iterable[int], *, keep: bool, goes_first: bool = False) -> None:
        """Hold the slots of blocks once less. Without holders they are kept, or else passed.

        `goes_first`: they are the first kept slots to be reused."""
        for block in blocks:
            slot = self._slots[block]
            self._holds[slot] -= 1
            if self._holds[slot]:
                continue
            del self._holds[slot]
            if keep or slot in self._marked:
                self._keep(slot, block, goes_first=goes_first)
            else:
                self._passed[slot] = None

    def mark(self, block: int) -> None:
        """Mark the held slot of a block as one of a common prefix, until it is reused."""
        slot = self._slots[block]
        assert slot in self._holds, f"the slot of block {block} is not held"
        self._marked.add(slot)

    def _keep(self, slot: int, block: int, *, goes_first: bool = False) -> None:
        self._num_uses += 1
        self._used[slot] = 0 if goes_first else self._num_uses
        group = self._groups[slot] = self._owner(block)
        queue = self._common if slot in self._marked else self._kept
        queue.add(group, slot, goes_first=goes_first)

    def detach(self, block: int) -> None:
        """Make the slot of a block blank, if it has one, because the block has lost its KV."""
        if (slot := self._slots.get(block)) is None:
            return
        assert slot not in self._holds, f"block {block} has lost KV that is in use"
        self._clear(slot)
        self._blank.append(slot)

    def move(self, source: int, target: int) -> None:
        """Attach the slot of `source` to `target`, a block with equal KV and no slot."""
        assert target not in self._slots, f"block {target} has a slot"
        slot = self._slots.pop(source)
        self._changes.pop(source, None)
        self._set(target, slot)
        if slot in self._groups:
            self._remove_from_queue(slot)
            self._keep(slot, target)

    def take_changes(self) -> tuple[tuple[int, int], ...]:
        """Each block, with its slot, to which a slot was attached since the last call."""
        changes, self._changes = self._changes, {}
        return tuple(changes.items())

    def resend(self) -> None:
        """Return all blocks with slots from the next `take_changes`."""
        self._changes = dict(self._slots)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare with the blocks whose slots each holder holds. Raises AssertionError."""
        held = Counter(self._slots[block] for blocks in holders for block in blocks)
        assert held == self._holds, (held, self._holds)
        assert self._blocks == {slot: block for block, slot in self._slots.items()}
        assert {*self._kept, *self._common} == set(self._groups), self._groups
        assert self._marked.isdisjoint(self._kept)
        assert self._marked.issuperset(self._common)
        self._kept.check_integrity()
        self._common.check_integrity()
        slots = [*self._blank, *self._passed, *self._groups, *self._holds, *self.taken]
        assert sorted(slots) == list(range(self.num_slots)), f"a slot is lost or double: {slots}"
        assert not any(slot in self._blocks for slot in self._blank), "a blank slot has a block"
        assert self._marked <= self._blocks.keys(), "a blank slot is marked"
        assert all(self._slots[block] == slot for block, slot in self._changes.items())
