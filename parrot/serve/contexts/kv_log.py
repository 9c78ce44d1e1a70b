"""What becomes of computed tokens: found again, computed again, or freed, and why."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from parrot.utils.heaps import LruDict

_MAX_GONE = 65536  # prefixes remembered after they were freed


class FreeReason(StrEnum):
    """Why a context was freed."""

    ROOM = "room"  # for others, when the engine was full
    MEMORY = "memory"  # its engine refused work for want of memory
    EXPIRED = "expired"  # a tenant's, unused for long
    SESSION = "session"  # its session ended
    BROKEN = "broken"  # its run was stopped or failed
    ENGINE = "engine"  # its engine was lost


ELSEWHERE = "elsewhere"
"""Why tokens are computed again that another engine has now."""


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
        return self.freed[FreeReason.ROOM] + self.freed[FreeReason.MEMORY]


class KvLog:
    """Counts per engine and in all, lost engines included."""

    def __init__(self) -> None:
        self.total = KvCounts()
        self._engines: dict[int, KvCounts] = {}
        self._gone: LruDict[bytes, FreeReason] = LruDict(_MAX_GONE)

    def engine(self, engine_id: int) -> KvCounts:
        return self._engines.setdefault(engine_id, KvCounts())

    def forget_engine(self, engine_id: int) -> None:
        self._engines.pop(engine_id, None)

    def freed(self, engine_id: int, num_tokens: int, reason: FreeReason) -> None:
        for counts in (self.total, self.engine(engine_id)):
            counts.freed[reason] += num_tokens

    def remember(self, keys: Iterable[bytes], reason: FreeReason) -> None:
        """Prompts with these keys were computed, and are gone."""
        for key in keys:
            self._gone.put(key, reason)

    def why_gone(self, key: bytes) -> FreeReason | None:
        """Why the context is gone that had the prompt of this key; None if none had."""
        return self._gone.peek(key)

    def used(self, engine_id: int, num_hit: int, num_recomputed: int, reason: str | None) -> None:
        for counts in (self.total, self.engine(engine_id)):
            counts.hit += num_hit
            if reason is not None:
                counts.recomputed[reason] += num_recomputed
