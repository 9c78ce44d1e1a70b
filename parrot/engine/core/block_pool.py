"""The blocks of the KV cache: how many hold each, and by which key a full one is found.

Equal keys mean equal tokens, from the first on:

    token_ids   t t t t   t t t t   t t .
    keys        k0        k1                   k0 = H(root, block 0)   k1 = H(k0, block 1)

The root depends on a salt, so that contexts of different salts have no key in common, and on a
secret of the process, so that nobody can prepare two prompts with one key. Where a prompt begins
with a public text, the keys of its full blocks are those of all salts; the next one mixes in the
salt. Only this module touches block reference counts."""

import secrets
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import NamedTuple, Protocol

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident

_KEY_SIZE = 16
_MAX_EVICTED = 64  # blocks given away at once: meanwhile a watcher may change what groups have


class Root(NamedTuple):
    """The beginning of a chain of keys: its first `num_public` ones have no salt, and what comes
    behind them has `key`."""

    key: bytes
    num_public: int = 0

    def cut(self, num_blocks: int) -> "Root":
        """The root of a fork that has so many full blocks of this one's."""
        return self if self.num_public <= num_blocks else Root(self.key, num_blocks)


NO_ROOT = Root(b"")
"""A root that no keys follow yet."""


class BlockHasher:
    """Makes the keys of one engine."""

    def __init__(self, block_size: int, secret: bytes | None = None) -> None:
        self._block_size = block_size
        self._secret = secrets.token_bytes(_KEY_SIZE) if secret is None else secret
        self._public = blake2b(
            digest_size=_KEY_SIZE, key=self._secret, person=b"public prefixes"
        ).digest()  # no salt's

    def root(self, salt: str, public_len: int = 0) -> Root:
        """The root of prompts whose first `public_len` tokens are public."""
        text = salt.encode("utf-8", "surrogatepass")
        key = blake2b(text, digest_size=_KEY_SIZE, key=self._secret).digest()
        return Root(key, public_len // self._block_size)

    def extend(
        self, keys: list[bytes], root: Root, token_ids: "array[int]", num_blocks: int
    ) -> None:
        """Bring `keys`, those of the first blocks of `token_ids`, to `num_blocks` of them."""
        size = self._block_size
        for index in range(len(keys), num_blocks):
            before = keys[-1] if keys else self._public
            if index == root.num_public:
                before = before + root.key if keys else root.key
            block = token_ids[index * size : (index + 1) * size].tobytes()
            key = blake2b(before + block, digest_size=_KEY_SIZE).digest()
            keys.append(key)


class Watcher(Protocol):
    """Receives the changes of blocks that have a key. It is a protocol because its implementation,
    `host.stores.HostStores`, stands above the pool."""

    def on_published(self, block: int, key: bytes) -> None:
        """A block in use got a key."""
        ...

    def on_released(self, block: int) -> None:
        """Nobody holds the block any more."""
        ...

    def on_acquired(self, block: int) -> None:
        """A block that nobody held is in use again."""
        ...

    def on_evicted(self, block: int) -> None:
        """A free block is about to lose its key, since somebody else gets it."""
        ...

    def on_unpublished(self, block: int, key: bytes) -> None:
        """The block has lost its key."""
        ...

    def on_abandoned(self, keys: Sequence[bytes]) -> None:
        """A context was freed that has lost the blocks of these keys, from its beginning on."""
        ...

    def on_invalidated(self, key: bytes) -> None:
        """The block of `key` loses it, since its KV may be wrong."""
        ...


class BlockPool:
    """Blocks 0..num_blocks-1 of `block_size` token slots each, counted by reference.

    A block is free, or held by as many contexts as its count says. A block can be given a key for
    what it holds, and then be found by it, also while it is free: until it is handed out again.

    Handed out first are free blocks without a key, the last freed before all others, while it may
    still be warm in a cache; then those with a key, `cached_free`. Whoever holds a block holds the
    blocks before it, and gives them up after it: so the end of a prefix goes before its beginning.
    `watch` may be called before the first block is published. `shares` has the groups; by default
    they are the pool's own."""

    def __init__(self, num_blocks: int, block_size: int, shares: KvShares | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shares = shares or KvShares(num_blocks)
        self._blank = list(range(num_blocks - 1, -1, -1))
        self.cached_free: EvictionQueue[int] = EvictionQueue(self.shares, num_resident)
        self._owners: list[ShareGroup | None] = [None] * num_blocks  # None: blank
        self._refs = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._by_key: dict[bytes, int] = {}
        self.num_releases = 0
        self.watcher: Watcher | None = None

    def watch(self, watcher: Watcher, queue: EvictionQueue[int]) -> None:
        """Report to the watcher, and give away free blocks in the order of its own queue."""
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
        """The number of blocks that hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int, group: ShareGroup | None = None) -> list[int] | None:
        """Take blocks for a group, each with one reference; None (and nothing taken) when there is
        no room."""
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
        """Take the key, and the owner, of the free blocks with a key that are to go first."""
        run = self.cached_free.first_run(most)
        assert run, "a free block is lost"
        group = self.owner(run[0])
        for block in run:
            if self.watcher is not None:
                self.watcher.on_evicted(block)
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

    def owner(self, block: int) -> ShareGroup:
        """For which group it was computed. It must not be blank."""
        group = self._owners[block]
        assert group is not None, f"block {block} is blank"
        return group

    def _make_blank(self, block: int) -> None:
        group = self.owner(block)
        self._owners[block] = None
        self._blank.append(block)
        self.shares.remove_if_empty(group)

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each block; all must be in use or found by their keys."""
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
        """One reference less on each block; at zero it is free. Later blocks are freed first."""
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
        """Nobody holds these blocks of a group any more."""
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
                    self._owners[block] = None
                    self._blank.append(block)
            self.shares.remove_if_empty(group)

    def publish(self, block: int, key: bytes) -> int:
        """Let a block in use be found by `key`, unless it has another one, or another block is
        found by it already: then return that one."""
        return self.publish_run((block,), (key,))[0]

    def publish_run(self, blocks: Sequence[int], keys: Sequence[bytes]) -> list[int]:
        """Publish each of these blocks by its key."""
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
        """The blocks of these keys, as far as they are found without a gap."""
        found = []
        for key in keys:
            if (block := self._by_key.get(key)) is None:
                break
            found.append(block)
        return found

    def unpublish(self, blocks: Iterable[int]) -> None:
        """These blocks must not be found any more: what they hold changes."""
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
        """Let nobody find what has these keys, nor a copy of it: it may be wrong. A block may have
        been given away since, and a copy of it remain."""
        for key in keys:
            if self.watcher is not None:
                self.watcher.on_invalidated(key)
            if (block := self._by_key.get(key)) is not None:
                self.unpublish((block,))

    def key_of(self, block: int) -> bytes | None:
        return self._keys[block]

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Recount the references from the block tables of all holders."""
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
        """Count each group's blocks: those in use (True), and free ones that are not blank."""
        owned = ((g, self._refs[i] > 0) for i, g in enumerate(self._owners) if g is not None)
        return Counter(owned)
