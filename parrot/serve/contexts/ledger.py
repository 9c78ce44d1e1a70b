"""The context ledger: the contexts on each engine, and their expected uses.

A context is a sequence of tokens whose KV an engine holds. A fork shares a prefix of its parent:

    parent   |-- 100 tokens --------------|        prefix keys: k0 at 40, k1 at 100
    fork          parent_len 40 |-- 30 new --|     prefix key: k2 at 70

A context is evicted only while no run uses it and it has no forks. A *retired* context is not in
the index, so new runs cannot fork it. It is freed when its last run and its last fork are gone.

Example: engine 7 holds 160 tokens in blocks of 16. Each context owns the blocks after `parent_len`.

    a = open(7, ..., length=100)                            a owns 7 blocks        used 112
    b = open(7, ..., length=70, parent=a, parent_len=40)    b owns 5 - 2 blocks    used 160
    c = open(7, ..., length=30); pin(c)                     c owns 2 blocks        used 192
    evict_to_capacity(7)                                    b is evicted           used 144

`b` shares the first 2 blocks of `a`. It copies the third block, because token 40 is inside it.
`a` cannot be evicted before its fork `b`, and `c` is pinned. After the eviction, `a` is idle."""

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
# Number of freed prefixes whose reason `KvStats` remembers. Older ones count as never computed.
_MAX_FREED_PREFIXES = 65536

ELSEWHERE = "elsewhere"
"""The reason of a cache miss if another engine holds the prefix."""

# Prefetching may fill an engine's KV up to this fraction. The rest stays free for calls.
_PREFETCH_FRACTION = 0.9


class ContextLedger:
    """Owns the records of all contexts, the index over their prefixes, and the predicted uses.

    The ledger chooses the contexts to evict. It sends nothing to engines: it calls `on_free`."""

    def __init__(
        self,
        config: CoreConfig,
        clock: Clock,
        on_free: Callable[[int, int], None],
        events: Events,
    ) -> None:
        """`on_free` receives the ids of an engine and of a context that the engine may free."""
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
        """Capacities are in tokens, or in characters for engines whose contexts are text.
        `has_server`: a foreign server evicts by itself, so its cache is only modelled."""
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
        """Forget a lost engine and its contexts. Returns the prefix keys of these contexts, sorted
        by the opening of the contexts."""
        contexts = self._memories.pop(engine_id).contexts.values()
        for context in contexts:
            self._forget(context, FreeReason.ENGINE)
        self.index.server_caches.pop(engine_id, None)
        self.index.kv_usage.pop(engine_id, None)
        self.kv_stats.remove_engine(engine_id)
        return [boundary.key for context in contexts for boundary in context.boundaries]

    def usage(self, engine_id: int) -> tuple[int, int]:
        """The number of the engine's contexts, and the tokens of their blocks."""
        memory = self._memories[engine_id]
        return len(memory.contexts), memory.used

    # Life of a context

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
        head: str = "",
        is_pinned: bool = False,
    ) -> LedgerContext:
        """Record a new context. It holds `length` tokens, and `reserved` more may be generated. If
        `is_pinned`, a run uses it, as after `pin`.

        `open` evicts nothing, so the engine may exceed its capacity until `evict_to_capacity`."""
        now = self._clock.now()
        context = LedgerContext(
            self._ids.next(), engine_id, owner, parent, parent_len, length, reserved, now, now
        )
        context.function, context.tenant, context.head = function, tenant, head
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
        if is_pinned:
            self.pin(context)
        else:
            memory.add_idle(context, recent=True)
            memory.use(context)
        return context

    def pin(self, context: LedgerContext) -> None:
        """Add a run that uses the context."""
        context.users += 1
        memory = self._memories[context.engine_id]
        memory.discard_idle(context)
        memory.use(context)
        for link in context.lineage():
            link.pins += 1
            if link.pins > 1:
                return

    def unpin(self, context: LedgerContext) -> None:
        """Remove a run that used the context. A retired context is freed with its last run."""
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
        """Record the context's final `length` and give back its reserved tokens.

        `boundary`: the end of the output, if its tokens stand for exactly its text. `source`: the
        function that made the output; None if the output is partial."""
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
        """Remove the context from the index, and free it when it has no runs and no forks.

        `with_ancestors`: also retire all ancestors. The context must then be in use."""
        assert context.pins or not with_ancestors, context
        for link in context.lineage() if with_ancestors else (context,):
            if link.retired is None:
                link.retired = reason
                self.index.unpublish(link)
            self._update_idle(link, recent=True)

    def release_session(self, session_id: int) -> Iterator[int]:
        """Retire the session's contexts, one with each step of the iterator."""
        self.think_times.session_ended(session_id)
        for context in reversed(self.owners.of_session(session_id)):
            if self.owners.is_owned_by(context, session_id):  # It may change between two steps.
                self.retire(context, FreeReason.SESSION)
                yield 1

    # Eviction

    def evict_to_capacity(self, engine_id: int, tenant: str | None = None) -> bool:
        """Evict idle contexts until the engine's contexts fit its capacity.

        False if they still exceed it: the rest is in use, or within the shares of tenants other
        than `tenant`. Without a `tenant`, shares are ignored once all tenants are within theirs."""
        memory = self._memories[engine_id]
        memory.trim()
        while (
            memory.used > memory.capacity and (first := memory.first_to_evict(tenant)) is not None
        ):
            self._evict(first, FreeReason.ROOM)
        return memory.used <= memory.capacity

    def evict_for_prefetch(self, engine_id: int, num_tokens: int, tenant: str = "") -> bool:
        """Evict contexts without an expected use until `num_tokens` more leave 10% of the KV free.

        False if they do not fit. It stops at the first candidate that was forked before or has an
        expected use."""
        memory = self._memories[engine_id]
        limit = _PREFETCH_FRACTION * memory.capacity
        while memory.used + num_tokens > limit:
            first = memory.first_to_evict(tenant)
            if first is None or first.num_forks or self._has_expected_use(first):
                return False
            self._evict(first, FreeReason.ROOM)
        return True

    def release(self, context: LedgerContext) -> None:
        """The prefetch that filled the context was cancelled: retire the context if it is useless.

        It stays if it is computed and in use, forked, owned by a tenant, or expected to be used."""
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
        """Evict all contexts on the engine that no run uses."""
        memory = self._memories[engine_id]
        while (first := memory.first_to_evict()) is not None:
            self._evict(first, FreeReason.MEMORY)

    def expire(self) -> float | None:
        """Evict tenants' contexts that were unused for `constant_prefix_var_timeout` seconds.
        Returns the time of the next expiry; None if no tenant owns a context."""
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
        """Recount everything; raises AssertionError with the difference. `users`: the number of
        runs per context id. `queued`: the number of queued runs per prefix key."""
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

    # Implementation

    def _drop(self, context: LedgerContext) -> None:
        self.retire(context, FreeReason.ROOM)

    def _evict_expired(self, context: LedgerContext, now: float) -> None:
        """Evict an expired context, then each expired ancestor that has become idle."""
        for link in context.lineage():
            if link.pins or link.children:
                return
            if link.retired is not None:
                continue  # It was freed with its last fork.
            if isinstance(link.owner, int) or link.last_used + self._constant_timeout_s > now:
                return
            self._evict(link, FreeReason.EXPIRED)

    def _evict(self, context: LedgerContext, reason: FreeReason) -> None:
        """Free an idle context. The session's next call is now expected to use the parent."""
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
        """Make an idle context a candidate for eviction, or free it if it is retired.

        Freeing it may make its parent idle, so this repeats up the lineage. `recent`: see
        `LeastRecentlyUsed.add`."""
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
    """Prompt tokens that the engine must compute although a context held them once."""

    reason: str  # A `FreeReason`, or `ELSEWHERE`.
    num_tokens: int


@dataclass(slots=True)
class KvCounts:
    """Counts of tokens, or of characters for engines whose contexts are text."""

    hit: int = 0  # Prompt tokens that a context of the engine held.
    recomputed: Counter[str] = field(default_factory=Counter)  # Cache misses, by their reason.
    freed: Counter[str] = field(default_factory=Counter)  # Tokens of freed contexts, by the reason.

    @property
    def evicted(self) -> int:
        """Tokens that were freed because the engine had too little KV memory."""
        return sum(self.freed[reason] for reason in EVICTIONS)


class KvStats:
    """Hits, misses and freed tokens: per live engine, and in total with lost engines."""

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
        """Count a computed context that was freed, and remember the reason for its prefixes."""
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
        """Count a prompt whose first `num_hit` tokens are in a context of the engine.

        `missing`: the key and length of each longer prefix of the prompt. Returns the miss for the
        longest of them that any context holds or held; None if no context ever did."""
        for counts in (self.total, self._engines[engine_id]):
            counts.hit += num_hit
        for key, length in reversed(missing):
            reason = ELSEWHERE if self._index.holders(key) else self._freed_prefixes.peek(key)
            if reason is not None:
                return CacheMiss(reason, length - num_hit)
        return None

    def record_recomputed(self, engine_id: int, miss: CacheMiss | None, most: int | None) -> int:
        """Count the tokens of a miss that were computed again, and return their number.

        `most`: the tokens that the engine computed for the prompt. They can be fewer than the miss,
        because the engine's own cache may still hold the prefix."""
        if miss is None:
            return 0
        num_tokens = miss.num_tokens if most is None else min(miss.num_tokens, most)
        for counts in (self.total, self._engines[engine_id]):
            counts.recomputed[miss.reason] += num_tokens
        return num_tokens
