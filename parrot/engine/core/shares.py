"""Shares of the KV memory: which KV is evicted first when blocks run out.

Requests with the same cache salt form a share group: one tenant, or several that share cached KV.
Each active group has a share of the blocks by weight. KV that contexts hold within half of their
group's share is protected: other groups' jobs get it last. Inactive groups have no share, and their
KV is evicted first (utils/weighted_shares.py). A single group only has the order of last use.

    KV of a group                   counted as     evicted
    blocks that contexts hold       `num_used`     only idle contexts, least recently used first
    cached blocks of no context,    `num_cached`   before idle contexts
    and copies in CPU memory

Idle contexts are the items of one `EvictionQueue` (core/contexts.py). Cached blocks and copies in
CPU memory are the items of others (core/block_pool.py, core/host). Core/requests.py reports each
request with `record_request`; contexts and blocks are reported where they are created and freed. A
group becomes inactive when it has sent no request for 120 s.

Example: 100 blocks. Group A (weight 1) has idle contexts with 40 blocks, and group B (weight 3) has
idle contexts with 50. 10 blocks are free.

    blocks per weight      A: 40 / 1 = 40          B: 50 / 3 = 16.7      A loses first
    protected blocks       A: 0.5 * 100 * 1 / 4    B: 0.5 * 100 * 3 / 4
                              = 12.5                  = 37.5

A job that needs 30 blocks evicts 20 blocks of A. After 24 blocks A would have less per weight than
B, and B would lose next. A is protected once its contexts hold 12 blocks, and B once its contexts
hold 37.
"""

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from math import ceil
from typing import Any, Generic, NamedTuple, TypeVar

from parrot.utils.clock import Clock, MonotonicClock
from parrot.utils.weighted_shares import LossOrder, WeightedShare, WeightedShares

# Fraction of each share that is protected. A larger value makes other groups' jobs wait more often.
_PROTECTED_FRACTION = 0.5
_MAX_TENANTS = 1024  # Tenants of one group whose weights are added. Further tenants add no weight.
# Fraction of all blocks by which an eviction may exceed a group's turn. Larger runs take less time.
_RUN_SLACK_FRACTION = 1 / 1024

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class ShareGroup(WeightedShare):
    """A group with contexts or KV. Its weight is the sum of its tenants' weights.

    A block counts for the group that it was computed for, also while other groups share it."""

    salt: str = ""
    weights: dict[str, float] = field(default_factory=dict)  # By tenant, since last inactive.
    num_contexts: int = 0
    num_used: int = 0  # GPU blocks that contexts hold.
    num_cached: int = 0  # GPU blocks and CPU memory slots with KV that no context holds.


Amount = Callable[[ShareGroup], int]


class KvShares:
    """The share groups of an engine with `num_blocks` GPU blocks.

    `WeightedShares` are installed with the second group."""

    def __init__(self, num_blocks: int, clock: Clock | None = None) -> None:
        self._num_blocks = num_blocks
        self.run_slack = int(num_blocks * _RUN_SLACK_FRACTION)
        self._clock = clock or MonotonicClock()
        self._groups: dict[str, ShareGroup] = {}
        self._queues: list[EvictionQueue[Any]] = []
        self._weighted: WeightedShares[ShareGroup] | None = None

    def group(self, salt: str) -> ShareGroup:
        """The group of a salt, which is created if needed and is active now."""
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
        """Record a request of one of the group's tenants, and the tenant's weight."""
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
        """Record that the group is active now."""
        if self._weighted is None:
            group.seen = self._clock.now()
            return
        if group.is_away:
            group.weights.clear()
        self._weighted.touch(group)

    def grew(self, group: ShareGroup) -> None:
        """The group's KV has grown."""
        if self._weighted is not None:
            self._weighted.grew(group)

    def add_cached(self, group: ShareGroup | None) -> ShareGroup:
        """Count one more cached block for a group, which is created again if it was removed.

        None stands for the group of the empty salt."""
        salt = "" if group is None else group.salt
        known = self._groups.get(salt) or self.group(salt)
        known.num_cached += 1
        self.grew(known)
        return known

    def remove_cached(self, group: ShareGroup) -> None:
        """Count one cached block less."""
        group.num_cached -= 1
        self.remove_if_empty(group)

    def remove_if_empty(self, group: ShareGroup) -> None:
        """Remove a group that has neither contexts nor KV."""
        if not (group.num_contexts or group.num_used or group.num_cached):
            del self._groups[group.salt]
            if self._weighted is not None:
                self._weighted.remove(group)

    @property
    def num_changes(self) -> int:
        """Increases when the order of eviction or the protection may have changed."""
        return 0 if self._weighted is None else self._weighted.num_changes

    @property
    def protected_per_weight(self) -> float:
        """GPU blocks that are protected for a weight of 1; 0 while one group is active."""
        if self._weighted is None or self._weighted.num_present < 2:
            return 0.0
        return _PROTECTED_FRACTION * self._num_blocks / self._weighted.weight

    def protects(self, group: ShareGroup) -> bool:
        """Whether the group's contexts hold no more blocks than are protected."""
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
        """Remove an empty queue that is no longer used."""
        self._queues.remove(queue)

    def check_integrity(self, counts: Mapping[ShareGroup, tuple[int, int, int]]) -> None:
        """Compare with `counts`: each group's contexts, used and cached blocks.

        Raises AssertionError with the difference."""
        groups = {group: _counted(group) for group in self._groups.values()}
        assert groups == {g: count for g, count in counts.items() if any(count)}, (groups, counts)
        if self._weighted is None:
            assert len(groups) <= 1, groups
        else:
            self._weighted.check_integrity(set(groups))


def _counted(group: ShareGroup) -> tuple[int, int, int]:
    return group.num_contexts, group.num_used, group.num_cached


class EvictionQueue(Generic[T]):
    """Evictable items in one queue per group.

    The next item is the first of the group that loses first by `amount` (see `LossOrder`). A single
    group has no `LossOrder`."""

    def __init__(self, shares: KvShares, amount: Amount) -> None:
        self._shares = shares
        self._amount = amount
        self._items: dict[ShareGroup, OrderedDict[T, None]] = {}
        self._order: LossOrder[ShareGroup] | None = None
        self._num_items = 0
        shares.add_queue(self)

    def install(self, weighted: WeightedShares[ShareGroup]) -> None:
        """Order the groups, because there is a second one."""
        self._order = weighted.order(self._amount)
        for group in self._items:
            self._order.add(group)

    def __len__(self) -> int:
        return self._num_items

    def __iter__(self) -> Iterator[T]:
        """Yield all items, group by group in the current order."""
        for group in self.groups():
            yield from self._items[group]

    def groups(self) -> list[ShareGroup]:
        """The groups with queued items, in order of eviction."""
        order = self._order
        return list(self._items) if order is None else sorted(self._items, key=order.key)

    def has(self, group: ShareGroup, item: T) -> bool:
        return item in self._items.get(group, ())

    def of(self, group: ShareGroup) -> Collection[T]:
        """The group's items, in order of eviction."""
        return self._items.get(group, {}).keys()

    def add(self, group: ShareGroup, item: T, *, goes_first: bool = False) -> None:
        """Put an item at the end of its group's queue, or at the front with `goes_first`.

        An item that is queued already is moved."""
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
        """Add several items, none of which is queued."""
        self.add(group, items[0])
        queue = self._items[group]
        for item in items[1:]:
            queue[item] = None
        self._num_items += len(items) - 1

    def discard(self, group: ShareGroup, item: T) -> None:
        """Remove an item if it is queued."""
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
        """The group that loses the next item."""
        order = self._order
        if order is None or len(self._items) == 1 == len(order):
            return next(iter(self._items), None)
        return order.first()

    def surplus(self, group: ShareGroup) -> int | None:
        """The amount that the first group loses before another group is first, or it is protected.

        None means everything that the group has."""
        level = self._shares.protected_per_weight
        if self._order is None or not level or group.is_away:
            return None
        return self._excess(self._order, group, level)

    def _excess(self, order: LossOrder[ShareGroup], group: ShareGroup, level: float) -> int:
        """The first group's amount above `level` and above the next group's level, by weight."""
        order.discard(group)
        other = self.first_group()
        order.add(group)
        if other is not None:
            level = max(level, order.level(other))
        return max(1, ceil(self._amount(group) - level * group.weight))

    def first_run(self, most: int) -> Sequence[T]:
        """The next items, at most `most`, all of the first group.

        The run ends when another group is first, plus `run_slack` items."""
        group, order = self.first_group(), self._order
        if group is None:
            return ()
        if order is not None and most > 1 and len(order) > 1 and not group.is_away:
            most = min(most, self._excess(order, group, 0.0) + self._shares.run_slack)
        return list(islice(self._items[group], most))

    def discard_run(self, group: ShareGroup, items: Sequence[T]) -> None:
        """Remove several queued items of one group."""
        for item in items[1:]:
            del self._items[group][item]
        self._num_items -= len(items) - 1
        self.discard(group, items[0])

    def suspend(self, group: ShareGroup) -> None:
        """Skip the group in the order of eviction until `resume`."""
        if self._order is not None:
            self._order.discard(group)

    def resume(self, groups: Collection[ShareGroup]) -> None:
        """Put suspended groups back into the order of eviction."""
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
    """GPU blocks that the group's contexts hold."""
    return group.num_used


def num_resident(group: ShareGroup) -> int:
    """GPU blocks and CPU memory slots with the group's KV."""
    return group.num_used + group.num_cached


class TenantShare(NamedTuple):
    """The tenant of a request, and the limit on its steps."""

    tenant: str = ""
    weight: float = 1.0
    # Fraction by which a crowding tenant of the same weight may lengthen steps. None: no limit.
    step_growth: float | None = None


ALONE = TenantShare()
