"""The shares of an engine's tenants in the memory for KV: which KV goes first when memory is full.

A share group is all whose requests have one salt: a tenant, or several that share what is cached.
Each has a share of the memory by its weight, next to the other groups that are present. KV that
contexts hold within half of their group's share is taken for another group only if nothing else can
give way or wait. So there is always memory for half of what could run. Groups that are away have no
share, and lose before all others (utils/weighted_shares.py). With one group there is only its own
order, and no weighted shares exist.

    held by contexts   | in use | idle: goes in this order . . . |    num_used
    held by nobody     | published, till the block is given away |    num_cached, of both tiers
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any, Generic, NamedTuple, TypeVar

from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.weighted_shares import LossOrder, WeightedShare, WeightedShares

_PROTECTED_FRACTION = 0.5  # of each share; the rest is for whatever runs
_MAX_TENANTS = 1024  # of one group, whose weights are added
_RUN_SLACK_FRACTION = 1 / 1024  # of all blocks: so many go at once, though it may be another's turn

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ShareGroup(WeightedShare):
    """A group with contexts or KV. Its weight is the sum of those of its tenants, which have been
    here since it was last away. `num_used` blocks are held by contexts, and `num_cached` blocks and
    slots of the host by nobody. A block counts for the group for which it was computed, also while
    others share it."""

    salt: str = ""
    weights: dict[str, float] = field(default_factory=dict)
    num_contexts: int = 0
    num_used: int = 0
    num_cached: int = 0


Amount = Callable[[ShareGroup], int]


class KvShares:
    """The groups of one engine, whose device has `num_blocks`. `WeightedShares` are installed with
    the second group."""

    def __init__(self, num_blocks: int, clock: Clock | None = None) -> None:
        self._num_blocks = num_blocks
        self.run_slack = int(num_blocks * _RUN_SLACK_FRACTION)
        self._clock = clock or MonotonicClock()
        self._groups: dict[str, ShareGroup] = {}
        self._queues: list[EvictionQueue[Any]] = []
        self._weighted: WeightedShares[ShareGroup] | None = None

    def group(self, salt: str) -> ShareGroup:
        """The group of a salt, which is here from now on."""
        group = self._groups.get(salt)
        if group is None:
            if self._groups and self._weighted is None:
                self._install()
            group = self._groups[salt] = ShareGroup(salt=salt)
        self.touch(group)
        return group

    def _install(self) -> None:
        self._weighted = WeightedShares(self._clock)
        for group in self._groups.values():
            self._weighted.enter(group)
        for queue in self._queues:
            queue.install(self._weighted)

    def record_request(self, group: ShareGroup, tenant: str, weight: float) -> None:
        """A request of one of its tenants has come."""
        self.touch(group)
        if group.weights.get(tenant) == weight:
            return
        if tenant in group.weights or len(group.weights) < _MAX_TENANTS:
            group.weights[tenant] = weight
            total = sum(group.weights.values())
            if self._weighted is None:
                group.weight = total
            else:
                self._weighted.reweigh(group, total)

    def touch(self, group: ShareGroup) -> None:
        """It is here now."""
        if self._weighted is None:
            group.seen = self._clock.now()
            return
        if group.is_away:
            group.weights.clear()
        self._weighted.touch(group)

    def grew(self, group: ShareGroup) -> None:
        """It has more KV."""
        if self._weighted is not None:
            self._weighted.grew(group)

    def add_cached(self, group: ShareGroup | None) -> ShareGroup:
        """The group, which may have been forgotten, with one kept block more; None: of no salt."""
        salt = "" if group is None else group.salt
        known = self._groups.get(salt) or self.group(salt)
        known.num_cached += 1
        self.grew(known)
        return known

    def remove_cached(self, group: ShareGroup) -> None:
        """One kept block less."""
        group.num_cached -= 1
        self.remove_if_empty(group)

    def remove_if_empty(self, group: ShareGroup) -> None:
        """Forget it if it has neither contexts nor KV."""
        if not (group.num_contexts or group.num_used or group.num_cached):
            del self._groups[group.salt]
            if self._weighted is not None:
                self._weighted.remove(group)

    @property
    def num_changes(self) -> int:
        """Rises when other KV may go than before."""
        return 0 if self._weighted is None else self._weighted.num_changes

    @property
    def protected_per_weight(self) -> float:
        """Blocks of the device that are protected for a weight of 1; 0 for a group alone."""
        if self._weighted is None or self._weighted.num_present < 2:
            return 0.0
        return _PROTECTED_FRACTION * self._num_blocks / self._weighted.weight

    def protects(self, group: ShareGroup) -> bool:
        """Whether its contexts hold no more than what is protected."""
        if self._weighted is None:
            return False
        self._weighted.sweep()
        most = self.protected_per_weight * group.weight
        return most > 0.0 and not group.is_away and group.num_used <= most

    def add_queue(self, queue: "EvictionQueue[Any]") -> None:
        self._queues.append(queue)
        if self._weighted is not None:
            queue.install(self._weighted)

    def remove_queue(self, queue: "EvictionQueue[Any]") -> None:
        """The queue is empty, and stays so."""
        self._queues.remove(queue)

    def check_integrity(self, counts: Mapping[ShareGroup, tuple[int, int, int]]) -> None:
        """`counts`: of each group, its contexts, and what it uses and keeps. Raises AssertionError
        with what differs."""
        groups = {group: _counted(group) for group in self._groups.values()}
        assert groups == {g: count for g, count in counts.items() if any(count)}, (groups, counts)
        if self._weighted is None:
            assert len(groups) <= 1, groups
        else:
            self._weighted.check_integrity(set(groups))


def _counted(group: ShareGroup) -> tuple[int, int, int]:
    return group.num_contexts, group.num_used, group.num_cached


class EvictionQueue(Generic[T]):
    """Things that may go, each group's in an order of its own. First goes the first of the group
    that loses first by its `amount`: see `LossOrder`, which is there from the second group on."""

    def __init__(self, shares: KvShares, amount: Amount) -> None:
        self._shares = shares
        self._amount = amount
        self._items: dict[ShareGroup, OrderedDict[T, None]] = {}
        self._order: LossOrder[ShareGroup] | None = None
        self._num_items = 0
        shares.add_queue(self)

    def install(self, weighted: WeightedShares[ShareGroup]) -> None:
        """There is a second group from now on."""
        self._order = weighted.order(self._amount)
        for group in self._items:
            self._order.add(group)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """Yield all, group by group as these are now."""
        for group in self.groups():
            yield from self._items[group]

    def groups(self) -> list[ShareGroup]:
        """Those with something in queue, in order."""
        order = self._order
        return list(self._items) if order is None else sorted(self._items, key=order.key)

    def has(self, group: ShareGroup, item: T) -> bool:
        return item in self._items.get(group, ())

    def of(self, group: ShareGroup) -> Collection[T]:
        """Its part of the queue, in order."""
        return self._items.get(group, {}).keys()

    def add(self, group: ShareGroup, item: T, *, goes_first: bool = False) -> None:
        """It is the last of its group to go, or the first; also if it was in queue."""
        items = self._items.get(group)
        if items is None:
            items = self._items[group] = OrderedDict()
            if self._order is not None:
                self._order.add(group)
        elif item in items:
            self._num_items -= 1
            del items[item]
        self._num_items += 1
        items[item] = None
        if goes_first:
            items.move_to_end(item, last=False)

    def add_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """`add` these, of which none is in queue."""
        self.add(group, items[0])
        queue = self._items[group]
        for item in items[1:]:
            queue[item] = None
        self._num_items += len(items) - 1

    def discard(self, group: ShareGroup, item: T) -> None:
        """It leaves the queue, if it is in it."""
        items = self._items.get(group)
        if items is None or item not in items:
            return
        del items[item]
        self._num_items -= 1
        if not items:
            del self._items[group]
            if self._order is not None:
                self._order.discard(group)

    def first(self) -> T | None:
        group = self.first_group()
        return None if group is None else next(iter(self._items[group]))

    def first_group(self) -> ShareGroup | None:
        """Whose turn it is to lose something."""
        order = self._order
        if order is None or len(self._items) == 1 == len(order):
            return next(iter(self._items), None)
        return order.first()

    def surplus(self, group: ShareGroup) -> int | None:
        """How much the group, whose turn it is, loses before it is another's turn or it is
        protected; None: all that it has."""
        level = self._shares.protected_per_weight
        if self._order is None or not level or group.is_away:
            return None
        return self._excess(self._order, group, level)

    def _excess(self, order: LossOrder[ShareGroup], group: ShareGroup, level: float) -> int:
        """How much the group, whose turn it is, has above a level and the next group's."""
        order.discard(group)
        other = self.first_group()
        order.add(group)
        if other is not None:
            level = max(level, order.level(other))
        return max(1, ceil(self._amount(group) - level * group.weight))

    def first_run(self, most: int) -> Sequence[T]:
        """Return at most so many that go next, of one group: till it is another's turn, or a few
        more."""
        group, order = self.first_group(), self._order
        if group is None:
            return ()
        if order is not None and most > 1 and len(order) > 1 and not group.is_away:
            most = min(most, self._excess(order, group, 0.0) + self._shares.run_slack)
        return list(islice(self._items[group], most))

    def discard_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """These, which are in queue, leave it."""
        for item in items[1:]:
            del self._items[group][item]
        self._num_items -= len(items) - 1
        self.discard(group, items[0])

    def suspend(self, group: ShareGroup) -> None:
        """It is nobody's turn but others', till `resume`."""
        if self._order is not None:
            self._order.discard(group)

    def resume(self, groups: Collection[ShareGroup]) -> None:
        """It may be the turn of these again."""
        if self._order is None:
            return
        for group in groups:
            if group in self._items:
                self._order.add(group)

    def check_integrity(self) -> None:
        assert self._num_items == sum(map(len, self._items.values())), self._num_items
        if self._order is not None:
            assert set(self._order) == set(self._items), (self._order, self._items)
            self._order.check_integrity()


def num_used(group: ShareGroup) -> int:
    """Blocks of the device that its contexts hold."""
    return group.num_used


def num_resident(group: ShareGroup) -> int:
    """Blocks that there are of it, and slots of the host."""
    return group.num_used + group.num_cached


class TenantShare(NamedTuple):
    """The tenant of a request, and by what part tenants of the same weight that crowd the engine
    may lengthen its steps; None: by any."""

    tenant: str = ""
    weight: float = 1.0
    step_growth: float | None = None


ALONE = TenantShare()
