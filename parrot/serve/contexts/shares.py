"""Whose idle context goes first when an engine is full.

Each tenant has a part of an engine's memory by its weight, beside the others with contexts there.
One that has more loses its own contexts first, and takes none of one that keeps to its part. What
an engine does that has no room for all that runs is its own affair. Who has not been there for a
while has no part any more."""

from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from itertools import islice

from parrot.serve.contexts.eviction import EvictionOrder
from parrot.serve.contexts.index import Context
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

_PRESENT_S = 120.0  # a tenant that was there so lately keeps its part
_MAX_LOOKS = 8  # tenants that are looked at for one eviction

WeightOf = Callable[[str], float]


@dataclass(slots=True)
class _Tenant:
    weight: float
    idle: EvictionOrder
    num_contexts: int = 0
    used: int = 0  # tokens of these
    seen: float = 0.0  # when one of them came or was used


class IdleByTenant:
    """One engine's idle contexts, those of each tenant in an order of their own, and what memory
    the tenants' contexts take."""

    def __init__(
        self, capacity: int, make_order: Callable[[], EvictionOrder], weight: WeightOf, clock: Clock
    ) -> None:
        self.capacity = capacity
        self._make_order = make_order
        self._weight_of = weight
        self._clock = clock
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # by `seen`
        self._weight = 0.0  # of all
        self._largest: LazyHeap[str, float] = LazyHeap()  # by weight; empty while there is one

    def opened(self, context: Context, size: int) -> None:
        tenant = self._tenants.get(context.tenant)
        if tenant is None:
            tenant = _Tenant(self._weight_of(context.tenant), self._make_order())
            self._tenants[context.tenant] = tenant
            self._weight += tenant.weight
            for name, known in self._tenants.items() if len(self._tenants) == 2 else ():
                self._largest.set(name, -known.used / known.weight)
        tenant.num_contexts += 1
        self.resized(context, size)

    def resized(self, context: Context, added: int) -> None:
        self._add(context.tenant, added)
        self._tenants[context.tenant].seen = self._clock.now()
        self._tenants.move_to_end(context.tenant)

    def freed(self, context: Context, size: int) -> None:
        """Its tenant has not been there for that: else who is away would lose only one."""
        self.discard(context)
        self._add(context.tenant, -size)
        tenant = self._tenants[context.tenant]
        tenant.num_contexts -= 1
        if not tenant.num_contexts:
            del self._tenants[context.tenant]
            self._largest.discard(context.tenant)
            self._weight = self._weight - tenant.weight if self._tenants else 0.0
            if len(self._tenants) == 1:
                self._largest.clear()

    def _add(self, name: str, tokens: int) -> None:
        tenant = self._tenants[name]
        tenant.used += tokens
        if len(self._tenants) > 1:
            self._largest.set(name, -tenant.used / tenant.weight)

    def add(self, context: Context, *, recent: bool) -> None:
        """See `EvictionOrder.add`."""
        self._tenants[context.tenant].idle.add(context, recent=recent)

    def discard(self, context: Context) -> None:
        """It is not idle any more."""
        self._tenants[context.tenant].idle.discard(context)

    def first(self, asking: str | None = None) -> Context | None:
        """The one to evict for the tenant `asking`; None if there is none that it may have. Without
        a tenant, it may be anybody's."""
        if len(self._tenants) < 2:
            return next((tenant.idle.first() for tenant in self._tenants.values()), None)
        return self._of_absent() or self._of_largest() or self._of_any(asking)

    def _of_absent(self) -> Context | None:
        """The first of those who have not been there for long."""
        end = self._clock.now() - _PRESENT_S
        for tenant in islice(self._tenants.values(), _MAX_LOOKS):
            if tenant.seen > end:
                return None
            if (first := tenant.idle.first()) is not None:
                return first
        return None

    def _of_largest(self) -> Context | None:
        """The first of those who have more than their part."""
        part = self.capacity / self._weight
        for name in self._largest.smallest(_MAX_LOOKS):
            tenant = self._tenants[name]
            if tenant.used / tenant.weight <= part:
                return None
            if (first := tenant.idle.first()) is not None:
                return first
        return None

    def _of_any(self, asking: str | None) -> Context | None:
        """The first of the tenant that asks, or, without one, of anybody."""
        if asking is not None:
            tenant = self._tenants.get(asking)
            return None if tenant is None else tenant.idle.first()
        firsts = (tenant.idle.first() for tenant in self._tenants.values())
        return next((first for first in firsts if first is not None), None)

    def context_ids(self) -> Collection[int]:
        return {i for tenant in self._tenants.values() for i in tenant.idle.context_ids()}

    def check_integrity(self, sizes: dict[Context, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with what differs."""
        used = dict.fromkeys(self._tenants, 0)
        for context, size in sizes.items():
            used[context.tenant] += size
        assert used == {name: t.used for name, t in self._tenants.items()}, (used, self._tenants)
        assert sum(t.num_contexts for t in self._tenants.values()) == len(sizes), self._tenants
        assert set(self._largest) == (set(used) if len(used) > 1 else set()), self._largest
