"""What becomes of computed tokens: found again, computed again, or freed, and why."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
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
    """Counts per engine and in all, lost engines included. `is_held` tells whether some engine has
    the prompt of a key."""

    def __init__(self, is_held: Callable[[bytes], bool]) -> None:
        self.total = KvCounts()
        self._is_held = is_held
        self._engines: defaultdict[int, KvCounts] = defaultdict(KvCounts)
        self._gone: LruDict[bytes, FreeReason] = LruDict(_MAX_GONE)

    def engine(self, engine_id: int) -> KvCounts:
        return self._engines[engine_id]

    def forget_engine(self, engine_id: int) -> None:
        self._engines.pop(engine_id, None)

    def freed(
        self, engine_id: int, keys: Iterable[bytes], num_tokens: int, reason: FreeReason
    ) -> None:
        """A computed context is gone, and with it the prompts of these keys."""
        for key in keys:
            self._gone.put(key, reason)
        for counts in (self.total, self._engines[engine_id]):
            counts.freed[reason] += num_tokens

    def used(self, engine_id: int, num_hit: int, missing: Sequence[tuple[bytes, int]]) -> int:
        """A prompt is about to be computed, and a context of the engine has its first `num_hit`
        tokens. `missing`: the key and length of every longer beginning. Returns how many of the
        tokens are computed again that some context has or had."""
        reason, num_recomputed = None, 0
        for key, length in reversed(missing):
            reason = ELSEWHERE if self._is_held(key) else self._gone.peek(key)
            if reason is not None:
                num_recomputed = length - num_hit
                break
        for counts in (self.total, self._engines[engine_id]):
            counts.hit += num_hit
            if reason is not None:
                counts.recomputed[reason] += num_recomputed
        return num_recomputed
