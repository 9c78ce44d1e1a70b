"""Whose KV goes first when an engine's memory is full.

A share group is all whose requests have one salt: a tenant, or several that share what is cached.
Each has a part of the memory by its weight, beside the others that are here. Whoever has most by
weight loses first, the oldest first. What contexts hold within half of their group's part is not
taken for another's sake as long as there is anybody else to give way or to wait for: so there is
always memory for half of what could run. Who has not been here for a while has no part any more,
and loses before all others. With one group there is only its own order.

    held by contexts   | in use | idle: goes in this order . . . |    num_used
    held by nobody     | published, till the block is given away |    num_kept, of both tiers
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Generic, TypeVar

from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.heaps import LazyHeap

_PRESENT_S = 120.0  # a group that was here so lately has a part; as in ServeCore's ledger
_PROTECTED = 0.5  # of each part; the rest is for whatever runs
_MAX_TENANTS = 1024  # of one group, whose weights are added
_ROUNDED = 1e-6  # of a weight that is taken away
_RUN_PART = 1 / 1024  # of all blocks: so many go at once, though it may be another's turn

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ShareGroup:
    """A group with contexts or KV. Its weight is the sum of those of its tenants, which have been
    here since it was last away. `num_used` blocks are held by contexts, and `num_kept` blocks and
    slots of the host by nobody. A block counts for the group for which it was computed, also while
    others share it."""

    salt: str
    weight: float = 1.0
    weights: dict[str, float] = field(default_factory=dict)
    seen: float = 0.0
    is_away: bool = False
    num_contexts: int = 0
    num_used: int = 0
    num_kept: int = 0


Amount = Callable[[ShareGroup], int]


class KvShares:
    """The groups of one engine, whose device has `num_blocks`."""

    def __init__(self, num_blocks: int, clock: Clock | None = None) -> None:
        self._num_blocks = num_blocks
        self.run_slack = int(num_blocks * _RUN_PART)
        self._clock = clock or MonotonicClock()
        self._groups: dict[str, ShareGroup] = {}
        self._here: OrderedDict[ShareGroup, None] = OrderedDict()  # not away, by `seen`
        self._weight = 0.0  # of those
        self._lines: list[Callable[[ShareGroup], None]] = []
        self.num_changes = 0
        """Rises when other KV may go than before."""

    def group(self, salt: str) -> ShareGroup:
        """The group of a salt, which is here from now on."""
        group = self._groups.get(salt)
        if group is None:
            group = self._groups[salt] = ShareGroup(salt, is_away=True)
            for known in self._groups.values() if len(self._groups) == 2 else ():
                self.grew(known)
        self.touch(group)
        return group

    def came(self, group: ShareGroup, tenant: str, weight: float) -> None:
        """A request of one of its tenants has come."""
        self.touch(group)
        if group.weights.get(tenant) == weight:
            return
        if tenant in group.weights or len(group.weights) < _MAX_TENANTS:
            group.weights[tenant] = weight
            before, group.weight = group.weight, sum(group.weights.values())
            self._add_weight(group.weight - before)
            self.grew(group)

    def touch(self, group: ShareGroup) -> None:
        """It is here now."""
        group.seen = self._clock.now()
        if group.is_away:
            group.is_away = False
            self._here[group] = None
            self._add_weight(group.weight)
            self.num_changes += 1
        else:
            self._here.move_to_end(group)

    def grew(self, group: ShareGroup) -> None:
        """It has more KV, or less weight. (The lines find out themselves about the contrary.)"""
        if self.has_several:
            self.num_changes += 1
            for changed in self._lines:
                changed(group)

    def having(self, group: ShareGroup | None) -> ShareGroup:
        """The group, which may have been forgotten, with one kept block more; None: of no salt."""
        salt = "" if group is None else group.salt
        known = self._groups.get(salt) or self.group(salt)
        known.num_kept += 1
        self.grew(known)
        return known

    def kept_less(self, group: ShareGroup) -> None:
        """One kept block less."""
        group.num_kept -= 1
        self.forget_if_gone(group)

    def forget_if_gone(self, group: ShareGroup) -> None:
        """Forget it if it has neither contexts nor KV."""
        if not (group.num_contexts or group.num_used or group.num_kept):
            del self._groups[group.salt]
            if not group.is_away:
                self._leave(group)

    def sweep(self) -> None:
        """Find out who is away by now."""
        end = self._clock.now() - _PRESENT_S
        while self._here and (group := next(iter(self._here))).seen <= end:
            group.is_away = True
            group.weights.clear()
            self._leave(group)
            self.grew(group)

    def _leave(self, group: ShareGroup) -> None:
        del self._here[group]
        self._add_weight(-group.weight)

    def _add_weight(self, change: float) -> None:
        """A group of those that are here has more weight or less, or another one is here or not."""
        self._weight += change
        if self._weight < -change * _ROUNDED:  # what is left may be nothing but rounding
            self._weight = sum(group.weight for group in self._here)

    @property
    def has_several(self) -> bool:
        """Whether there is an order between groups."""
        return len(self._groups) > 1

    @property
    def protected(self) -> float:
        """Blocks of the device that are protected for a weight of 1; 0 for a group alone."""
        return _PROTECTED * self._num_blocks / self._weight if len(self._here) > 1 else 0.0

    def protects(self, group: ShareGroup) -> bool:
        """Whether its contexts hold no more than what is protected."""
        self.sweep()
        most = self.protected * group.weight
        return most > 0.0 and not group.is_away and group.num_used <= most

    def add_line(self, changed: Callable[[ShareGroup], None]) -> None:
        """`changed` is called with each group that grew or went away."""
        self._lines.append(changed)

    def check_integrity(self, counts: Mapping[ShareGroup, tuple[int, int, int]]) -> None:
        """`counts`: of each group, its contexts, and what it uses and keeps. Raises AssertionError
        with what differs."""
        groups = {group: _counted(group) for group in self._groups.values()}
        assert groups == {g: count for g, count in counts.items() if any(count)}, (groups, counts)
        assert set(self._here) == {group for group in groups if not group.is_away}, self._here
        weight = sum(group.weight for group in self._here)
        assert abs(self._weight - weight) <= 1e-6 * max(1.0, weight), (self._weight, weight)
        seen = [group.seen for group in self._here]
        assert seen == sorted(seen), seen


def _counted(group: ShareGroup) -> tuple[int, int, int]:
    return group.num_contexts, group.num_used, group.num_kept


class FairLine(Generic[T]):
    """Things that may go, each group's in an order of its own. First goes the first of the group
    with the largest `amount` by weight; before all, those of groups that are away. A step is
    O(log n) of the groups."""

    def __init__(self, shares: KvShares, amount: Amount) -> None:
        self._shares = shares
        self._amount = amount
        self._items: dict[ShareGroup, OrderedDict[T, None]] = {}
        self._groups: LazyHeap[ShareGroup, tuple[float, ...]] = LazyHeap()
        self._num_items = 0
        shares.add_line(self._changed)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """Yield all, group by group as these are now."""
        for group in self.groups():
            yield from self._items[group]

    def groups(self) -> list[ShareGroup]:
        """Those with something in line, in order."""
        return sorted(self._items, key=self._key)

    def has(self, group: ShareGroup, item: T) -> bool:
        return item in self._items.get(group, ())

    def of(self, group: ShareGroup) -> Collection[T]:
        """Its part of the line, in order."""
        return self._items.get(group, {}).keys()

    def add(self, group: ShareGroup, item: T, *, goes_first: bool = False) -> None:
        """It is the last of its group to go, or the first; also if it was in line."""
        items = self._items.get(group)
        if items is None:
            items = self._items[group] = OrderedDict()
            self._groups.set(group, self._key(group))
        elif item in items:
            self._num_items -= 1
            del items[item]
        self._num_items += 1
        items[item] = None
        if goes_first:
            items.move_to_end(item, last=False)

    def add_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """`add` these, of which none is in line."""
        self.add(group, items[0])
        line = self._items[group]
        for item in items[1:]:
            line[item] = None
        self._num_items += len(items) - 1

    def discard(self, group: ShareGroup, item: T) -> None:
        """It leaves the line, if it is in it."""
        items = self._items.get(group)
        if items is None or item not in items:
            return
        del items[item]
        self._num_items -= 1
        if not items:
            del self._items[group]
            self._groups.discard(group)

    def first(self) -> T | None:
        group = self.first_group()
        return None if group is None else next(iter(self._items[group]))

    def first_group(self) -> ShareGroup | None:
        """Whose turn it is to lose something."""
        if len(self._items) == 1 == len(self._groups):
            return next(iter(self._items))
        self._shares.sweep()
        while (top := self._groups.top()) is not None:
            (before, group), key = top, self._key(top[1])
            if before == key or self._groups.is_before_others(key):
                return group
            self._groups.set(group, key)  # it has less than it had
        return None

    def surplus(self, group: ShareGroup) -> int | None:
        """How much the group, whose turn it is, loses before it is another's turn or it is
        protected; None: all that it has."""
        level = self._shares.protected
        return self._above(group, level) if level and not group.is_away else None

    def _above(self, group: ShareGroup, level: float) -> int:
        """How much the group, whose turn it is, has above a level and the next group's."""
        self._groups.discard(group)
        other = self.first_group()
        self._groups.set(group, self._key(group))
        if other is not None:
            level = max(level, self._amount(other) / other.weight)
        return max(1, ceil(self._amount(group) - level * group.weight))

    def first_run(self, most: int) -> Sequence[T]:
        """Return at most so many that go next, of one group: till it is another's turn, or a few
        more."""
        group = self.first_group()
        if group is None:
            return ()
        if most > 1 and len(self._groups) > 1 and not group.is_away:
            most = min(most, self._above(group, 0.0) + self._shares.run_slack)
        return list(islice(self._items[group], most))

    def discard_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """These, which are in line, leave it."""
        for item in items[1:]:
            del self._items[group][item]
        self._num_items -= len(items) - 1
        self.discard(group, items[0])

    def pass_over(self, group: ShareGroup) -> None:
        """It is nobody's turn but others', till `restore`."""
        self._groups.discard(group)

    def restore(self, groups: Collection[ShareGroup]) -> None:
        """It may be the turn of these again."""
        for group in groups:
            if group in self._items:
                self._groups.set(group, self._key(group))

    def _changed(self, group: ShareGroup) -> None:
        if group in self._groups and (key := self._key(group)) < self._groups.key(group):
            self._groups.set(group, key)  # else `first_group` finds out

    def _key(self, group: ShareGroup) -> tuple[float, ...]:
        if group.is_away:
            return (0.0, group.seen)
        return (1.0, -self._amount(group) / group.weight)

    def check_integrity(self) -> None:
        assert set(self._groups) == set(self._items), (self._groups, self._items)
        assert self._num_items == sum(map(len, self._items.values())), self._num_items
        for group in self._items if self._shares.has_several else ():
            assert self._groups.key(group) <= self._key(group), f"{group} has grown unnoticed"


def num_used(group: ShareGroup) -> int:
    """Blocks of the device that its contexts hold."""
    return group.num_used


def num_held(group: ShareGroup) -> int:
    """Blocks that there are of it, and slots of the host."""
    return group.num_used + group.num_kept
