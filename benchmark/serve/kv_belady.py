"""What an eviction that knows the future would have to compute again, on a recorded trace.

Belady's rule on contexts: when an engine is full, the context goes whose next use is farthest. A
chat's contexts are a chain that is used as a whole and given up from its end; while it runs it
stays.

    chat    |-- turn 1 --|-- turn 2 --|-- turn 3 --|   given up from the right, a turn at a time
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from math import inf


@dataclass(frozen=True, slots=True)
class Turn:
    """A chat's turn: it needs the first `known` tokens of the chat again and ends with `total`.
    `reserved`: the tokens it may need at most. Times are in seconds."""

    chat: int
    start: float
    end: float
    known: int
    total: int
    reserved: int
    is_last: bool


@dataclass(slots=True)
class _Chat:
    """`ends`: where its contexts end that are there."""

    base: int  # tokens of the prefix that all chats share
    ends: list[int] = field(default_factory=list)
    is_running: bool = False
    last_used: float = 0.0
    next_use: float = inf

    @property
    def length(self) -> int:
        return self.ends[-1] if self.ends else self.base


Rank = Callable[[_Chat], float]
"""The chat with the highest rank is given up first."""


def farthest(chat: _Chat) -> float:
    return chat.next_use


def oldest(chat: _Chat) -> float:
    return -chat.last_used


class Replay:
    """One engine, one trace, one rule."""

    def __init__(self, capacity: int, base: int, block_size: int, rank: Rank, since: float) -> None:
        """What is computed before `since` does not count."""
        self._capacity = capacity - _blocks(0, base, block_size)
        self._base = base
        self._block_size = block_size
        self._rank = rank
        self._since = since
        self._chats: dict[int, _Chat] = {}
        self._used = 0
        self._recomputed = 0

    def run(self, turns: Sequence[Turn]) -> int:
        """Tokens computed again."""
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
        chat = self._chats.setdefault(turn.chat, _Chat(self._base))
        chat.is_running = True
        if turn.known and turn.start >= self._since:
            self._recomputed += turn.known - chat.length
        self._grow(chat, turn.reserved)
        self._make_room()

    def _finish(self, turn: Turn, next_use: float) -> None:
        chat = self._chats[turn.chat]
        self._shrink(chat)
        self._grow(chat, turn.total)
        chat.is_running, chat.last_used, chat.next_use = False, turn.end, next_use
        if turn.is_last:
            while chat.ends:
                self._shrink(chat)
            del self._chats[turn.chat]

    def _make_room(self) -> None:
        while self._used > self._capacity:
            idle = [chat for chat in self._chats.values() if chat.ends and not chat.is_running]
            if not idle:
                return
            self._shrink(max(idle, key=self._rank))

    def _grow(self, chat: _Chat, end: int) -> None:
        self._used += _blocks(chat.length, end, self._block_size)
        chat.ends.append(end)

    def _shrink(self, chat: _Chat) -> None:
        end = chat.ends.pop()
        self._used -= _blocks(chat.length, end, self._block_size)


def _blocks(start: int, end: int, block_size: int) -> int:
    """The tokens of the blocks that a context from `start` to `end` has for itself."""
    return (-(-end // block_size) - start // block_size) * block_size


def mean_live(turns: Sequence[Turn], base: int, since: float, until: float) -> float:
    """Tokens that all chats together have, on average over this time, if nothing is given up."""
    area = 0.0
    before: dict[int, Turn] = {}
    for turn in sorted(turns, key=lambda turn: turn.end):
        last = before.get(turn.chat)
        if last is not None:
            area += max(0.0, min(turn.end, until) - max(last.end, since)) * (last.total - base)
        before[turn.chat] = turn
    for last in before.values():
        if not last.is_last:  # it went on when the recording ended
            area += max(0.0, until - max(last.end, since)) * (last.total - base)
    return base + area / (until - since)
