"""Contexts, the index that finds them by prefix key, and models of each engine's KV memory."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from parrot.serve.graph.nodes import Completion, given_name
from parrot.utils.heaps import LruDict

# Number of prefix keys for which the index remembers the engines that may have cached them.
_MAX_CACHED_PREFIXES = 65_536

Owner = int | str
"""A session's id, or a tenant's name. A session's contexts are freed when the session ends."""


class FreeReason(StrEnum):
    """Why a context was freed. The values are labels of the metric `parrot_kv_freed_tokens`."""

    ROOM = "room"  # Evicted because other contexts needed the KV blocks.
    MEMORY = "memory"  # Evicted because the engine rejected a run for lack of memory.
    EXPIRED = "expired"  # The context belonged to a tenant and was unused for the timeout.
    SESSION = "session"  # The context's session ended.
    BROKEN = "broken"  # The context's run was stopped or failed, or its prefill was useless.
    ENGINE = "engine"  # The context's engine was lost.


class Source(NamedTuple):
    """A function and a cache salt. Its calls share one histogram of think times.

    `func_name` is empty for all calls without a named function."""

    salt: str
    func_name: str

    @classmethod
    def of(cls, completion: Completion) -> "Source":
        return cls(completion.options.cache_salt, given_name(completion))


class Boundary(NamedTuple):
    """The position in a context at which the prompt with this prefix key ends."""

    key: bytes
    length: int  # In tokens, or in characters for contexts of text.
    last: int | str  # The prompt's last token, or its last character.


@dataclass(slots=True, eq=False)
class LedgerContext:
    """The record of one context. Lengths include the shared prefix of `parent_len` tokens."""

    id: int
    engine_id: int
    owner: Owner
    parent: "LedgerContext | None"
    parent_len: int  # Length of the prefix that is shared with the parent.
    length: int  # Tokens of the prompt; after the generation, of prompt and output.
    reserved: int  # Output tokens that may still be generated.
    opened_at: float
    last_used: float
    # When the context last reached its expiry while it was in use or had forks.
    expiry_renewed_at: float = field(default=0.0, init=False)
    boundaries: list[Boundary] = field(default_factory=list)
    children: "set[LedgerContext]" = field(default_factory=set)
    users: int = 0  # Number of runs that use this context itself.
    pins: int = 0  # Number of users plus children with pins. A pinned context is not evicted.
    is_computed: bool = False  # The engine has computed it. Before that, its run may still fail.
    retired: FreeReason | None = None  # Why the context is not in the index; None: it is.
    num_forks: int = 0  # Number of forks ever made, including freed ones.
    # The session's next call is expected to continue this context. The source of the previous call,
    # and the time at which that call finished.
    expected_call: tuple[Source, float] | None = None
    on_host: bool = False  # The KV is in CPU memory and must be copied to the GPU before use.
    function: str = ""  # The function whose call opened the context; empty: unnamed.
    tenant: str = ""  # The tenant whose call opened the context.
    head: str = ""  # The first characters of the context's own part of the prompt.

    def num_on_host(self, length: int) -> int:
        """How many of the context's first `length` tokens are in CPU memory."""
        count = 0
        for link in self.lineage():
            count += max(0, length - link.parent_len) if link.on_host else 0
            length = min(length, link.parent_len)
        return count

    def lineage(self) -> "Iterator[LedgerContext]":
        """Yield the context, its parent, its parent's parent, and so on."""
        link: LedgerContext | None = self
        while link is not None:
            yield link
            link = link.parent

    def mark_computed(self) -> None:
        """Record that the engine has computed the context, and so its ancestors."""
        link: LedgerContext | None = self
        # Stop at the first computed ancestor: this runs for each chunk of a stream.
        while link is not None and not link.is_computed:
            link.is_computed = True
            link = link.parent


class Match(NamedTuple):
    """A context that holds a prefix of a prompt."""

    num_covered: int  # Number of the prompt's segments in the prefix.
    context: LedgerContext
    boundary: Boundary  # The end of the prefix in the context.


class PrefixIndex:
    """Finds the contexts that hold a prefix, by prefix key and engine. Retired ones are left out.

    Each engine is in exactly one of `server_caches` and `kv_usage`."""

    def __init__(self) -> None:
        self.server_caches: dict[int, ServerCache] = {}  # Of engines with a foreign server.
        self.kv_usage: dict[int, KvUsage] = {}  # Of all other engines.
        self._entries: dict[bytes, dict[int, tuple[LedgerContext, Boundary]]] = {}
        # Engines that may hold the prefix in their own cache, without a context in the ledger.
        self._cached: LruDict[bytes, frozenset[int]] = LruDict(_MAX_CACHED_PREFIXES)

    def __len__(self) -> int:
        return sum(len(holders) for holders in self._entries.values())

    @property
    def session_fraction(self) -> float:
        """The fraction of all engines' KV that live sessions own; 0 without engines."""
        capacity = sum(usage.capacity for usage in self.kv_usage.values())
        return (
            sum(usage.session_tokens for usage in self.kv_usage.values()) / capacity
            if capacity
            else 0.0
        )

    def match(self, engine_id: int, keys: Sequence[bytes]) -> Match | None:
        """The longest prefix of the prompt that a context of this engine holds."""
        for i in range(len(keys) - 1, -1, -1):
            holders = self._entries.get(keys[i])
            if holders is not None and (found := holders.get(engine_id)) is not None:
                return Match(i + 1, *found)
        return None

    def holders(self, key: bytes) -> Collection[int] | None:
        """The engines with a context that holds this prefix."""
        return self._entries.get(key)

    def engines_of_owner(self, owner: Owner, keys: Sequence[bytes]) -> Iterator[int]:
        """Yield the engines where the owner's contexts hold a prefix of the prompt, the longest
        prefix first. An engine may be repeated."""
        for key in reversed(keys):
            for engine_id, (context, _) in self._entries.get(key, {}).items():
                if context.owner == owner:
                    yield engine_id

    def add_cached(self, engine_id: int, keys: Iterable[bytes], live: Set[int]) -> None:
        """Record that the engine's own cache may hold these prefixes although no context does.
        Engines that are not in `live` are dropped from these entries."""
        for key in keys:
            self._cached.put(key, (self._cached.peek(key) or frozenset()) & live | {engine_id})

    def likely_holders(self, key: bytes) -> Collection[int] | None:
        """The engines with a context that holds this prefix, or that may have it cached."""
        holders, cached = self._entries.get(key), self._cached.peek(key)
        return holders if cached is None else cached.union(holders or ())

    def publish(self, context: LedgerContext, boundary: Boundary) -> None:
        context.boundaries.append(boundary)
        self._entries.setdefault(boundary.key, {})[context.engine_id] = (context, boundary)
        if (cached := self._cached.pop(boundary.key)) and (rest := cached - {context.engine_id}):
            self._cached.put(boundary.key, rest)

    def unpublish(self, context: LedgerContext) -> None:
        """Remove the context's entries. The context keeps its boundaries."""
        for boundary in context.boundaries:
            holders = self._entries.get(boundary.key)
            found = None if holders is None else holders.get(context.engine_id)
            if holders is not None and found is not None and found[0] is context:
                del holders[context.engine_id]
                if not holders:
                    del self._entries[boundary.key]

    def contexts(self) -> Iterator[LedgerContext]:
        """Yield the context of each entry, with repetitions."""
        for holders in self._entries.values():
            for context, _ in holders.values():
                yield context


@dataclass(slots=True)
class KvUsage:
    """The KV usage of one engine, in tokens of whole blocks."""

    capacity: int
    used: int = 0
    # Of these, the tokens in contexts of live sessions. The sessions are likely to use them again,
    # although the engine may look idle while their programs think.
    session_tokens: int = 0

    def session_tokens_evicted(self, num_new: int) -> float:
        """How many tokens of live sessions `num_new` more tokens are expected to evict.

        The evicted tokens contain the same fraction of sessions' tokens as all used tokens."""
        num_evicted = min(num_new, self.used, self.used + num_new - self.capacity)
        return num_evicted * self.session_tokens / self.used if num_evicted > 0 else 0.0


# Evicting a context whose next use is this many seconds away counts half of its size. With a larger
# value, placements avoid evicting contexts that are used later.
_HORIZON_S = 60.0


class ServerCache:
    """A model of a foreign server's prefix cache: which contexts' KV it should still hold.

    Contexts are ordered by last use. Sizes are in characters, as in the ledger."""

    def __init__(
        self,
        size: Callable[[LedgerContext], int],
        next_use: Callable[[LedgerContext, float], float],
        drop: Callable[[LedgerContext], None],
    ) -> None:
        """`next_use` predicts when a context is used, given the current time. `drop` is called with
        each context that the server has probably evicted."""
        self.max_size: int | None = None
        self.max_prompts: int | None = None
        self._size = size
        self._next_use = next_use
        self._drop = drop
        self._sizes: dict[LedgerContext, int] = {}  # Least recently used first.
        # The ends of the cached prompts, least recently used first. Unused without `max_prompts`.
        self._leaves: dict[LedgerContext, None] = {}
        self._used = 0
        self._freed: set[LedgerContext] = set()  # Cached contexts that the ledger has freed.

    def set_limits(self, max_size: int | None, max_prompts: int | None) -> None:
        """Set how many characters and prompts the server caches; None: unlimited."""
        self.max_size, self.max_prompts = max_size, max_prompts

    def use(self, context: LedgerContext) -> None:
        """Mark the context and its ancestors as most recently used, and update their sizes."""
        if self.max_size is None and self.max_prompts is None:
            return
        for link in context.lineage():
            self._remove(link)
            self._sizes[link] = size = self._size(link)
            self._used += size
        if self.max_prompts is not None and not self._leaves_below(context):
            self._leaves[context] = None

    def freed(self, context: LedgerContext) -> None:
        """The ledger has freed the context. The server still caches it if it was computed."""
        if context not in self._sizes:
            return
        if context.is_computed:
            self._freed.add(context)
            return
        was_leaf, parent = context in self._leaves, context.parent
        self._remove(context)
        if was_leaf and parent in self._sizes and not self._leaves_below(parent):
            self._leaves[parent] = None

    def trim(self) -> None:
        """Evict until both limits hold, except contexts that runs use. Call it only when no
        unpinned context is about to be used."""
        while self.max_prompts is not None and len(self._leaves) > self.max_prompts:
            idle = [leaf for leaf in self._leaves if not leaf.users]
            if not idle:
                break
            self._evict(self._exclusive_to(next(filter(self._is_superseded, idle), idle[0])))
        while self.max_size is not None and self._used > self.max_size:
            oldest = next((context for context in self._sizes if not context.pins), None)
            if oldest is None:
                break
            self._evict([oldest])

    def eviction_cost(self, match: LedgerContext | None, num_new: int, now: float) -> float:
        """The size of the contexts that a prompt would evict, weighted by their next use.

        The prompt consists of the prefix in `match` and `num_new` more characters. A context counts
        less the later it is expected to be used, see `_HORIZON_S`."""
        safe = set() if match is None else set(match.lineage())
        lost: list[LedgerContext] = []
        if self._leaves and self.max_prompts is not None and len(self._leaves) >= self.max_prompts:
            below = [] if match is None else self._leaves_below(match)
            lost = self._exclusive_to(below[0] if below else next(iter(self._leaves)))
        if self.max_size is not None:
            excess = self._used + num_new - self.max_size
            for context, size in self._sizes.items():
                if excess <= 0:
                    break
                if context not in safe:
                    lost.append(context)
                    excess -= size
        wanted = [c for c in dict.fromkeys(lost) if c not in safe and c not in self._freed]
        return sum([self._sizes[c] * self._weight(c, now) for c in wanted])

    def check_integrity(self, live: Collection[LedgerContext]) -> None:
        assert self._used == sum(self._sizes.values()), (self._used, self._sizes)
        assert self._leaves.keys() <= self._sizes.keys(), self._leaves
        assert all(self._leaves_below(leaf) == [leaf] for leaf in self._leaves), self._leaves
        assert self._freed <= self._sizes.keys(), self._freed
        assert self._freed == self._sizes.keys() - set(live), self._freed

    def _weight(self, context: LedgerContext, now: float) -> float:
        return _HORIZON_S / (_HORIZON_S + max(0.0, self._next_use(context, now) - now))

    def _is_superseded(self, leaf: LedgerContext) -> bool:
        """Whether a more recent prompt shares a prefix with this one, and so took its slot."""
        later = list(self._leaves)[list(self._leaves).index(leaf) + 1 :]
        taken = {link for other in later for link in other.lineage()}
        return not taken.isdisjoint(leaf.lineage())

    def _leaves_below(self, context: LedgerContext) -> list[LedgerContext]:
        return [leaf for leaf in self._leaves if context in leaf.lineage()]

    def _exclusive_to(self, leaf: LedgerContext) -> list[LedgerContext]:
        """The leaf and its ancestors that no other cached prompt shares."""
        others = {link for other in self._leaves if other is not leaf for link in other.lineage()}
        return [link for link in leaf.lineage() if link in self._sizes and link not in others]

    def _evict(self, contexts: Collection[LedgerContext]) -> None:
        freed = [context in self._freed for context in contexts]
        for context in contexts:
            self._remove(context)
        for context, is_freed in zip(contexts, freed, strict=True):
            if not is_freed:
                self._drop(context)

    def _remove(self, context: LedgerContext) -> None:
        self._used -= self._sizes.pop(context, 0)
        self._leaves.pop(context, None)
        self._freed.discard(context)


class GpuTier:
    """The contexts whose KV is in one engine's GPU memory. All others are in CPU memory.

    The most recently used contexts are on the GPU, up to `capacity` tokens."""

    def __init__(self, capacity: int, size: Callable[[LedgerContext], int]) -> None:
        self._capacity = capacity
        self._size = size
        self._sizes: dict[LedgerContext, int] = {}  # Least recently used first.
        self._used = 0

    def use(self, context: LedgerContext) -> None:
        """Move the context and its ancestors to the GPU, and update their sizes."""
        for link in context.lineage():
            self.remove(link)
            self._sizes[link] = size = self._size(link)
            self._used += size
            link.on_host = False
        self._trim()

    def _trim(self) -> None:
        while self._used > self._capacity and len(self._sizes) > 1:
            oldest = next(iter(self._sizes))
            self.remove(oldest)
            oldest.on_host = True

    def remove(self, context: LedgerContext) -> None:
        """Remove a context that was freed, or whose KV is no longer in GPU memory."""
        self._used -= self._sizes.pop(context, 0)

    def check_integrity(self) -> None:
        assert self._used == sum(self._sizes.values()), (self._used, self._sizes)
        assert self._used <= self._capacity or len(self._sizes) == 1, self._used
        assert not any(context.on_host for context in self._sizes), self._sizes
