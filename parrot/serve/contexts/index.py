"""Contexts, and the index that finds one by the prompt it begins with."""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from parrot.serve.graph.nodes import Completion, given_name
from parrot.utils.heaps import LruDict

_MAX_CACHED_PREFIXES = 65_536  # prompts that engines are believed to have

Owner = int | str  # a session's id, or a tenant's name


class FreeReason(StrEnum):
    """Why a context was freed."""

    ROOM = "room"  # for others, when the engine was full
    MEMORY = "memory"  # its engine refused work for want of memory
    EXPIRED = "expired"  # a tenant's, unused for long
    SESSION = "session"  # its session ended
    BROKEN = "broken"  # its run was stopped or failed
    ENGINE = "engine"  # its engine was lost


class Source(NamedTuple):
    """The calls of one function with one cache salt, which are taken to be continued alike; so are
    all calls whose functions have no name."""

    salt: str
    func_name: str

    @classmethod
    def of(cls, completion: Completion) -> "Source":
        return cls(completion.options.cache_salt, given_name(completion))


class Boundary(NamedTuple):
    """The prompt with this key ends at `length`; `last` is its last token (or character)."""

    key: bytes
    length: int
    last: int | str


@dataclass(slots=True, eq=False)
class LedgerContext:
    """`length` tokens are or will be in it before it generates; `reserved` more may be generated.
    `is_computed`: its engine is known to have its tokens; before that, the run that opened it may
    still fail. `retired`: why nobody finds it any more, if so. `expected_call`: whose output it
    ends with and since when, so that a next call may be expected."""

    id: int
    engine_id: int
    owner: Owner
    parent: "LedgerContext | None"
    parent_len: int
    length: int
    reserved: int
    opened_at: float
    last_used: float
    expiry_renewed_at: float = field(
        default=0.0, init=False
    )  # when it last outlived its expiry by its forks
    boundaries: list[Boundary] = field(default_factory=list)
    children: "set[LedgerContext]" = field(default_factory=set)
    users: int = 0  # runs that generate on it
    pins: int = 0  # users, and children with pins
    is_computed: bool = False
    retired: FreeReason | None = None
    num_forks: int = 0  # so far
    expected_call: tuple[Source, float] | None = None
    on_host: bool = False  # its KV would have to be brought back
    function: str = ""  # whose call computes it; empty: one without a name
    tenant: str = ""  # whose call opened it

    def num_on_host(self, length: int) -> int:
        """The number of its first `length` tokens that are on its engine's host."""
        count = 0
        for link in self.lineage():
            count += max(0, length - link.parent_len) if link.on_host else 0
            length = min(length, link.parent_len)
        return count

    def lineage(self) -> "Iterator[LedgerContext]":
        """Yield it and those that it was forked from, itself first."""
        link: LedgerContext | None = self
        while link is not None:
            yield link
            link = link.parent

    def mark_computed(self) -> None:
        """Its engine has computed it, so also all that it was forked from."""
        link: LedgerContext | None = self
        while link is not None and not link.is_computed:  # asked for each chunk of a stream
            link.is_computed = True
            link = link.parent


class Match(NamedTuple):
    """The first `num_covered` segments of a prompt are the beginning of `context`."""

    num_covered: int
    context: LedgerContext
    boundary: Boundary


class PrefixIndex:
    """Prefix key -> engine -> the context that has the prompt of that key. `server_caches`: by
    engine, what servers keep that order that by themselves; `kv_usage`: of the other engines."""

    def __init__(self) -> None:
        self.server_caches: dict[int, ServerCache] = {}
        self.kv_usage: dict[int, KvUsage] = {}
        self._entries: dict[bytes, dict[int, tuple[LedgerContext, Boundary]]] = {}
        self._cached: LruDict[bytes, frozenset[int]] = LruDict(_MAX_CACHED_PREFIXES)

    def __len__(self) -> int:
        return sum(len(holders) for holders in self._entries.values())

    @property
    def session_fraction(self) -> float:
        """The part of all rooms that is promised; 0 where there is none."""
        capacity = sum(usage.capacity for usage in self.kv_usage.values())
        return (
            sum(usage.session_tokens for usage in self.kv_usage.values()) / capacity
            if capacity
            else 0.0
        )

    def match(self, engine_id: int, keys: Sequence[bytes]) -> Match | None:
        """The longest beginning of a prompt that a context of this engine has."""
        for i in range(len(keys) - 1, -1, -1):
            holders = self._entries.get(keys[i])
            if holders is not None and (found := holders.get(engine_id)) is not None:
                return Match(i + 1, *found)
        return None

    def holders(self, key: bytes) -> Collection[int] | None:
        """The engines that have the prompt of this key."""
        return self._entries.get(key)

    def engines_of_owner(self, owner: Owner, keys: Sequence[bytes]) -> Iterator[int]:
        """Yield the engines where contexts of the owner's have a beginning of the prompt: those
        with most of it first, with repetitions."""
        for key in reversed(keys):
            for engine_id, (context, _) in self._entries.get(key, {}).items():
                if context.owner == owner:
                    yield engine_id

    def add_cached(self, engine_id: int, keys: Iterable[bytes], live: Set[int]) -> None:
        """The engine is believed to have the prompts of these keys in its cache, though no context
        of it has. Engines that are not `live` have them no more."""
        for key in keys:
            self._cached.put(key, (self._cached.peek(key) or frozenset()) & live | {engine_id})

    def likely_holders(self, key: bytes) -> Collection[int] | None:
        """The engines that have the prompt of this key, or are believed to have it cached."""
        there, cached = self._entries.get(key), self._cached.peek(key)
        return there if cached is None else cached.union(there or ())

    def publish(self, context: LedgerContext, boundary: Boundary) -> None:
        context.boundaries.append(boundary)
        self._entries.setdefault(boundary.key, {})[context.engine_id] = (context, boundary)
        if (cached := self._cached.pop(boundary.key)) and (rest := cached - {context.engine_id}):
            self._cached.put(boundary.key, rest)

    def unpublish(self, context: LedgerContext) -> None:
        """Nobody will find the context any more. It keeps its boundaries."""
        for boundary in context.boundaries:
            holders = self._entries.get(boundary.key)
            found = None if holders is None else holders.get(context.engine_id)
            if holders is not None and found is not None and found[0] is context:
                del holders[context.engine_id]
                if not holders:
                    del self._entries[boundary.key]

    def contexts(self) -> Iterator[LedgerContext]:
        """Every entry's context, with repetitions."""
        for holders in self._entries.values():
            for context, _ in holders.values():
                yield context


@dataclass(slots=True)
class KvUsage:
    """The tokens that contexts on an engine may have, and that they have."""

    capacity: int
    used: int = 0
    session_tokens: int = (
        0  # of sessions' contexts: an engine may look idle while its sessions think
    )

    def session_tokens_evicted(self, num_new: int) -> float:
        """The tokens of what is promised that would give way to so many more: as large a part of
        those evicted as of all."""
        num_evicted = min(num_new, self.used, self.used + num_new - self.capacity)
        return num_evicted * self.session_tokens / self.used if num_evicted > 0 else 0.0


_HORIZON_S = 60.0  # what is expected to be used later than this counts for less


class ServerCache:
    """The contexts on one engine whose KV its server is believed to have, the one used last at the
    end. Sizes are in the ledger's units."""

    def __init__(
        self,
        size: Callable[[LedgerContext], int],
        next_use: Callable[[LedgerContext, float], float],
        drop: Callable[[LedgerContext], None],
    ) -> None:
        """`next_use`: when a context is expected to be used, seen from a time. `drop` is told of
        those that the server must have freed."""
        self.max_size: int | None = None
        self.max_prompts: int | None = None
        self._size = size
        self._next_use = next_use
        self._drop = drop
        self._sizes: dict[LedgerContext, int] = {}
        self._leaves: dict[LedgerContext, None] = {}  # as far as prompts are counted: few
        self._used = 0
        self._freed: set[LedgerContext] = set()  # of these, those that the ledger has freed

    def set_limits(self, max_size: int | None, max_prompts: int | None) -> None:
        """The server keeps so much; None: any amount."""
        self.max_size, self.max_prompts = max_size, max_prompts

    def use(self, context: LedgerContext) -> None:
        """A run reads all of it and of what it was forked from, or has changed its size."""
        if self.max_size is None and self.max_prompts is None:
            return
        for link in context.lineage():
            self._remove(link)
            self._sizes[link] = size = self._size(link)
            self._used += size
        if self.max_prompts is not None and not self._leaves_below(context):
            self._leaves[context] = None

    def freed(self, context: LedgerContext) -> None:
        """The ledger has freed it. What was never computed takes no room."""
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
        """Drop what cannot be kept, but for what runs use. Nobody may be about to use the rest."""
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
        """The size of what would be dropped for a prompt that begins with what `match` has, and has
        `num_new` more: what is expected to be used again only later counts for less."""
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
        """Whether a later prompt begins as this one: it has taken its place in the server."""
        later = list(self._leaves)[list(self._leaves).index(leaf) + 1 :]
        taken = {link for other in later for link in other.lineage()}
        return not taken.isdisjoint(leaf.lineage())

    def _leaves_below(self, context: LedgerContext) -> list[LedgerContext]:
        return [leaf for leaf in self._leaves if context in leaf.lineage()]

    def _exclusive_to(self, leaf: LedgerContext) -> list[LedgerContext]:
        """The contexts that no other prompt begins with, the leaf first."""
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
    """The contexts on one engine's device, up to its `capacity`. All others are on its host."""

    def __init__(self, capacity: int, size: Callable[[LedgerContext], int]) -> None:
        self._capacity = capacity
        self._size = size
        self._sizes: dict[LedgerContext, int] = {}  # of those on the device, by last use
        self._used = 0

    def use(self, context: LedgerContext) -> None:
        """A run reads all of it and of what it was forked from, or has changed its size."""
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
        """It is gone, or is not on the device."""
        self._used -= self._sizes.pop(context, 0)

    def check_integrity(self) -> None:
        assert self._used == sum(self._sizes.values()), (self._used, self._sizes)
        assert self._used <= self._capacity or len(self._sizes) == 1, self._used
        assert not any(context.on_host for context in self._sizes), self._sizes
