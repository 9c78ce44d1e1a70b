"""Counts of computed tokens: found again, computed again, or freed, and why."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parrot.serve.contexts.index import Context, FreeReason, PrefixIndex
from parrot.serve.events import ContextEvicted, Events
from parrot.utils.heaps import LruDict

EVICTIONS = frozenset({FreeReason.ROOM, FreeReason.MEMORY})
_MAX_GONE = 65536  # prefixes remembered after they were freed


ELSEWHERE = "elsewhere"
"""Why tokens are computed again that another engine has now."""


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

    def freed(self, context: Context, reason: FreeReason) -> None:
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
