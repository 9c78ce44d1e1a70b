"""Eviction: which idle context an engine loses first, and who owns each context.

An idle context has no users and no forks. With one tenant, `FarthestNextUse` or
`LeastRecentlyUsed` orders all idle contexts. From the second tenant on, each tenant has an order
of its own, and `IdleByTenant` chooses the tenant."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from parrot.serve.contexts.index import GpuTier, KvUsage, LedgerContext, ServerCache
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap, LruDict
from parrot.utils.weighted_shares import WeightedShare, WeightedShares

WeightOf = Callable[[str], float]


# A prediction is repeated after this fraction of the predicted time to the next use. A larger value
# costs less CPU and lets predictions get older.
_REPREDICT_FRACTION = 0.25
_MIN_REPREDICT_S = 0.05  # A prediction is never repeated sooner than after this time, in seconds.
# The first candidate is evicted if its time to the next use is still at least this fraction of the
# predicted time. Otherwise the candidate is ordered again.
_SOONER_FRACTION = 0.9
# Largest number of overdue predictions that one eviction repeats. Also the largest number of
# candidates that one eviction orders again.
_MAX_REPREDICTIONS = 8
# Largest number of contexts for which one eviction makes the first prediction.
_MAX_FIRST_PREDICTIONS = 64


class LeastRecentlyUsed:
    """Orders idle contexts by their last use: the least recently used is evicted first."""

    def __init__(self) -> None:
        self._idle: LruDict[int, LedgerContext] = LruDict()

    def __len__(self) -> int:
        return len(self._idle)

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        """Add an idle context, or move it. `recent`: it was used just now, so it is evicted last.
        Otherwise it became idle because its last fork was freed, and it is evicted first."""
        self._idle.put(context.id, context)
        self._idle.touch(context.id, newest=recent)

    def discard(self, context: LedgerContext) -> None:
        """Remove a context that is in use or was freed. No effect if it is not in the order."""
        self._idle.pop(context.id)

    def first_to_evict(self) -> LedgerContext | None:
        """The next context to evict; None if no context is idle."""
        oldest = self._idle.oldest()
        return None if oldest is None else oldest[1]

    def context_ids(self) -> Collection[int]:
        return self._idle.keys()


class FarthestNextUse:
    """Orders idle contexts by their predicted next use: the latest use is evicted first.

    Predictions are made only when something must be evicted, and repeated as they get older. The
    limits on them bound the cost of an eviction to O(log n) for n idle contexts."""

    def __init__(self, predict: Callable[[LedgerContext, float], float], clock: Clock) -> None:
        self._predict = predict
        self._clock = clock
        # Contexts that became idle since the last eviction, the oldest first.
        self._unpredicted: dict[LedgerContext, None] = {}
        # All other contexts. The keys are the negated times of the next use: the latest is on top.
        self._by_next_use: LazyHeap[LedgerContext, float] = LazyHeap()
        self._prediction_expiry: LazyHeap[LedgerContext, float] = LazyHeap()  # Same contexts.

    def __len__(self) -> int:
        return len(self._unpredicted) + len(self._by_next_use)

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        self.discard(context)
        self._unpredicted[context] = None

    def discard(self, context: LedgerContext) -> None:
        if context in self._unpredicted:
            del self._unpredicted[context]
        else:
            self._by_next_use.discard(context)
            self._prediction_expiry.discard(context)

    def first_to_evict(self) -> LedgerContext | None:
        now = self._clock.now()
        for context in list(islice(self._unpredicted, _MAX_FIRST_PREDICTIONS)):
            self._repredict(context, now)
        num_repredicted = 0
        while (
            (due := self._prediction_expiry.top())
            and due[0] <= now
            and num_repredicted < _MAX_REPREDICTIONS
        ):
            self._repredict(due[1], now)
            num_repredicted += 1
        num_repredicted = 0
        while (top := self._by_next_use.top()) is not None:
            rest_s, context = -top[0] - now, top[1]
            if (
                num_repredicted == _MAX_REPREDICTIONS
                or self._predict(context, now) - now >= _SOONER_FRACTION * rest_s
            ):
                return context
            self._repredict(context, now)
            num_repredicted += 1
        return None

    def context_ids(self) -> Collection[int]:
        return {context.id for context in (*self._unpredicted, *self._by_next_use)}

    def _repredict(self, context: LedgerContext, now: float) -> None:
        self._unpredicted.pop(context, None)
        when = self._predict(context, now)
        self._by_next_use.set(context, -when)
        self._prediction_expiry.set(
            context, now + max(_MIN_REPREDICT_S, _REPREDICT_FRACTION * (when - now))
        )


EvictionOrder = LeastRecentlyUsed | FarthestNextUse


class EvictionRules(NamedTuple):
    """How an engine's idle contexts are ordered."""

    make_order: Callable[[], EvictionOrder]  # Makes the order inside one tenant.
    weigh: WeightOf  # The weight of a tenant, by its name.
    clock: Clock


@dataclass(slots=True, eq=False, kw_only=True)
class _Tenant(WeightedShare):
    idle: EvictionOrder
    num_contexts: int = 0
    used: int = 0  # Tokens of all contexts of the tenant.


def _used(tenant: _Tenant) -> int:
    return tenant.used


class IdleByTenant:
    """One engine's idle contexts, with one order per tenant.

    It is used from the second tenant on. A tenant's share is its weighted part of `capacity`."""

    def __init__(self, capacity: int, rules: EvictionRules) -> None:
        self.capacity = capacity
        self._rules = rules
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()  # By `seen`.
        self._weight = 0.0  # Sum of the weights of all tenants, also of inactive ones.
        self._shares: WeightedShares[_Tenant] = WeightedShares(rules.clock)
        self._order = self._shares.order(_used)  # The tenants with idle contexts.

    def enter(
        self, name: str, idle: EvictionOrder, seen: float, num_contexts: int, used: int
    ) -> None:
        """Add the engine's first tenant, with the order that it had alone."""
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
        """Remove a freed context. This does not count as activity of its tenant. Otherwise an
        inactive tenant would lose one context and then keep its share again."""
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
        """See `LeastRecentlyUsed.add`."""
        tenant = self._tenants[context.tenant]
        tenant.idle.add(context, recent=recent)
        if tenant not in self._order:
            self._order.add(tenant)

    def discard(self, context: LedgerContext) -> None:
        """Remove a context that is in use or was freed."""
        tenant = self._tenants[context.tenant]
        tenant.idle.discard(context)
        if not len(tenant.idle):
            self._order.discard(tenant)

    def first_to_evict(self, requester: str | None = None) -> LedgerContext | None:
        """The next context to evict when the tenant `requester` needs blocks.

        Inactive tenants and tenants above their share lose first, then the requester itself. None
        if no such context is idle. Without a requester, any tenant's contexts may be evicted."""
        if len(self._tenants) < 2:
            return self._first_of(None)
        victim = self._order.first()
        if victim is not None:
            share = self.capacity / self._weight
            if victim.is_away or self._order.level(victim) > share:
                return victim.idle.first_to_evict()
        return self._first_of(requester)

    def _first_of(self, requester: str | None) -> LedgerContext | None:
        """The requester's next context to evict; without a requester, any tenant's."""
        if requester is not None:
            tenant = self._tenants.get(requester)
            return None if tenant is None else tenant.idle.first_to_evict()
        firsts = (tenant.idle.first_to_evict() for tenant in self._tenants.values())
        return next((first for first in firsts if first is not None), None)

    def context_ids(self) -> Collection[int]:
        return {i for tenant in self._tenants.values() for i in tenant.idle.context_ids()}

    def check_integrity(self, sizes: Mapping[LedgerContext, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with the difference."""
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
class EngineMemory(KvUsage):
    """One engine's contexts and KV usage. `capacity` includes KV in CPU memory."""

    block_size: int
    rules: EvictionRules
    contexts: dict[int, LedgerContext] = field(default_factory=dict)
    gpu_tier: GpuTier | None = None  # None: all KV is in GPU memory.
    server_cache: ServerCache | None = None  # None: the engine evicts only when the ledger says so.
    # The first tenant's idle contexts. Unused from the second tenant on.
    _idle: EvictionOrder | None = field(init=False, default=None)
    _tenant: str = field(init=False, default="")  # The first tenant.
    _seen: float = field(init=False, default=0.0)  # When that tenant was last active.
    _by_tenant: IdleByTenant | None = field(init=False, default=None)  # None: there is one tenant.

    def opened(self, context: LedgerContext) -> int:
        """Add a context, and return its size."""
        if self._by_tenant is None and (self._idle is None or context.tenant != self._tenant):
            self._add_tenant(context.tenant)
        size = self.size(context)
        self.contexts[context.id] = context
        self.used += size
        if self._by_tenant is None:
            self._seen = self.rules.clock.now()
        else:
            self._by_tenant.opened(context, size)
        return size

    def _add_tenant(self, tenant: str) -> None:
        """Add a tenant. If no context is left, it becomes the only tenant."""
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
        """See `LeastRecentlyUsed.add`."""
        self._order().add(context, recent=recent)

    def discard_idle(self, context: LedgerContext) -> None:
        """Remove a context that is in use or was freed from the candidates for eviction."""
        self._order().discard(context)

    def _order(self) -> EvictionOrder | IdleByTenant:
        order = self._by_tenant or self._idle
        assert order is not None, "there was no context"
        return order

    def first_to_evict(self, requester: str | None = None) -> LedgerContext | None:
        """See `IdleByTenant.first_to_evict`. With one tenant, any idle context may be evicted."""
        if self._by_tenant is not None:
            return self._by_tenant.first_to_evict(requester)
        return None if self._idle is None else self._idle.first_to_evict()

    def idle_ids(self) -> Collection[int]:
        return self._order().context_ids() if self.contexts else ()

    def use(self, context: LedgerContext) -> None:
        """Mark the context as used by a run, which has it in GPU memory."""
        if self.gpu_tier is not None:
            self.gpu_tier.use(context)
        if self.server_cache is not None:
            self.server_cache.use(context)

    def trim(self) -> None:
        """Drop the contexts that a foreign server has probably evicted."""
        if self.server_cache is not None:
            self.server_cache.trim()

    def size(self, context: LedgerContext) -> int:
        """Tokens of the blocks after the shared prefix. A fork inside a block copies the block."""
        end = context.length + context.reserved
        num_blocks = -(-end // self.block_size) - context.parent_len // self.block_size
        return num_blocks * self.block_size

    def check_integrity(self) -> None:
        """Recount. Raises AssertionError with the difference."""
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
        if self.gpu_tier is not None:
            self.gpu_tier.check_integrity()
        if self.server_cache is not None:
            self.server_cache.check_integrity(contexts)


def _check_links(context: LedgerContext, live: Mapping[int, LedgerContext]) -> None:
    pinned = sum(1 for child in context.children if child.pins)
    assert context.pins == context.users + pinned, (context.id, context.pins, pinned)
    assert all(live.get(child.id) is child for child in context.children), context.id
    assert context.retired is None or context.pins or context.children, context.id
    if context.parent is not None:
        assert live.get(context.parent.id) is context.parent, context.id
        assert context in context.parent.children, context.id


class Owners:
    """The contexts by owner. A session owns contexts until it ends; a tenant, until they expire.

    The sizes of sessions' contexts are added to `KvUsage.session_tokens`."""

    def __init__(self, kv_usage: Mapping[int, KvUsage]) -> None:
        self._kv_usage = kv_usage
        self._sizes: dict[int, int] = {}  # Sizes of sessions' contexts, by context id.
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
            if (usage := self._kv_usage.get(context.engine_id)) is not None:
                usage.session_tokens += added

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

    def give_to_tenant(self, context: LedgerContext, tenant: str) -> None:
        """Make the tenant the owner of a session's context, which several sessions now use."""
        if isinstance(context.owner, int):
            self.remove(context)
            context.owner = tenant
            self.add(context, 0)

    def of_session(self, session_id: int) -> list[LedgerContext]:
        """The session's contexts, in the order in which the session became their owner."""
        return list(self._by_session.get(session_id, {}).values())

    def is_owned_by(self, context: LedgerContext, session_id: int) -> bool:
        return context.id in self._by_session.get(session_id, {})

    def touch(self, context: LedgerContext) -> None:
        """Make a tenant's context the last to expire. No effect on sessions' contexts."""
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
        """Recount by the sizes of all contexts. Raises AssertionError with the difference."""
        assert self.context_ids() == {context.id for context in sizes}, self.context_ids()
        counted = dict.fromkeys(self._kv_usage, 0)
        for context, size in sizes.items():
            if isinstance(context.owner, int) and context.engine_id in counted:
                counted[context.engine_id] += size
        assert counted == {
            engine_id: usage.session_tokens for engine_id, usage in self._kv_usage.items()
        }
