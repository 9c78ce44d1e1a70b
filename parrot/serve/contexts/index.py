"""Contexts, and the index that finds one by the prompt it begins with."""

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, NamedTuple

from parrot.serve.contexts.think_time import Source
from parrot.utils.heaps import LruDict

if TYPE_CHECKING:
    from parrot.serve.contexts.kept import Kept
    from parrot.serve.contexts.room import Room

_MAX_CACHED = 65_536  # prompts that engines are believed to have

Owner = int | str  # a session's id, or a tenant's name


class FreeReason(StrEnum):
    """Why a context was freed."""

    ROOM = "room"  # for others, when the engine was full
    MEMORY = "memory"  # its engine refused work for want of memory
    EXPIRED = "expired"  # a tenant's, unused for long
    SESSION = "session"  # its session ended
    BROKEN = "broken"  # its run was stopped or failed
    ENGINE = "engine"  # its engine was lost


class Boundary(NamedTuple):
    """The prompt with this key ends at `length`; `last` is its last token (or character)."""

    key: bytes
    length: int
    last: int | str


@dataclass(slots=True, eq=False)
class Context:
    """`length` tokens are or will be in it before it generates; `reserved` more may be generated.
    `is_computed`: its engine is known to have its tokens; before that, the run that opened it may
    still fail. `retired`: why nobody finds it any more, if so. `awaiting`: whose output it ends
    with and since when, so that a next call may be expected."""

    id: int
    engine_id: int
    owner: Owner
    parent: "Context | None"
    parent_len: int
    length: int
    reserved: int
    opened_at: float
    last_used: float
    kept_at: float = field(default=0.0, init=False)  # when it last outlived its expiry by its forks
    boundaries: list[Boundary] = field(default_factory=list)
    children: "set[Context]" = field(default_factory=set)
    users: int = 0  # runs that generate on it
    pins: int = 0  # users, and children with pins
    is_computed: bool = False
    retired: FreeReason | None = None
    num_forks: int = 0  # so far
    awaiting: tuple[Source, float] | None = None
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

    def lineage(self) -> "Iterator[Context]":
        """Yield it and those that it was forked from, itself first."""
        link: Context | None = self
        while link is not None:
            yield link
            link = link.parent

    def mark_computed(self) -> None:
        """Its engine has computed it, so also all that it was forked from."""
        link: Context | None = self
        while link is not None and not link.is_computed:  # asked for each chunk of a stream
            link.is_computed = True
            link = link.parent


class Match(NamedTuple):
    """The first `num_covered` segments of a prompt are the beginning of `context`."""

    num_covered: int
    context: Context
    boundary: Boundary


class PrefixIndex:
    """Prefix key -> engine -> the context that has the prompt of that key. `kept`: by engine, what
    servers keep that order that by themselves; `rooms`: of the other engines."""

    def __init__(self) -> None:
        self.kept: dict[int, Kept] = {}
        self.rooms: dict[int, Room] = {}
        self._entries: dict[bytes, dict[int, tuple[Context, Boundary]]] = {}
        self._cached: LruDict[bytes, frozenset[int]] = LruDict(_MAX_CACHED)

    def __len__(self) -> int:
        return sum(len(holders) for holders in self._entries.values())

    @property
    def part_promised(self) -> float:
        """The part of all rooms that is promised; 0 where there is none."""
        capacity = sum(room.memory.capacity for room in self.rooms.values())
        return sum(room.promised for room in self.rooms.values()) / capacity if capacity else 0.0

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

    def holders_of(self, owner: Owner, keys: Sequence[bytes]) -> Iterator[int]:
        """Yield the engines where contexts of the owner's have a beginning of the prompt: those
        with most of it first, with repetitions."""
        for key in reversed(keys):
            for engine_id, (context, _) in self._entries.get(key, {}).items():
                if context.owner == owner:
                    yield engine_id

    def remember(self, engine_id: int, keys: Iterable[bytes], live: Set[int]) -> None:
        """The engine is believed to have the prompts of these keys in its cache, though no context
        of it has. Engines that are not `live` have them no more."""
        for key in keys:
            self._cached.put(key, (self._cached.peek(key) or frozenset()) & live | {engine_id})

    def likely_holders(self, key: bytes) -> Collection[int] | None:
        """The engines that have the prompt of this key, or are believed to have it cached."""
        there, cached = self._entries.get(key), self._cached.peek(key)
        return there if cached is None else cached.union(there or ())

    def publish(self, context: Context, boundary: Boundary) -> None:
        context.boundaries.append(boundary)
        self._entries.setdefault(boundary.key, {})[context.engine_id] = (context, boundary)
        if (cached := self._cached.pop(boundary.key)) and (rest := cached - {context.engine_id}):
            self._cached.put(boundary.key, rest)

    def unpublish(self, context: Context) -> None:
        """Nobody will find the context any more. It keeps its boundaries."""
        for boundary in context.boundaries:
            holders = self._entries.get(boundary.key)
            found = None if holders is None else holders.get(context.engine_id)
            if holders is not None and found is not None and found[0] is context:
                del holders[context.engine_id]
                if not holders:
                    del self._entries[boundary.key]

    def contexts(self) -> Iterator[Context]:
        """Every entry's context, with repetitions."""
        for holders in self._entries.values():
            for context, _ in holders.values():
                yield context
