"""Orders of eviction: which idle context goes first."""

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from itertools import islice

from parrot.serve.contexts.index import Kept, LedgerContext, Residence, Room
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap, LruDict

_PRESENT_S = 120.0  # a tenant that was there so lately keeps its part
_MAX_GROUP_LOOKS = 8  # tenants that are looked at for one eviction

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

    def opened(self, context: LedgerContext, size: int) -> None:
        tenant = self._tenants.get(context.tenant)
        if tenant is None:
            tenant = _Tenant(self._weight_of(context.tenant), self._make_order())
            self._tenants[context.tenant] = tenant
            self._weight += tenant.weight
            for name, known in self._tenants.items() if len(self._tenants) == 2 else ():
                self._largest.set(name, -known.used / known.weight)
        tenant.num_contexts += 1
        self.resized(context, size)

    def resized(self, context: LedgerContext, added: int) -> None:
        self._add(context.tenant, added)
        self._tenants[context.tenant].seen = self._clock.now()
        self._tenants.move_to_end(context.tenant)

    def freed(self, context: LedgerContext, size: int) -> None:
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

    def add(self, context: LedgerContext, *, recent: bool) -> None:
        """See `EvictionOrder.add`."""
        self._tenants[context.tenant].idle.add(context, recent=recent)

    def discard(self, context: LedgerContext) -> None:
        """It is not idle any more."""
        self._tenants[context.tenant].idle.discard(context)

    def first(self, asking: str | None = None) -> LedgerContext | None:
        """The one to evict for the tenant `asking`; None if there is none that it may have. Without
        a tenant, it may be anybody's."""
        if len(self._tenants) < 2:
            return next((tenant.idle.first() for tenant in self._tenants.values()), None)
        return self._of_absent() or self._of_largest() or self._of_any(asking)

    def _of_absent(self) -> LedgerContext | None:
        """The first of those who have not been there for long."""
        end = self._clock.now() - _PRESENT_S
        for tenant in islice(self._tenants.values(), _MAX_GROUP_LOOKS):
            if tenant.seen > end:
                return None
            if (first := tenant.idle.first()) is not None:
                return first
        return None

    def _of_largest(self) -> LedgerContext | None:
        """The first of those who have more than their part."""
        part = self.capacity / self._weight
        for name in self._largest.smallest(_MAX_GROUP_LOOKS):
            tenant = self._tenants[name]
            if tenant.used / tenant.weight <= part:
                return None
            if (first := tenant.idle.first()) is not None:
                return first
        return None

    def _of_any(self, asking: str | None) -> LedgerContext | None:
        """The first of the tenant that asks, or, without one, of anybody."""
        if asking is not None:
            tenant = self._tenants.get(asking)
            return None if tenant is None else tenant.idle.first()
        firsts = (tenant.idle.first() for tenant in self._tenants.values())
        return next((first for first in firsts if first is not None), None)

    def context_ids(self) -> Collection[int]:
        return {i for tenant in self._tenants.values() for i in tenant.idle.context_ids()}

    def check_integrity(self, sizes: dict[LedgerContext, int]) -> None:
        """Recount by the sizes of all contexts. Raises AssertionError with what differs."""
        used = dict.fromkeys(self._tenants, 0)
        for context, size in sizes.items():
            used[context.tenant] += size
        assert used == {name: t.used for name, t in self._tenants.items()}, (used, self._tenants)
        assert sum(t.num_contexts for t in self._tenants.values()) == len(sizes), self._tenants
        assert set(self._largest) == (set(used) if len(used) > 1 else set()), self._largest


@dataclass(slots=True)
class EngineMemory:
    """Sizes are in tokens, rounded up to blocks. `idle`: those without users and children.
    `capacity` counts the `host`'s, too; `residence` None: there is no host tier; `kept` None: the
    engine keeps what the ledger says, with no server behind it that does as it likes."""

    capacity: int
    block_size: int
    idle: IdleByTenant
    contexts: dict[int, LedgerContext] = field(default_factory=dict)
    used: int = 0
    residence: Residence | None = None
    kept: Kept | None = None

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
        assert set(self.idle.context_ids()) == idle, (self.idle, idle)
        self.idle.check_integrity({context: self.size(context) for context in contexts})
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
