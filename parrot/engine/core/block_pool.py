"""The blocks of the KV cache: reference counts, and keys that find full blocks by content.

Equal keys mean equal tokens, from the first token on:

    token_ids   t t t t   t t t t   t t .
    keys        k0        k1                   k0 = H(root, block 0)   k1 = H(k0, block 1)

The root contains the salt, so contexts with different salts have no key in common. It also contains
a secret of the process, so that no client can construct two prompts with the same key. The full
blocks of a public prefix have the same keys for all salts. The block after the public prefix mixes
in the salt. Only this module changes reference counts.
"""

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple, Protocol

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident

_KEY_SIZE = 16  # Bytes of a key.
# Blocks that are evicted before the order of groups is checked again. A watcher may change it.
_MAX_EVICTED = 64


class Root(NamedTuple):
    """The start of a chain of keys. `key` enters after the first `num_public` keys."""

    key: bytes
    num_public: int = 0

    def cut(self, num_blocks: int) -> "Root":
        """The root of a fork with the first `num_blocks` full blocks."""
        return self if self.num_public <= num_blocks else Root(self.key, num_blocks)


NO_ROOT = Root(b"")
"""The root of a context that has no keys."""


class BlockHasher:
    """Computes the block keys of one engine."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(_KEY_SIZE) if secret is None else secret
        self._public = blake2b(
            digest_size=_KEY_SIZE, key=self._secret, person=b"public prefixes"
        ).digest()

    def root(self, salt: str, public_len: int = 0) -> Root:
        """The root of prompts whose first `public_len` tokens are public."""
        text = salt.encode("utf-8", "surrogatepass")
        key = blake2b(text, digest_size=_KEY_SIZE, key=self._secret).digest()
        return Root(key, public_len // self._block_size)

    def extend(
        self, keys: list[bytes], root: Root, token_ids: "array[int]", num_blocks: int
    ) -> None:
        """Extend `keys`, the keys of the first blocks of `token_ids`, to `num_blocks` keys."""
        size = self._block_size
        for index in range(len(keys), num_blocks):
            before = keys[-1] if keys else self._public
            if index == root.num_public:
                before = before + root.key if keys else root.key
            block = token_ids[index * size : (index + 1) * size].tobytes()
            key = blake2b(before + block, digest_size=_KEY_SIZE).digest()
            keys.append(key)


class Watcher(Protocol):
    """Receives the changes of blocks with a key.

    It is a protocol because `host.stores.HostStores`, the implementation, imports this module."""

    def on_published(self, block: int, key: bytes) -> None:
        """A block in use has received a key."""
        ...

    def on_released(self, block: int) -> None:
        """The last reference to the block was released."""
        ...

    def on_acquired(self, block: int) -> None:
        """A free block is in use again."""
        ...

    def on_evicted(self, block: int) -> None:
        """A free block is about to lose its key, because it is allocated."""
        ...

    def on_unpublished(self, block: int, key: bytes) -> None:
        """The block has lost its key."""
        ...

    def on_abandoned(self, keys: Sequence[bytes]) -> None:
        """A context was freed after it had lost the blocks of these keys."""
        ...

    def on_invalidated(self, key: bytes) -> None:
        """The KV of `key` may be wrong."""
        ...


class BlockPool:
    """Reference counts and keys of blocks 0..num_blocks-1, each with `block_size` token slots.

    A published block is found by its key until it is allocated again, also while it is free. Free
    blocks without a key are allocated first, then `cached_free`."""

    def __init__(self, num_blocks: int, block_size: int, shares: KvShares | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shares = shares or KvShares(num_blocks)
        # Free blocks without a key. The last freed block is allocated first: it may be in a cache.
        self._blank = list(range(num_blocks - 1, -1, -1))
        # Free blocks with a key. The end of a prefix is evicted before its start.
        self.cached_free: EvictionQueue[int] = EvictionQueue(self.shares, num_resident)
        self._owners: list[ShareGroup | None] = [None] * num_blocks  # None: the block is blank.
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self.num_releases = 0  # References released so far.
        self.watcher: Watcher | None = None
        # Called with each block that loses its KV, before its group changes.
        self.on_blank: Callable[[int], None] | None = None

    def watch(self, watcher: Watcher, queue: EvictionQueue[int]) -> None:
        """Report changes to the watcher, and evict free blocks in the order of `queue`.

        Must be called before the first block is published."""
        self.watcher = watcher
        self.shares.remove_queue(self.cached_free)
        self.cached_free = queue

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self.cached_free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def num_refs(self, block: int) -> int:
        return self._refs[block]

    def blocks_for(self, num_tokens: int) -> int:
        """The number of blocks that `num_tokens` tokens need."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, group: ShareGroup | None = None) -> list[int] | None:
        """Allocate blocks for a group, each with one reference.

        Returns None, and allocates nothing, if fewer blocks are free."""
        if num_blocks > self.num_free:
            return None
        if num_blocks == 0:
            return []
        taken = self._blank[-num_blocks:]
        del self._blank[-num_blocks:]
        while len(taken) < num_blocks:
            taken += self._evict(min(num_blocks - len(taken), _MAX_EVICTED))
        group = group or self.shares.group("")
        for block in taken:
            self._refs[block] = 1
            self._owners[block] = group
        group.num_used += num_blocks
        self.shares.grew(group)
        return taken

    def _evict(self, most: int) -> Sequence[int]:
        """Remove the keys and owners of the next cached blocks, at most `most`, and return them."""
        run = self.cached_free.first_run(most)
        assert run, "a free block is lost"
        group = self.owner(run[0])
        for block in run:
            if self.watcher is not None:
                self.watcher.on_evicted(block)
            if self.on_blank is not None:
                self.on_blank(block)
            key = self._keys[block]
            assert key is not None, f"block {block} has no key"
            self._keys[block] = self._owners[block] = None
            del self._by_key[key]
            if self.watcher is not None:
                self.watcher.on_unpublished(block, key)
        self.cached_free.discard_run(group, run)
        group.num_cached -= len(run)
        self.shares.remove_if_empty(group)
        return run

    def is_blank(self, block: int) -> bool:
        return self._owners[block] is None

    def owner(self, block: int) -> ShareGroup:
        """The group that the block was computed for. The block must not be blank."""
        group = self._owners[block]
        assert group is not None, f"block {block} is blank"
        return group

    def _make_blank(self, block: int) -> None:
        if self.on_blank is not None:
            self.on_blank(block)
        group = self.owner(block)
        self._owners[block] = None
        self._blank.append(block)
        self.shares.remove_if_empty(group)

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block. All blocks must be in use or have a key."""
        refs = self._refs
        grown: dict[ShareGroup, None] = {}
        for block in blocks:
            if not refs[block]:
                assert self._keys[block] is not None, f"block {block} is free and cannot be shared"
                group = self._remove_from_queue(block)
                group.num_used += 1
                grown[group] = None
                if self.watcher is not None:
                    self.watcher.on_acquired(block)
            refs[block] += 1
        for group in grown:
            self.shares.grew(group)

    def _remove_from_queue(self, block: int) -> ShareGroup:
        group = self.owner(block)
        self.cached_free.discard(group, block)
        group.num_cached -= 1
        return group

    def release(self, blocks: Sequence[int]) -> None:
        """Remove a reference from each block. Blocks without references are free.

        The last blocks are freed first, so that a cached prefix is evicted from its end."""
        refs = self._refs
        freed = []
        self.num_releases += len(blocks)
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is already free"
            refs[block] -= 1
            if refs[block] == 0:
                freed.append(block)
        for group, run in groupby(freed, self.owner):
            self._free_run([*run], group)

    def _free_run(self, blocks: Sequence[int], group: ShareGroup) -> None:
        """Move blocks of a group, which have no references, to the free blocks."""
        group.num_used -= len(blocks)
        if kept := [block for block in blocks if self._keys[block] is not None]:
            group.num_cached += len(kept)
            self.cached_free.add_run(group, kept)
            if self.watcher is not None:
                for block in kept:
                    self.watcher.on_released(block)
        if len(kept) < len(blocks):
            for block in blocks:
                if self._keys[block] is None:
                    if self.on_blank is not None:
                        self.on_blank(block)
                    self._owners[block] = None
                    self._blank.append(block)
            self.shares.remove_if_empty(group)

    def publish(self, block: int, key: bytes) -> int:
        """Publish a block in use under `key`, and return the block that has the key.

        The key may already have another block. A block that has another key keeps it."""
        return self.publish_run((block,), (key,))[0]

    def publish_run(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Publish several blocks; see `publish`."""
        found = []
        for block, key in zip(blocks, keys, strict=True):
            assert self._refs[block] > 0, f"block {block} is free and cannot be published"
            if (known := self._by_key.get(key)) is not None:
                found.append(known)
                continue
            if self._keys[block] is None:
                self._by_key[key] = block
                self._keys[block] = key
                if self.watcher is not None:
                    self.watcher.on_published(block, key)
            found.append(block)
        return found

    def find(self, key: bytes) -> int | None:
        return self._by_key.get(key)

    def find_run(self, keys: Iterable[bytes]) -> list[int]:
        """The blocks of the first keys, up to the first key without a block."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def unpublish(self, blocks: Iterable[int]) -> None:
        """Remove the keys of blocks whose content will change."""
        for block in blocks:
            key = self._keys[block]
            if key is None:
                continue
            self._keys[block] = None
            del self._by_key[key]
            if self._refs[block] == 0:
                self._remove_from_queue(block)
                self._make_blank(block)
            if self.watcher is not None:
                self.watcher.on_unpublished(block, key)

    def invalidate(self, keys: Iterable[bytes]) -> None:
        """Unpublish the blocks of keys whose KV may be wrong, and discard all copies."""
        for key in keys:
            # A copy in CPU memory may exist although the block was evicted.
            if self.watcher is not None:
                self.watcher.on_invalidated(key)
            if (block := self._by_key.get(key)) is not None:
                self.unpublish((block,))

    def key_of(self, block: int) -> bytes | None:
        return self._keys[block]

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Compare all counts with the block tables of all holders. Raises AssertionError."""
        counted: Counter[int] = Counter()
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a table holds a block twice: {blocks}"
            counted.update(blocks)
        for block, refs in enumerate(self._refs):
            assert refs == counted[block], f"block {block}: {refs} refs, {counted[block]} holders"
        free = {*self._blank, *self.cached_free}
        assert len(free) == self.num_free, "a block is free twice"
        assert free == {block for block, refs in enumerate(self._refs) if refs == 0}
        keyed = {block: key for block, key in enumerate(self._keys) if key is not None}
        assert {block: key for key, block in self._by_key.items()} == keyed
        assert all(block in keyed for block in self.cached_free), "a blank block is kept"
        assert not any(block in keyed for block in self._blank), "a published block is lost"
        self.cached_free.check_integrity()
        blank = [block for block, group in enumerate(self._owners) if group is None]
        assert blank == sorted(self._blank), "a blank block is in use"

    def count_owners(self) -> Counter[tuple[ShareGroup, bool]]:
        """Count the blocks of each group: in use (True), and free with a key (False)."""
        owned = ((g, self._refs[i] > 0) for i, g in enumerate(self._owners) if g is not None)
        return Counter(owned)
