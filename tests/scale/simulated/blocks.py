"""KV of one engine, in blocks that are known by their contents: exactly what it still has."""

from array import array
from collections import Counter
from collections.abc import Sequence

from parrot.protocol.engine_api import NO_PARENT, FillPiece
from parrot.protocol.errors import NotFound

Key = int
"""Of a full block: it stands for its tokens, all before them, and their salt."""


class Held:
    """The tokens that a context has behind the `begin` first ones, which its parent has; `keys`: of
    its own full blocks. It lives as long as it is not freed, or has forks that live."""

    __slots__ = ("begin", "keys", "num_users", "own", "parent", "root")

    def __init__(self, parent: "Held | None", begin: int, salt: str) -> None:
        self.parent, self.begin = parent, begin
        self.root: Key = hash(salt) if parent is None else parent.root
        self.own = array("H")
        self.keys: list[Key] = []
        self.num_users = 1

    def __len__(self) -> int:
        return self.begin + len(self.own)

    def tokens(self, start: int, end: int) -> "array[int]":
        """Those at `start` and behind it, up to `end`."""
        found = array("H")
        if start < self.begin:
            assert self.parent is not None
            found += self.parent.tokens(start, min(end, self.begin))
        return found + self.own[max(0, start - self.begin) : max(0, end - self.begin)]

    def key_at(self, index: int, size: int) -> Key:
        """The key of the full block with this index; `size`: tokens of a block."""
        if index < 0:
            return self.root
        first = self.begin // size
        if index >= first:
            return self.keys[index - first]
        assert self.parent is not None
        return self.parent.key_at(index, size)


class BlockPool:
    """Blocks of contexts that live, and, least recently used first, those of others that nothing
    has been written over. Tokens of blocks that are not full are never found again.

    ServeCore keeps its contexts within the room. For the moment that its word of a freed one is on
    its way, the pool takes more: `most_over` blocks at most."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._contexts: dict[int, Held] = {}
        self._users: dict[Key, int] = {}
        self._idle: dict[Key, None] = {}  # the least recently used first
        self._reserved = 0
        self.most_over = 0

    @property
    def num_free(self) -> int:
        """Blocks that no context has, below 0 if contexts have too many."""
        return self.num_blocks - len(self._users) - self._reserved

    def extend(self, piece: FillPiece, salt: str) -> tuple[int, int]:
        """Append to a context, which the first piece opens. Returns the tokens that it then has
        behind those which it had, and how many of them are there already. Raises `NotFound` for an
        unknown parent."""
        held, before = self._contexts.get(piece.context_id), 0
        if held is None:
            held = self._contexts[piece.context_id] = self._open(piece, salt)
            cached = len(held)
        else:
            before = cached = len(held)
        tokens = piece.token_ids or ()
        cached += self._known_len(held, tokens)
        self._append(held, tokens)
        return len(held) - before, cached - before

    def reserve(self, num_tokens: int) -> int:
        """Keep blocks for an output to come; returns how many."""
        num_blocks = -(-num_tokens // self.block_size)
        self._make_room(num_blocks)
        self._reserved += num_blocks
        return num_blocks

    def unreserve(self, num_blocks: int) -> None:
        self._reserved -= num_blocks

    def length(self, context_id: int) -> int:
        return len(self._contexts[context_id])

    def append(self, context_id: int, tokens: Sequence[int]) -> None:
        """An output, for which there was room."""
        if (held := self._contexts.get(context_id)) is not None:
            self._append(held, tokens)

    def free(self, context_id: int) -> int:
        """Returns the tokens that it had; unknown ones have none."""
        held = self._contexts.pop(context_id, None)
        if held is None:
            return 0
        size = len(held)
        self._leave(held)
        return size

    def free_all(self) -> None:
        for context_id in list(self._contexts):
            self.free(context_id)

    def check_integrity(self) -> None:
        """Recount. Raises AssertionError."""
        assert not self._idle.keys() & self._users.keys()
        assert len(self._idle) <= max(0, self.num_free), (len(self._idle), self.num_free)
        users: Counter[Key] = Counter()
        seen: set[Held] = set()
        for held in self._contexts.values():
            link: Held | None = held
            while link is not None and link not in seen:
                seen.add(link)
                users.update(link.keys)
                link = link.parent
        assert users == self._users

    def _open(self, piece: FillPiece, salt: str) -> Held:
        if piece.parent_context_id == NO_PARENT:
            return Held(None, 0, salt)
        parent = self._contexts.get(piece.parent_context_id)
        if parent is None:
            raise NotFound(f"no context {piece.parent_context_id}")
        begin = len(parent) if piece.parent_len is None else piece.parent_len
        assert begin <= len(parent), piece.context_id
        parent.num_users += 1
        return Held(parent, begin, salt)

    def _known_len(self, held: Held, tokens: Sequence[int]) -> int:
        """Tokens behind the context's own, of full blocks that are there already; never all of
        them, since the last must be computed for what comes next."""
        size, num_full = self.block_size, len(held) // self.block_size
        known, key = num_full * size, held.key_at(num_full - 1, size)
        ahead = held.tokens(known, len(held)) + array("H", tokens)
        for start in range(0, len(ahead) - size, size):
            key = _key(key, ahead[start : start + size])
            if key not in self._users and key not in self._idle:
                break
            known += size
        return max(0, known - len(held))

    def _append(self, held: Held, tokens: Sequence[int]) -> None:
        size = self.block_size
        first = held.begin // size
        held.own.extend(tokens)
        index, end = first + len(held.keys), len(held)
        start = index * size
        filled = held.tokens(start, end)
        key = held.key_at(index - 1, size)
        for offset in range(0, end - start - size + 1, size):
            key = _key(key, filled[offset : offset + size])
            self._use(key)
            held.keys.append(key)

    def _use(self, key: Key) -> None:
        if key in self._idle:
            del self._idle[key]
        elif key not in self._users:
            self._make_room(1)
        self._users[key] = self._users.get(key, 0) + 1

    def _make_room(self, num_blocks: int) -> None:
        excess = len(self._idle) + num_blocks - self.num_free
        for _ in range(min(excess, len(self._idle))):
            del self._idle[next(iter(self._idle))]
        self.most_over = max(self.most_over, num_blocks - self.num_free)

    def _leave(self, held: Held | None) -> None:
        while held is not None:
            held.num_users -= 1
            if held.num_users:
                break
            for key in held.keys:
                self._users[key] -= 1
                if not self._users[key]:
                    del self._users[key]
                    self._idle[key] = None
            held = held.parent
        self._make_room(0)


def _key(before: Key, tokens: "array[int]") -> Key:
    return hash((before, tokens.tobytes()))
