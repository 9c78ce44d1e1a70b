"""The recomputed tokens of an optimal eviction, on a recorded trace.

Belady's rule for contexts: if an engine is full, evict the context whose next use is farthest. A
chat's contexts are a chain that is used as a whole and evicted from its end. A running chat is not
evicted.

    chat    |-- turn 1 --|-- turn 2 --|-- turn 3 --|   evicted from the right, a turn at a time
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat's turn. It reuses the first `known` tokens of the chat and ends with `total` tokens.
    Times are in seconds."""

    chat: int
    start: float
    end: float
    known: int
    total: int
    is_last: bool


@dataclass(slots=True)
class Chat:
    """`ends`: the end positions of the contexts in memory."""

    ends: list[int] = field(default_factory=list)
    is_running: bool = False
    last_used: float = 0.0
    next_use: float = inf


Rank = Callable[[Chat], float]
"""The chat with the highest rank is evicted first."""

RANKS: dict[str, Rank] = {"belady": lambda chat: chat.next_use, "lru": lambda chat: -chat.last_used}


class Replay:
    """A replay of a trace on one engine. `base`: tokens of the prefix that all chats share."""

    def __init__(self, capacity: int, base: int, block_size: int, rank: Rank, since: float) -> None:
        """Tokens computed before `since` are not counted."""
        self._base = base
        self._block_size = block_size
        self._rank = rank
        self._since = since
        self._chats: dict[int, Chat] = {}
        self._room = capacity - self._blocks(0, base)
        self._recomputed = 0

    def run(self, turns: Sequence[Turn]) -> int:
        """The number of recomputed tokens."""
        starts: dict[int, list[float]] = {}
        for turn in sorted(turns, key=lambda turn: turn.start, reverse=True):
            starts.setdefault(turn.chat, []).append(turn.start)
        events = [(turn.start, 1, turn) for turn in turns] + [(turn.end, 0, turn) for turn in turns]
        for _, is_start, turn in sorted(events, key=lambda event: event[:2]):
            if is_start:
                self._start(turn)
            else:
                upcoming = starts[turn.chat]
                upcoming.pop()
                self._finish(turn, upcoming[-1] if upcoming else inf)
        return self._recomputed

    def _start(self, turn: Turn) -> None:
        chat = self._chats.setdefault(turn.chat, Chat())
        chat.is_running = True
        if turn.known and turn.start >= self._since:
            self._recomputed += turn.known - self._length(chat)
        self._room -= self._blocks(self._length(chat), turn.total)
        chat.ends.append(turn.total)
        while self._room < 0:
            idle = [other for other in self._chats.values() if other.ends and not other.is_running]
            if not idle:
                return
            self._shrink(max(idle, key=self._rank))

    def _finish(self, turn: Turn, next_use: float) -> None:
        chat = self._chats[turn.chat]
        chat.is_running, chat.last_used, chat.next_use = False, turn.end, next_use
        if turn.is_last:
            while chat.ends:
                self._shrink(chat)
            del self._chats[turn.chat]

    def _length(self, chat: Chat) -> int:
        return chat.ends[-1] if chat.ends else self._base

    def _shrink(self, chat: Chat) -> None:
        end = chat.ends.pop()
        self._room += self._blocks(self._length(chat), end)

    def _blocks(self, start: int, end: int) -> int:
        """The tokens in the own blocks of a context from `start` to `end`."""
        return (-(-end // self._block_size) - start // self._block_size) * self._block_size


def mean_live(turns: Sequence[Turn], base: int, since: float, until: float) -> float:
    """The mean tokens of all chats over this time, without eviction."""
    area = 0.0
    before: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.end):
        last = before.get(turn.chat)
        if last is not None:
            area += max(0.0, min(turn.end, until) - max(last.end, since)) * (last.total - base)
        before[turn.chat] = turn
    for last in before.values():
        if not last.is_last:  # The chat was active when the recording ended.
            area += max(0.0, until - max(last.end, since)) * (last.total - base)
    return base + area / (until - since)
