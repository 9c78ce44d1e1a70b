"""The context ledger: the only truth about which contexts live on which engine.

A context is a flat sequence of tokens; a fork shares the beginning of its parent:

    parent   |-- 100 tokens --------------|        k0 at 40, k1 at 100
    fork          parent_len 40 |-- 30 new --|     k2 at 70

Only the part after `parent_len` is a context's own; so shared tokens count once. A parent is freed
after its children (they are freed first under pressure), and a context with running users, its own
or below it, is never evicted. A *retired* context is found by nobody any more; whoever runs on it
or has forked it goes on, and it is freed with the last of them."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from parrot.serve.config import CoreConfig
from parrot.serve.contexts.eviction import (
    EngineMemory,
    EvictionOrder,
    EvictionRules,
    FarthestNextUse,
    LeastRecentlyUsed,
    Owners,
    WeightOf,
)
from parrot.serve.contexts.forecast import Expectations, ReadyPrefixes, ThinkTimes, next_use
from parrot.serve.contexts.index import (
    Boundary,
    FreeReason,
    Kept,
    LedgerContext,
    Owner,
    PrefixIndex,
    Residence,
    Source,
)
from parrot.serve.events import ContextEvicted, Events
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.ids import IdCounter

EVICTIONS = frozenset({FreeReason.ROOM, FreeReason.MEMORY})
_MAX_GONE = 65536  # prefixes remembered after they were freed


ELSEWHERE = "elsewhere"
"""Why tokens are computed again that another engine has now."""


_SPARE = 0.9  # of an engine's memory that contexts may take which nobody waits for yet


class ContextLedger:
    """Owns every context, and what is known of its past and future uses."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        on_free: Callable[[int, int], None],
        events: Events,
    ) -> None:
        """`on_free` is called with the ids of engine and context when a live engine may forget a
        context."""
        self.weigh: WeightOf = lambda tenant: 1.0
        self._clock = clock
        self._constant_timeout_s = config.constant_prefix_var_timeout
        self._eviction = config.global_scheduler.kv_eviction
        self._on_free = on_free
        self._ids = IdCounter(1)
        self._accounts: dict[int, EngineMemory] = {}
        self.index = PrefixIndex()
        self.think_times = ThinkTimes()
        self.log = KvLog(self.index, events)
        self.owners = Owners(self.index.rooms)
        self.expectations = Expectations()
        self.prefixes = ReadyPrefixes(self.expectations)

    # Engines

    def add_engine(
        self,
        engine_id: int,
        capacity: int,
        block_size: int = 1,
        host_capacity: int = 0,
        *,
        has_server: bool = False,
    ) -> None:
        """`has_server`: one behind it decides what it keeps, see `index.kept`."""
        predict = partial(next_use, self.expectations, self.think_times)
        order: Callable[[], EvictionOrder] = LeastRecentlyUsed
        if self._eviction == "next_use":
            order = partial(FarthestNextUse, predict, self._clock)
        rules = EvictionRules(order, lambda t: self.weigh(t), self._clock)
        account = EngineMemory(
            capacity=capacity + host_capacity, block_size=block_size, rules=rules
        )
        if has_server:
            account.kept = self.index.kept[engine_id] = Kept(account.size, predict, self._drop)
        else:
            self.index.rooms[engine_id] = account
        if host_capacity:
            account.residence = Residence(capacity, account.size)
        self._accounts[engine_id] = account

    def forget_engine(self, engine_id: int) -> list[bytes]:
        """The engine is gone, and its contexts with it. Returns the keys of the prompts that they
        had, the latest last."""
        contexts = self._accounts.pop(engine_id).contexts.values()
        for context in contexts:
            self._forget(context, FreeReason.ENGINE)
        self.index.kept.pop(engine_id, None)
        self.index.rooms.pop(engine_id, None)
        self.log.forget_engine(engine_id)
        return [boundary.key for context in contexts for boundary in context.boundaries]

    def usage(self, engine_id: int) -> tuple[int, int]:
        """The number of the engine's contexts, and their tokens."""
        account = self._accounts[engine_id]
        return len(account.contexts), account.used

    # The life of a context

    def open(
        self,
        engine_id: int,
        owner: Owner,
        boundaries: Sequence[Boundary],
        *,
        length: int,
        reserved: int = 0,
        parent: LedgerContext | None = None,
        parent_len: int = 0,
        function: str = "",
        tenant: str = "",
    ) -> LedgerContext:
        """A new context of a tenant, forked at `parent_len`. Nothing is evicted for it: see
        `make_room`."""
        now = self._clock.now()
        context = LedgerContext(
            self._ids.next(), engine_id, owner, parent, parent_len, length, reserved, now, now
        )
        context.function, context.tenant = function, tenant
        account = self._accounts[engine_id]
        self.owners.add(context, account.opened(context))
        if parent is not None:
            assert 0 <= parent_len <= parent.length + parent.reserved, (parent, parent_len)
            parent.children.add(context)
            account.discard_idle(parent)
            parent.num_forks += 1
            parent.last_used = now
            self.owners.touch(parent)
        for boundary in boundaries:
            self.index.publish(context, boundary)
        account.add_idle(context, recent=True)
        account.use(context)
        return context

    def pin(self, context: LedgerContext) -> None:
        """A run uses it."""
        context.users += 1
        account = self._accounts[context.engine_id]
        account.discard_idle(context)
        account.use(context)
        for link in context.lineage():
            link.pins += 1
            if link.pins > 1:
                return

    def unpin(self, context: LedgerContext) -> None:
        """The run is over. A retired context may be freed by it."""
        context.users -= 1
        context.last_used = self._clock.now()
        for link in context.lineage():
            link.pins -= 1
            assert link.pins >= 0, link
            if link.pins:
                break
        self._rest(context, recent=True)
        self._accounts[context.engine_id].trim()

    def settle(
        self, context: LedgerContext, length: int, boundary: Boundary | None, source: Source | None
    ) -> None:
        """Its generation ended: it has `length` tokens; `boundary` covers the output's text.
        `source`: whose output it is; None if that is not whole."""
        context.awaiting = None if source is None else (source, self._clock.now())
        account = self._accounts[context.engine_id]
        old_size = account.size(context)
        context.length, context.reserved = length, 0
        added = account.size(context) - old_size
        account.resized(context, added)
        self.owners.resized(context, added)
        account.use(context)
        context.mark_computed()
        if boundary is not None and context.retired is None:
            self.index.publish(context, boundary)

    def retire(
        self,
        context: LedgerContext,
        reason: FreeReason = FreeReason.BROKEN,
        *,
        with_ancestors: bool = False,
    ) -> None:
        """Nobody finds it any more. It is freed as soon as no run uses it and it has no forks.
        `with_ancestors`, for a context in use: likewise all that it was forked from."""
        assert context.pins or not with_ancestors, context
        for link in context.lineage() if with_ancestors else (context,):
            if link.retired is None:
                link.retired = reason
                self.index.unpublish(link)
            self._rest(link, recent=True)

    def release_session(self, session_id: int) -> Iterator[int]:
        """Free the session's contexts, one with each step, those in use as soon as that ends."""
        self.think_times.session_ended(session_id)
        for context in reversed(self.owners.of_session(session_id)):
            if self.owners.is_of(context, session_id):  # still
                self.retire(context, FreeReason.SESSION)
                yield 1

    # Room

    def make_room(self, engine_id: int, tenant: str | None = None) -> bool:
        """Evict for the tenant, or at anybody's cost, until the engine's contexts fit its capacity;
        False: they still do not, since the rest is in use, or other tenants' parts."""
        account = self._accounts[engine_id]
        account.trim()
        while (
            account.used > account.capacity
            and (first := account.first_to_evict(tenant)) is not None
        ):
            self._evict(first, FreeReason.ROOM)
        return account.used <= account.capacity

    def make_spare_room(self, engine_id: int, num_tokens: int, tenant: str = "") -> bool:
        """Evict what nobody is known to want until so many more tokens fit, with some to spare;
        False: they do not."""
        account = self._accounts[engine_id]
        limit = _SPARE * account.capacity
        while account.used + num_tokens > limit:
            first = account.first_to_evict(tenant)
            if first is None or first.num_forks or self._is_wanted(first):
                return False
            self._evict(first, FreeReason.ROOM)
        return True

    def release(self, context: LedgerContext) -> None:
        """Its owner has no use for it any more. It stays as cache if it is computed and
        somebody uses or wants it, or it is a tenant's; else it is retired."""
        account = self._accounts.get(context.engine_id)
        if account is None or context.id not in account.contexts:
            return
        is_kept = isinstance(context.owner, str) or context.pins or context.children
        if not (context.is_computed and (is_kept or self._is_wanted(context))):
            self.retire(context)

    def _is_wanted(self, context: LedgerContext) -> bool:
        now = self._clock.now()
        expected = self.expectations.soonest(context.boundaries, now)
        return expected is not None or context.awaiting is not None

    def evict_idle(self, engine_id: int) -> None:
        """Free everything on the engine that no run uses."""
        account = self._accounts[engine_id]
        while (first := account.first_to_evict()) is not None:
            self._evict(first, FreeReason.MEMORY)

    def expire(self) -> float | None:
        """Free tenants' contexts that were not used for the timeout. Returns when the next will
        expire, if it is not used; None if there is none."""
        now = self._clock.now()
        while (context := self.owners.oldest_of_tenants()) is not None:
            expiry = max(context.last_used, context.kept_at) + self._constant_timeout_s
            if expiry > now:
                return expiry
            if context.pins or context.children:
                context.kept_at = now
                self.owners.touch(context)
            else:
                self._evict_expired(context, now)
        return None

    def check_integrity(self, users: Mapping[int, int], queued: Counter[bytes]) -> None:
        """Recount everything. `users`: how many runs use each context, by its id, and `queued`: how
        many queued ones each key, as their owner knows it. Raises AssertionError with what
        differs."""
        self.expectations.check_integrity(queued + self.prefixes.check_integrity())
        live: dict[int, LedgerContext] = {}
        for account in self._accounts.values():
            live.update(account.contexts)
            account.check_integrity()
        counted = {c.id: c.users for c in live.values() if c.users}
        assert counted == users, (counted, users)
        for context in self.index.contexts():
            assert context.id in live, context
            assert context.retired is None, context
        self.owners.check_integrity({c: self._accounts[c.engine_id].size(c) for c in live.values()})

    # Inside

    def _drop(self, context: LedgerContext) -> None:
        self.retire(context, FreeReason.ROOM)

    def _evict_expired(self, context: LedgerContext, now: float) -> None:
        """Evict it and those that it was forked from, if nothing else has used them either."""
        for link in context.lineage():
            is_idle = isinstance(link.owner, str) and not link.pins and not link.children
            if not is_idle or link.last_used + self._constant_timeout_s > now:
                return
            self._evict(link, FreeReason.EXPIRED)

    def _evict(self, context: LedgerContext, reason: FreeReason) -> None:
        """Free it. Those who would have continued it would continue its parent now."""
        assert not context.pins, context
        parent, awaiting = context.parent, context.awaiting
        self._free(context, reason)
        if parent is None:
            return
        if awaiting and (parent.awaiting is None or parent.awaiting[1] < awaiting[1]):
            parent.awaiting = awaiting
        self._rest(parent, recent=False)

    def _rest(self, context: LedgerContext, recent: bool) -> None:
        """A context may have become idle: offer it for eviction, or free it if retired, and then
        its parent likewise. `recent`: see `EvictionOrder.add`."""
        for link in context.lineage():
            if link.pins or link.children:
                return
            account = self._accounts[link.engine_id]
            if link.id not in account.contexts:
                return
            if link.retired is None:
                account.add_idle(link, recent=recent)
                return
            self._free(link, link.retired)

    def _free(self, context: LedgerContext, reason: FreeReason) -> None:
        account = self._accounts[context.engine_id]
        assert not context.children, context
        assert not context.pins, context
        account.freed(context)
        if account.residence is not None:
            account.residence.forget(context)
        if account.kept is not None:
            account.kept.freed(context)
        self._forget(context, reason)
        if (parent := context.parent) is not None:
            parent.children.discard(context)
        self._on_free(context.engine_id, context.id)

    def _forget(self, context: LedgerContext, reason: FreeReason) -> None:
        self.index.unpublish(context)
        self.owners.remove(context)
        if context.is_computed:
            self.log.freed(context, reason)


class Lost(NamedTuple):
    """Tokens of a prompt that some context has or had, but none of its engine, and why."""

    reason: str
    num_tokens: int


@dataclass(slots=True)
class KvCounts:
    """Tokens (characters, where contexts are text). `hit`: prompt tokens that a context had.
    `recomputed`: prompt tokens that the engine did not have though some context did, by what became
    of that. `freed`: tokens of contexts, by the reason. `evicted` of them: for want of room."""

    hit: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    freed: Counter[str] = field(default_factory=Counter)

    @property
    def evicted(self) -> int:
        return sum(self.freed[reason] for reason in EVICTIONS)


class KvLog:
    """Counts per engine and in all, lost engines included."""

    def __init__(self, index: PrefixIndex, events: Events) -> None:
        self._events = events
        self.total = KvCounts()
        self._index = index
        self._engines: defaultdict[int, KvCounts] = defaultdict(KvCounts)
        self._gone: LruDict[bytes, FreeReason] = LruDict(_MAX_GONE)

    def engine(self, engine_id: int) -> KvCounts:
        return self._engines[engine_id]

    def forget_engine(self, engine_id: int) -> None:
        self._engines.pop(engine_id, None)

    def freed(self, context: LedgerContext, reason: FreeReason) -> None:
        """A computed context is gone, and with it the prompts that it had."""
        for boundary in context.boundaries:
            self._gone.put(boundary.key, reason)
        num_tokens = context.length + context.reserved - context.parent_len
        for counts in (self.total, self._engines[context.engine_id]):
            counts.freed[reason] += num_tokens
        if reason in EVICTIONS:
            self._events.emit(ContextEvicted, context.owner, context.function, num_tokens)

    def used(
        self, engine_id: int, num_hit: int, missing: Sequence[tuple[bytes, int]]
    ) -> Lost | None:
        """A prompt is about to be computed, and a context of the engine has its first `num_hit`
        tokens. `missing`: the key and length of every longer beginning. Returns how many tokens
        more some context has or had; None if there are none."""
        for counts in (self.total, self._engines[engine_id]):
            counts.hit += num_hit
        for key, length in reversed(missing):
            reason = ELSEWHERE if self._index.holders(key) else self._gone.peek(key)
            if reason is not None:
                return Lost(reason, length - num_hit)
        return None

    def recomputed(self, engine_id: int, lost: Lost | None, most: int | None) -> int:
        """A prompt was computed of which so much had been lost, but no more than `most`: an engine
        may still have it in its cache. Returns how many of its tokens were computed again."""
        if lost is None:
            return 0
        num_tokens = lost.num_tokens if most is None else min(lost.num_tokens, most)
        for counts in (self.total, self._engines[engine_id]):
            counts.recomputed[lost.reason] += num_tokens
        return num_tokens
