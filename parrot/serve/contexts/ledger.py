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
    GpuTier,
    LedgerContext,
    Owner,
    PrefixIndex,
    ServerCache,
    Source,
)
from parrot.serve.events import ContextEvicted, Events
from parrot.utils.clock import Clock
from parrot.utils.heaps import LruDict
from parrot.utils.ids import IdCounter

EVICTIONS = frozenset({FreeReason.ROOM, FreeReason.MEMORY})
_MAX_FREED_PREFIXES = 65536  # prefixes remembered after they were freed


ELSEWHERE = "elsewhere"
"""Why tokens are computed again that another engine has now."""


_PREFETCH_FRACTION = 0.9  # of an engine's memory that contexts may take which nobody waits for yet


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
        self._memories: dict[int, EngineMemory] = {}
        self.index = PrefixIndex()
        self.think_times = ThinkTimes()
        self.kv_stats = KvStats(self.index, events)
        self.owners = Owners(self.index.kv_usage)
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
        """`has_server`: one behind it decides what it keeps, see `index.server_caches`."""
        predict = partial(next_use, self.expectations, self.think_times)
        order: Callable[[], EvictionOrder] = LeastRecentlyUsed
        if self._eviction == "next_use":
            order = partial(FarthestNextUse, predict, self._clock)
        rules = EvictionRules(order, lambda t: self.weigh(t), self._clock)
        memory = EngineMemory(capacity=capacity + host_capacity, block_size=block_size, rules=rules)
        if has_server:
            memory.server_cache = self.index.server_caches[engine_id] = ServerCache(
                memory.size, predict, self._drop
            )
        else:
            self.index.kv_usage[engine_id] = memory
        if host_capacity:
            memory.gpu_tier = GpuTier(capacity, memory.size)
        self._memories[engine_id] = memory

    def remove_engine(self, engine_id: int) -> list[bytes]:
        """The engine is gone, and its contexts with it. Returns the keys of the prompts that they
        had, the latest last."""
        contexts = self._memories.pop(engine_id).contexts.values()
        for context in contexts:
            self._forget(context, FreeReason.ENGINE)
        self.index.server_caches.pop(engine_id, None)
        self.index.kv_usage.pop(engine_id, None)
        self.kv_stats.remove_engine(engine_id)
        return [boundary.key for context in contexts for boundary in context.boundaries]

    def usage(self, engine_id: int) -> tuple[int, int]:
        """The number of the engine's contexts, and their tokens."""
        memory = self._memories[engine_id]
        return len(memory.contexts), memory.used

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
        `evict_to_capacity`."""
        now = self._clock.now()
        context = LedgerContext(
            self._ids.next(), engine_id, owner, parent, parent_len, length, reserved, now, now
        )
        context.function, context.tenant = function, tenant
        memory = self._memories[engine_id]
        self.owners.add(context, memory.opened(context))
        if parent is not None:
            assert 0 <= parent_len <= parent.length + parent.reserved, (parent, parent_len)
            parent.children.add(context)
            memory.discard_idle(parent)
            parent.num_forks += 1
            parent.last_used = now
            self.owners.touch(parent)
        for boundary in boundaries:
            self.index.publish(context, boundary)
        memory.add_idle(context, recent=True)
        memory.use(context)
        return context

    def pin(self, context: LedgerContext) -> None:
        """A run uses it."""
        context.users += 1
        memory = self._memories[context.engine_id]
        memory.discard_idle(context)
        memory.use(context)
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
        self._update_idle(context, recent=True)
        self._memories[context.engine_id].trim()

    def finish_generation(
        self, context: LedgerContext, length: int, boundary: Boundary | None, source: Source | None
    ) -> None:
        """Its generation ended: it has `length` tokens; `boundary` covers the output's text.
        `source`: whose output it is; None if that is not whole."""
        context.expected_call = None if source is None else (source, self._clock.now())
        memory = self._memories[context.engine_id]
        old_size = memory.size(context)
        context.length, context.reserved = length, 0
        added = memory.size(context) - old_size
        memory.resized(context, added)
        self.owners.resized(context, added)
        memory.use(context)
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
            self._update_idle(link, recent=True)

    def release_session(self, session_id: int) -> Iterator[int]:
        """Free the session's contexts, one with each step, those in use as soon as that ends."""
        self.think_times.session_ended(session_id)
        for context in reversed(self.owners.of_session(session_id)):
            if self.owners.is_owned_by(context, session_id):  # still
                self.retire(context, FreeReason.SESSION)
                yield 1

    # Capacity

    def evict_to_capacity(self, engine_id: int, tenant: str | None = None) -> bool:
        """Evict for the tenant, or at anybody's cost, until the engine's contexts fit its capacity;
        False: they still do not, since the rest is in use, or other tenants' parts."""
        memory = self._memories[engine_id]
        memory.trim()
        while (
            memory.used > memory.capacity and (first := memory.first_to_evict(tenant)) is not None
        ):
            self._evict(first, FreeReason.ROOM)
        return memory.used <= memory.capacity

    def evict_for_prefetch(self, engine_id: int, num_tokens: int, tenant: str = "") -> bool:
        """Evict what nobody is known to want until so many more tokens fit, with some to spare;
        False: they do not."""
        memory = self._memories[engine_id]
        limit = _PREFETCH_FRACTION * memory.capacity
        while memory.used + num_tokens > limit:
            first = memory.first_to_evict(tenant)
            if first is None or first.num_forks or self._has_expected_use(first):
                return False
            self._evict(first, FreeReason.ROOM)
        return True

    def release(self, context: LedgerContext) -> None:
        """Its owner has no use for it any more. It stays as cache if it is computed and
        somebody uses or wants it, or it is a tenant's; else it is retired."""
        memory = self._memories.get(context.engine_id)
        if memory is None or context.id not in memory.contexts:
            return
        is_kept = isinstance(context.owner, str) or context.pins or context.children
        if not (context.is_computed and (is_kept or self._has_expected_use(context))):
            self.retire(context)

    def _has_expected_use(self, context: LedgerContext) -> bool:
        now = self._clock.now()
        expected = self.expectations.soonest(context.boundaries, now)
        return expected is not None or context.expected_call is not None

    def evict_idle(self, engine_id: int) -> None:
        """Free everything on the engine that no run uses."""
        memory = self._memories[engine_id]
        while (first := memory.first_to_evict()) is not None:
            self._evict(first, FreeReason.MEMORY)

    def expire(self) -> float | None:
        """Free tenants' contexts that were not used for the timeout. Returns when the next will
        expire, if it is not used; None if there is none."""
        now = self._clock.now()
        while (context := self.owners.oldest_of_tenants()) is not None:
            expiry = max(context.last_used, context.expiry_renewed_at) + self._constant_timeout_s
            if expiry > now:
                return expiry
            if context.pins or context.children:
                context.expiry_renewed_at = now
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
        for memory in self._memories.values():
            live.update(memory.contexts)
            memory.check_integrity()
        counted = {c.id: c.users for c in live.values() if c.users}
        assert counted == users, (counted, users)
        for context in self.index.contexts():
            assert context.id in live, context
            assert context.retired is None, context
        self.owners.check_integrity({c: self._memories[c.engine_id].size(c) for c in live.values()})

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
        parent, expected_call = context.parent, context.expected_call
        self._free(context, reason)
        if parent is None:
            return
        if expected_call and (
            parent.expected_call is None or parent.expected_call[1] < expected_call[1]
        ):
            parent.expected_call = expected_call
        self._update_idle(parent, recent=False)

    def _update_idle(self, context: LedgerContext, recent: bool) -> None:
        """A context may have become idle: offer it for eviction, or free it if retired, and then
        its parent likewise. `recent`: see `EvictionOrder.add`."""
        for link in context.lineage():
            if link.pins or link.children:
                return
            memory = self._memories[link.engine_id]
            if link.id not in memory.contexts:
                return
            if link.retired is None:
                memory.add_idle(link, recent=recent)
                return
            self._free(link, link.retired)

    def _free(self, context: LedgerContext, reason: FreeReason) -> None:
        memory = self._memories[context.engine_id]
        assert not context.children, context
        assert not context.pins, context
        memory.freed(context)
        if memory.gpu_tier is not None:
            memory.gpu_tier.remove(context)
        if memory.server_cache is not None:
            memory.server_cache.freed(context)
        self._forget(context, reason)
        if (parent := context.parent) is not None:
            parent.children.discard(context)
        self._on_free(context.engine_id, context.id)

    def _forget(self, context: LedgerContext, reason: FreeReason) -> None:
        self.index.unpublish(context)
        self.owners.remove(context)
        if context.is_computed:
            self.kv_stats.record_freed(context, reason)


class CacheMiss(NamedTuple):
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


class KvStats:
    """Counts per engine and in all, lost engines included."""

    def __init__(self, index: PrefixIndex, events: Events) -> None:
        self._events = events
        self.total = KvCounts()
        self._index = index
        self._engines: defaultdict[int, KvCounts] = defaultdict(KvCounts)
        self._freed_prefixes: LruDict[bytes, FreeReason] = LruDict(_MAX_FREED_PREFIXES)

    def engine(self, engine_id: int) -> KvCounts:
        return self._engines[engine_id]

    def remove_engine(self, engine_id: int) -> None:
        self._engines.pop(engine_id, None)

    def record_freed(self, context: LedgerContext, reason: FreeReason) -> None:
        """A computed context is gone, and with it the prompts that it had."""
        for boundary in context.boundaries:
            self._freed_prefixes.put(boundary.key, reason)
        num_tokens = context.length + context.reserved - context.parent_len
        for counts in (self.total, self._engines[context.engine_id]):
            counts.freed[reason] += num_tokens
        if reason in EVICTIONS:
            self._events.emit(ContextEvicted, context.owner, context.function, num_tokens)

    def record_prompt(
        self, engine_id: int, num_hit: int, missing: Sequence[tuple[bytes, int]]
    ) -> CacheMiss | None:
        """A prompt is about to be computed, and a context of the engine has its first `num_hit`
        tokens. `missing`: the key and length of every longer beginning. Returns how many tokens
        more some context has or had; None if there are none."""
        for counts in (self.total, self._engines[engine_id]):
            counts.hit += num_hit
        for key, length in reversed(missing):
            reason = ELSEWHERE if self._index.holders(key) else self._freed_prefixes.peek(key)
            if reason is not None:
                return CacheMiss(reason, length - num_hit)
        return None

    def record_recomputed(self, engine_id: int, miss: CacheMiss | None, most: int | None) -> int:
        """A prompt was computed of which so much had been lost, but no more than `most`: an engine
        may still have it in its cache. Returns how many of its tokens were computed again."""
        if miss is None:
            return 0
        num_tokens = miss.num_tokens if most is None else min(miss.num_tokens, most)
        for counts in (self.total, self._engines[engine_id]):
            counts.recomputed[miss.reason] += num_tokens
        return num_tokens
