"""The KV cache of one engine, as blocks that are identified by the hash of their contents."""

from array import array
from collections import Counter
from collections.abc import Sequence

from parrot.protocol.engine_api import NO_PARENT, FillPiece
from parrot.protocol.errors import NotFound

Key = int
"""The hash of a full block: of its tokens, all tokens before them, and the cache salt."""


class Held:
    """The tokens of a context after the first `begin` tokens, which belong to its parent. `keys`
    identify its own full blocks. It exists until it is freed and has no forks."""

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
        """Return the tokens from `start` to `end`."""
        found = array("H")
        if start < self.begin:
            assert self.parent is not None
            found += self.parent.tokens(start, min(end, self.begin))
        return found + self.own[max(0, start - self.begin) : max(0, end - self.begin)]

    def key_at(self, index: int, size: int) -> Key:
        """Return the key of a full block. `size` is the number of tokens per block."""
        if index < 0:
            return self.root
        first = self.begin // size
        if index >= first:
            return self.keys[index - first]
        assert self.parent is not None
        return self.parent.key_at(index, size)


class BlockPool:
    """The blocks of existing contexts, and idle blocks of freed contexts, which are evicted in LRU
    order. Only full blocks are found again.

    ServeCore keeps its contexts within the capacity. While its request to free a context is on the
    way, the pool exceeds its capacity; `most_over` is the largest excess so far, in blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self._contexts: dict[int, Held] = {}
        self._users: dict[Key, int] = {}
        self._idle: dict[Key, None] = {}  # least recently used first
        self._reserved = 0
        self.most_over = 0

    @property
    def num_free(self) -> int:
        """Blocks that no context holds. Negative if contexts exceed the capacity."""
        return self.num_blocks - len(self._users) - self._reserved

    def extend(self, piece: FillPiece, salt: str) -> tuple[int, int]:
        """Append to a context, or open it with the first piece. Returns the number of added tokens
        and how many of them are cached. Tokens of the parent count. Raises `NotFound` for an
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
        """Reserve blocks for a later output, and return their number."""
        num_blocks = -(-num_tokens // self.block_size)
        self._make_room(num_blocks)
        self._reserved += num_blocks
        return num_blocks

    def unreserve(self, num_blocks: int) -> None:
        self._reserved -= num_blocks

    def length(self, context_id: int) -> int:
        return len(self._contexts[context_id])

    def append(self, context_id: int, tokens: Sequence[int]) -> None:
        """Append an output, for which blocks were reserved."""
        if (held := self._contexts.get(context_id)) is not None:
            self._append(held, tokens)

    def free(self, context_id: int) -> int:
        """Free a context and return its number of tokens, 0 for an unknown context."""
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
        """Return how many of the new tokens are in cached full blocks. At least one token is left:
        the last token must be computed to generate the next one."""
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
