"""Weighted shares of one memory: which tenant loses memory first.

Inactive tenants lose first, and among them the one that has been inactive longest. Then the tenant
with the largest amount divided by its weight loses. ServeCore orders the contexts of an engine's
tenants by this rule, and an engine orders the KV of its share groups by it.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

PRESENT_S = 120.0  # Seconds after its last activity during which a tenant keeps its share.
_ROUNDED = 1e-6  # A sum below this part of the weight that was just removed is a rounding error.


@dataclass(slots=True, eq=False)
class WeightedShare:
    """One tenant's share. It is away until it is entered, and after `PRESENT_S` of inactivity."""

    weight: float = 1.0
    seen: float = 0.0  # Time of the last activity, in seconds of the clock.
    is_away: bool = True


S = TypeVar("S", bound=WeightedShare)


class WeightedShares(Generic[S]):
    """The active shares of one memory, and the sum of their weights.

    The owner reports each share's activity and calls `sweep` before it reads `is_away`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._present: OrderedDict[S, None] = OrderedDict()  # By `seen`.
        self._orders: list[LossOrder[S]] = []
        self.weight = 0.0
        self.num_changes = 0
        """Increases when the order of losses may have changed."""

    @property
    def num_present(self) -> int:
        return len(self._present)

    def touch(self, share: S) -> None:
        """The share is active now."""
        share.seen = self._clock.now()
        if share.is_away:
            self.enter(share)
        else:
            self._present.move_to_end(share)

    def enter(self, share: S) -> None:
        """Add a share that was last active after all others."""
        share.is_away = False
        self._present[share] = None
        self._add_weight(share.weight)
        self.num_changes += 1

    def reweigh(self, share: S, weight: float) -> None:
        """Change the weight of a share that is not away."""
        before, share.weight = share.weight, weight
        self._add_weight(weight - before)
        self.grew(share)

    def grew(self, share: S) -> None:
        """The share's amount rose, or its weight fell. Orders notice the opposite themselves."""
        self.num_changes += 1
        for order in self._orders:
            order.grew(share)

    def remove(self, share: S) -> None:
        """The share has no memory left."""
        if not share.is_away:
            self._leave(share)

    def sweep(self) -> None:
        """Mark shares as away after `PRESENT_S` seconds without activity."""
        end = self._clock.now() - PRESENT_S
        while self._present and (share := next(iter(self._present))).seen <= end:
            share.is_away = True
            self._leave(share)
            self.grew(share)

    def order(self, amount: Callable[[S], int]) -> "LossOrder[S]":
        """A new empty order by these amounts."""
        order = LossOrder(self, amount)
        self._orders.append(order)
        return order

    def _leave(self, share: S) -> None:
        del self._present[share]
        self._add_weight(-share.weight)

    def _add_weight(self, change: float) -> None:
        self.weight += change
        if self.weight < -change * _ROUNDED:
            self.weight = sum(share.weight for share in self._present)

    def check_integrity(self, shares: set[S]) -> None:
        """Recount from all shares with memory. Raises `AssertionError` with the difference."""
        assert set(self._present) == {s for s in shares if not s.is_away}, self._present
        weight = sum(share.weight for share in self._present)
        assert abs(self.weight - weight) <= _ROUNDED * max(1.0, weight), (self.weight, weight)
        seen = [share.seen for share in self._present]
        assert seen == sorted(seen), seen


class LossOrder(Generic[S]):
    """The shares that hold memory, in the order in which they lose it.

    Each operation takes O(log n) in the number of shares."""

    def __init__(self, shares: WeightedShares[S], amount: Callable[[S], int]) -> None:
        self._shares = shares
        self._amount = amount
        self._heap: LazyHeap[S, tuple[float, ...]] = LazyHeap()

    def __len__(self) -> int:
        return len(self._heap)

    def __contains__(self, share: object) -> bool:
        return share in self._heap

    def __iter__(self) -> Iterator[S]:
        return iter(self._heap)

    def add(self, share: S) -> None:
        self._heap.set(share, self.key(share))

    def discard(self, share: S) -> None:
        self._heap.discard(share)

    def grew(self, share: S) -> None:
        """See `WeightedShares.grew`."""
        if share in self._heap and (key := self.key(share)) < self._heap.key(share):
            self._heap.set(share, key)

    def first(self) -> S | None:
        """The share that loses first."""
        self._shares.sweep()
        while (top := self._heap.top()) is not None:
            (before, share), key = top, self.key(top[1])
            if before == key or self._heap.is_before_others(key):
                return share
            self._heap.set(share, key)  # The share has less than at its last look.
        return None

    def level(self, share: S) -> float:
        """The share's amount for a weight of 1."""
        return self._amount(share) / share.weight

    def key(self, share: S) -> tuple[float, ...]:
        return (0.0, share.seen) if share.is_away else (1.0, -self.level(share))

    def check_integrity(self) -> None:
        for share in self._heap:
            assert self._heap.key(share) <= self.key(share), f"{share} grew unnoticed"
