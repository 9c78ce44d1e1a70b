"""Orders of eviction: which idle context goes first."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from parrot.serve.contexts.index import Kept, LedgerContext, Residence, Room
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap, LruDict
from parrot.utils.weighted_shares import WeightedShare, WeightedShares

WeightOf = Callable[[str], float]


_REVIEW = 0.25  # a prediction is made anew after this part of the time to the next use
_SOONER = 0.9  # a use expected within this part of the predicted time changes the order
_MIN_REVIEW_S = 0.05
_MAX_LOOKS = 8  # predictions made anew before one context is evicted, of either kind
_MAX_FIRST_LOOKS = 64  # likewise, of contexts that have no prediction yet


class LeastRecentlyUsed:
    """Orders one engine's idle contexts: those without users and forks."""

    def __init__(self) -> None:
        self._idle: LruDict[int, LedgerContext] = LruDict()

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        """It is idle now, or was already and has moved. `recent`: it was used just now; else only
        what was forked from it has gone."""
        self._idle.put(context.id, context)
        self._idle.touch(context.id, newest=recent)

    def discard(self, context: LedgerContext) -> None:
        """It is not idle any more, or gone."""
        self._idle.pop(context.id)

    def first(self) -> LedgerContext | None:
        """The one to evict; None if none is idle."""
        oldest = self._idle.oldest()
        return None if oldest is None else oldest[1]

    def context_ids(self) -> Collection[int]:
        return self._idle.keys()


class FarthestNextUse:
    """Orders them by the predicted time of the next use. Nothing is predicted while there is room:
    an eviction looks at some of those that became idle since the last one, the oldest first.
    Predictions age: each is made anew after a part of the time that it spans, and before anything
    is evicted by it, a few at a time. Two heaps: an eviction takes O(log n) of all idle ones."""

    def __init__(self, predict: Callable[[LedgerContext, float], float], clock: Clock) -> None:
        self._predict = predict
        self._clock = clock
        self._fresh: dict[LedgerContext, None] = {}  # idle ones without a prediction yet
        self._farthest: LazyHeap[LedgerContext, float] = (
            LazyHeap()
        )  # the others, by minus the next use
        self._reviews: LazyHeap[LedgerContext, float] = LazyHeap()

    def __len__(self) -> int:
        return len(self._fresh) + len(self._farthest)

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        self.discard(context)
        self._fresh[context] = None

    def discard(self, context: LedgerContext) -> None:
        self._fresh.pop(context, None)
        self._farthest.discard(context)
        self._reviews.discard(context)

    def first(self) -> LedgerContext | None:
        now = self._clock.now()
        for context in list(islice(self._fresh, _MAX_FIRST_LOOKS)):
            self._file(context, now)
        looks = 0
        while (due := self._reviews.top()) and due[0] <= now and looks < _MAX_LOOKS:
            self._file(due[1], now)
            looks += 1
        looks = 0
        while (top := self._farthest.top()) is not None:
            rest_s, context = -top[0] - now, top[1]
            if looks == _MAX_LOOKS or self._predict(context, now) - now >= _SOONER * rest_s:
                return context
            self._file(context, now)  # it is expected sooner by now
            looks += 1
        return None

    def context_ids(self) -> Collection[int]:
        return {context.id for context in (*self._fresh, *self._farthest)}

    def _file(self, context: LedgerContext, now: float) -> None:
        self._fresh.pop(context, None)
        when = self._predict(context, now)
        self._farthest.set(context, -when)
        self._reviews.set(context, now + max(_MIN_REVIEW_S, _REVIEW * (when - now)))


EvictionOrder = LeastRecentlyUsed | FarthestNextUse


class EvictionRules(NamedTuple):
    """How an engine's idle contexts are ordered: those of one tenant, and the tenants by weight."""

    make_order: Callable[[], EvictionOrder]
    weigh: WeightOf
    clock: Clock


@dataclass(slots=True, eq=False, kw_only=True)
class _Tenant(WeightedShare):
    idle: EvictionOrder
    num_contexts: int = 0
    used: int = 0  # Tokens of these contexts.


def _used(tenant: _Tenant) -> int:
    return tenant.used


class IdleByTenant:
    """One engine's idle contexts, those of each tenant in an order of their own.

    It is installed with the second tenant. A tenant's share is its part of `capacity` by weight."""

    def __init__(self, capacity: int, rules: EvictionRules) -> None:
        self.capacity = capacity
        self._rules = rules
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # By `seen`.
        self._weight = 0.0  # Of all tenants, present or away.
        self._shares: WeightedShares[_Tenant] = WeightedShares(rules.clock)
        self._order = self._shares.order(_used)  # Of the tenants with idle contexts.

    def enter(
        self, name: str, idle: EvictionOrder, seen: float, num_contexts: int, used: int
    ) -> None:
        """Add a tenant that has been the only one."""
        tenant = self._new(name, idle)
        tenant.seen, tenant.num_contexts, tenant.used = seen, num_contexts, used
        self._shares.enter(tenant)
        if len(idle):
            self._order.add(tenant)

    def _new(self, name: str, idle: EvictionOrder) -> _Tenant:
        tenant = _Tenant(weight=self._rules.weigh(name), idle=idle)
        self._tenants[name] = tenant
        self._weight += tenant.weight
        return tenant

    def opened(self, context: LedgerContext, size: int) -> None:
        tenant = self._tenants.get(context.tenant)
        if tenant is None:
            tenant = self._new(context.tenant, self._rules.make_order())
        tenant.num_contexts += 1
        self.resized(context, size)

    def resized(self, context: LedgerContext, added: int) -> None:
        tenant = self._tenants[context.tenant]
        self._tenants.move_to_end(context.tenant)
        self._shares.touch(tenant)
        self._add(tenant, added)

    def freed(self, context: LedgerContext, size: int) -> None:
        """Freeing a context is no activity of its tenant. Otherwise an inactive tenant would lose
        one context and then keep its share again."""
        self.discard(context)
        tenant = self._tenants[context.tenant]
        self._add(tenant, -size)
        tenant.num_contexts -= 1
        if not tenant.num_contexts:
            del self._tenants[context.tenant]
            self._shares.remove(tenant)
            self._weight = self._weight - tenant.weight if self._tenants else 0.0

    def _add(self, tenant: _Tenant, tokens: int) -> None:
        tenant.used += tokens
        if tokens > 0:
            self._shares.grew(tenant)

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        """See `EvictionOrder.add`."""
        tenant = self._tenants[context.tenant]
        tenant.idle.add(context, recent=recent)
        if tenant not in self._order:
            self._order.add(tenant)

    def discard(self, context: LedgerContext) -> None:
        """It is not idle any more."""
        tenant = self._tenants[context.tenant]
        tenant.idle.discard(context)
        if not len(tenant.idle):
            self._order.discard(tenant)

    def first(self, asking: str | None = None) -> LedgerContext | None:
        """The one to evict for the tenant `asking`; None if there is none that it may have. Without
        a tenant, it may be anybody's."""
        if len(self._tenants) < 2:
            return self._of_any(None)
        loser = self._order.first()
        if loser is not None:
            share = self.capacity / self._weight
            if loser.is_away or self._order.level(loser) > share:
                return loser.idle.first()
        return self._of_any(asking)

    def _of_any(self, asking: str | None) -> LedgerContext | None:
        """The first of the tenant that asks, or, without one, of anybody."""
        if asking is not None:
            tenant = self._tenants.get(asking)
            return None if tenant is None else tenant.idle.first()
        firsts = (tenant.idle.first() for tenant in self._tenants.values())
        return next((first for first in firsts if first is not None), None)

    def context_ids(self) -> Collection[int]:
        return {i for tenant in self._tenants.values() for i in tenant.idle.context_ids()}

    def check_integrity(self, sizes: Mapping[LedgerContext, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with what differs."""
        used = dict.fromkeys(self._tenants, 0)
        for context, size in sizes.items():
            used[context.tenant] += size
        assert used == {name: t.used for name, t in self._tenants.items()}, (used, self._tenants)
        assert sum(t.num_contexts for t in self._tenants.values()) == len(sizes), self._tenants
        with_idle = {tenant for tenant in self._tenants.values() if tenant.idle.context_ids()}
        assert set(self._order) == with_idle, self._order
        self._order.check_integrity()
        self._shares.check_integrity(set(self._tenants.values()))


@dataclass(slots=True, kw_only=True)
class EngineMemory(Room):
    """Sizes are in tokens, rounded up to blocks. `capacity` counts the `host`'s, too; `residence`
    None: there is no host tier; `kept` None: the engine keeps what the ledger says, with no server
    behind it that does as it likes."""

    block_size: int
    rules: EvictionRules
    contexts: dict[int, LedgerContext] = field(default_factory=dict)
    residence: Residence | None = None
    kept: Kept | None = None
    # Of the only tenant, before there are several: its contexts without users and forks.
    _idle: EvictionOrder | None = field(init=False, default=None)
    _tenant: str = field(init=False, default="")
    _seen: float = field(init=False, default=0.0)  # When that tenant was last active.
    _by_tenant: IdleByTenant | None = field(init=False, default=None)

    def opened(self, context: LedgerContext) -> int:
        """Returns the context's size."""
        if self._by_tenant is None and (self._idle is None or context.tenant != self._tenant):
            self._came(context.tenant)
        size = self.size(context)
        self.contexts[context.id] = context
        self.used += size
        if self._by_tenant is None:
            self._seen = self.rules.clock.now()
        else:
            self._by_tenant.opened(context, size)
        return size

    def _came(self, tenant: str) -> None:
        """Another tenant comes. It may be the only one again."""
        if self._idle is None or not self.contexts:
            self._idle, self._tenant = self.rules.make_order(), tenant
            return
        self._by_tenant = IdleByTenant(self.capacity, self.rules)
        self._by_tenant.enter(self._tenant, self._idle, self._seen, len(self.contexts), self.used)

    def resized(self, context: LedgerContext, added: int) -> None:
        self.used += added
        if self._by_tenant is None:
            self._seen = self.rules.clock.now()
        else:
            self._by_tenant.resized(context, added)

    def freed(self, context: LedgerContext) -> None:
        size = self.size(context)
        self.used -= size
        del self.contexts[context.id]
        if self._by_tenant is None:
            self.discard_idle(context)
        else:
            self._by_tenant.freed(context, size)

    def add_idle(self, context: LedgerContext, *, recent: bool) -> None:
        """The context is idle. See `EvictionOrder.add`."""
        self._order().add(context, recent=recent)

    def discard_idle(self, context: LedgerContext) -> None:
        """It is not idle any more."""
        self._order().discard(context)

    def _order(self) -> EvictionOrder | IdleByTenant:
        order = self._by_tenant or self._idle
        assert order is not None, "there was no context"
        return order

    def first_to_evict(self, asking: str | None = None) -> LedgerContext | None:
        """See `IdleByTenant.first`. The only tenant's contexts go in their own order."""
        if self._by_tenant is not None:
            return self._by_tenant.first(asking)
        return None if self._idle is None else self._idle.first()

    def idle_ids(self) -> Collection[int]:
        return self._order().context_ids() if self.contexts else ()

    def use(self, context: LedgerContext) -> None:
        """A run has it on the device."""
        if self.residence is not None:
            self.residence.use(context)
        if self.kept is not None:
            self.kept.use(context)

    def trim(self) -> None:
        if self.kept is not None:
            self.kept.trim()

    def size(self, context: LedgerContext) -> int:
        """Tokens of the blocks that only this context and its forks have: a fork inside a block
        copies that block."""
        end = context.length + context.reserved
        num_blocks = -(-end // self.block_size) - context.parent_len // self.block_size
        return num_blocks * self.block_size

    def check_integrity(self) -> None:
        """Recount. Raises AssertionError with what differs."""
        contexts = self.contexts.values()
        used = sum(map(self.size, contexts))
        assert self.used == used, (self.used, used)
        idle = {context.id for context in contexts if not context.pins and not context.children}
        assert set(self.idle_ids()) == idle, (self.idle_ids(), idle)
        if self._by_tenant is None:
            assert all(context.tenant == self._tenant for context in contexts), self._tenant
        else:
            self._by_tenant.check_integrity({context: self.size(context) for context in contexts})
        for context in contexts:
            _check_links(context, self.contexts)
        if self.residence is not None:
            self.residence.check_integrity()
        if self.kept is not None:
            self.kept.check_integrity(contexts)


def _check_links(context: LedgerContext, live: Mapping[int, LedgerContext]) -> None:
    pinned = sum(1 for child in context.children if child.pins)
    assert context.pins == context.users + pinned, (context.id, context.pins, pinned)
    assert all(live.get(child.id) is child for child in context.children), context.id
    assert context.retired is None or context.pins or context.children, context.id
    if context.parent is not None:
        assert live.get(context.parent.id) is context.parent, context.id
        assert context in context.parent.children, context.id


class Owners:
    """The contexts by owner: a session has them until it ends, a tenant until nobody has used them
    for long. What sessions have is promised to them in `rooms`, by engine."""

    def __init__(self, rooms: Mapping[int, Room]) -> None:
        self._rooms = rooms
        self._sizes: dict[int, int] = {}  # of sessions' contexts
        self._by_session: dict[int, dict[int, LedgerContext]] = {}
        self._of_tenants: LruDict[int, LedgerContext] = LruDict()

    def add(self, context: LedgerContext, size: int) -> None:
        if isinstance(context.owner, int):
            self._by_session.setdefault(context.owner, {})[context.id] = context
            self._sizes[context.id] = 0
            self.resized(context, size)
        else:
            self._of_tenants.put(context.id, context)

    def resized(self, context: LedgerContext, added: int) -> None:
        if context.id in self._sizes:
            self._sizes[context.id] += added
            if (room := self._rooms.get(context.engine_id)) is not None:
                room.promised += added

    def remove(self, context: LedgerContext) -> None:
        if isinstance(context.owner, str):
            self._of_tenants.pop(context.id)
            return
        self.resized(context, -self._sizes[context.id])
        del self._sizes[context.id]
        owned = self._by_session[context.owner]
        del owned[context.id]
        if not owned:
            del self._by_session[context.owner]

    def share(self, context: LedgerContext, tenant: str) -> None:
        """Leave a session's context to its tenant: others want it, too."""
        if isinstance(context.owner, int):
            self.remove(context)
            context.owner = tenant
            self.add(context, 0)

    def of_session(self, session_id: int) -> list[LedgerContext]:
        """The session's contexts in the order in which they became its."""
        return list(self._by_session.get(session_id, {}).values())

    def is_of(self, context: LedgerContext, session_id: int) -> bool:
        return context.id in self._by_session.get(session_id, {})

    def touch(self, context: LedgerContext) -> None:
        """If it is a tenant's, it is the last to expire."""
        if isinstance(context.owner, str):
            self._of_tenants.touch(context.id)

    def oldest_of_tenants(self) -> LedgerContext | None:
        oldest = self._of_tenants.oldest()
        return None if oldest is None else oldest[1]

    def contexts(self) -> list[LedgerContext]:
        """The contexts of all owners."""
        of_sessions = [c for owned in self._by_session.values() for c in owned.values()]
        return of_sessions + list(self._of_tenants.values())

    def context_ids(self) -> set[int]:
        return set(self._of_tenants).union(*self._by_session.values())

    def check_integrity(self, sizes: Mapping[LedgerContext, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with what differs."""
        assert self.context_ids() == {context.id for context in sizes}, self.context_ids()
        promised = dict.fromkeys(self._rooms, 0)
        for context, size in sizes.items():
            if isinstance(context.owner, int) and context.engine_id in promised:
                promised[context.engine_id] += size
        assert promised == {engine_id: room.promised for engine_id, room in self._rooms.items()}
