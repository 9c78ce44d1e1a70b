"""Contexts: sequences of tokens, their KV, and how forks share it.

The tokens of a context are always kept. Its KV is only a cache: any part of it may be evicted and
computed again. Positions of one context, with blocks of 4 tokens:

    position      0 1 2 3   4 5 6 7   8 9 . .   . . . .
    token_ids     t t t t   t t t t   t t t t   t          13 tokens known
    block_ids     [  3  ]   [  9  ]   [  4  ]              3 blocks held
    KV            x x x x   x x x x   x x                  num_computed = 10
                  `---- shared -----'  `-own-'             owned_from = 2

A context writes only to blocks from `owned_from` on. A block before `owned_from` is full, or it is
the partly filled last block of a fork. The fork copies such a block before its first write
(copy-on-write). The scheduler of jobs (core/scheduler.py) calls `reserve` before each step, and
`IdleContexts` when too few blocks are free.

Full computed blocks are published under keys of their content. Another context with the same salt
and the same prefix adopts them. Published blocks of a freed context stay available until they are
reused. Public prefixes are adopted with any salt. Published blocks are never written to.

Example, with blocks of 4 tokens. Context 2 forks context 1 and adds 3 tokens. Then context 1 is
freed, and a new context 3 begins with the same 8 tokens as context 1.

    context 1     10 tokens   blocks 2 1 0     2 and 1 are full and published
    fork 2        13 tokens   blocks 2 1 3 4   owned_from = 2; before the step, the KV of positions
                                               8 and 9 is copied from block 0 to block 3
    free 1                                     block 0 is free; 2 and 1 are still held by context 2
    context 3      9 tokens   blocks 2 1 0     adopts 2 and 1, and computes 1 token in block 0
"""

from array import array
from collections import Counter
from collections.abc import Collection, Container, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field

from parrot.engine.core.block_pool import NO_ROOT, BlockHasher, BlockPool, Root
from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_used
from parrot.engine.core.steps import BlockCopy
from parrot.protocol.engine_api import WindowSlots
from parrot.utils.clock import Clock

_NOT_FAILED = (-1, -1, None)  # Equals no state of the pool.


@dataclass(frozen=True, slots=True)
class Fork:
    """A pending fork: the context will begin with the parent's first `length` tokens."""

    parent: "Context"
    length: int | None  # None: all tokens that the parent has when job `after` has ended.
    after: int | None  # Id of the parent's last job at the time of the request.


@dataclass(slots=True, eq=False)
class Context:
    """The state of one context, which `ContextTree` changes."""

    context_id: int
    # Only requests with this group's salt may use the context.
    group: ShareGroup
    # The pending fork. A context has no tokens before its fork is applied.
    fork: Fork | None = None
    token_ids: "array[int]" = field(init=False, default_factory=lambda: array("i"))
    num_computed: int = field(init=False, default=0)
    block_ids: list[int] = field(init=False, default_factory=list)
    owned_from: int = field(init=False, default=0)
    root: Root = field(init=False, default=NO_ROOT)
    # Keys of the first blocks, computed when they are needed.
    keys: list[bytes] = field(init=False, default_factory=list)
    # The first blocks that are published already.
    num_published: int = field(init=False, default=0)
    # The context belongs to one job, is freed with that job, and shares no KV.
    is_temporary: bool = False
    # Only in a `WindowedTree`: indices of the blocks whose window slots the context holds. The
    # number of blocks after which the context could not continue, because their window was lost,
    # and whether they are a common prefix.
    window: range = field(init=False, default=range(0))
    num_lost: int = field(init=False, default=0)
    has_common: bool = field(init=False, default=False)

    @property
    def salt(self) -> str:
        return self.group.salt

    @property
    def num_missing(self) -> int:
        """Tokens without KV."""
        return len(self.token_ids) - self.num_computed

    @property
    def num_known(self) -> int:
        """Tokens that the context has, or that its pending fork certainly provides."""
        return len(self.token_ids) if self.fork is None else self.fork.length or 0


def make_tree(
    num_blocks: int, block_size: int, clock: Clock | None = None, *, publishes: bool
) -> "ContextTree":
    """Make an empty tree with its own pool. `publishes`: contexts share equal prefixes."""
    return ContextTree(*make_pool(num_blocks, block_size, clock, publishes=publishes))


def make_pool(
    num_blocks: int, block_size: int, clock: Clock | None, *, publishes: bool
) -> tuple[BlockPool, BlockHasher | None]:
    """The pool and the hasher of a tree: its first arguments."""
    hasher = BlockHasher(block_size) if publishes else None
    return BlockPool(num_blocks, block_size, KvShares(num_blocks, clock)), hasher


class ContextTree:
    """Owns all contexts of an engine, and the blocks of `pool` that the contexts hold.

    Without a `hasher`, only forks share KV."""

    has_windows = False  # Whether the tree is a `WindowedTree`.
    max_chunk = 1 << 30  # Most tokens of a context in a step.

    def __init__(self, pool: BlockPool, hasher: BlockHasher | None = None) -> None:
        self.pool = pool
        self.shares = pool.shares
        self.block_size = pool.block_size
        self.pending_forks: dict[Context, None] = {}  # In order of creation.
        self._hasher = hasher
        self._contexts: dict[int, Context] = {}

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts.values())

    def get(self, context_id: int) -> Context | None:
        return self._contexts.get(context_id)

    def create(
        self,
        context_id: int,
        fork: Fork | None = None,
        salt: str = "",
        *,
        public_len: int = 0,
        is_temporary: bool = False,
    ) -> Context:
        """Create a context without tokens.

        A fork inherits `salt` and `public_len` from its root. `public_len`: the full blocks of this
        many first tokens are shared with any salt."""
        assert context_id not in self._contexts, f"context {context_id} exists"
        group = self.shares.group(salt if fork is None else fork.parent.salt)
        group.num_contexts += 1
        context = self._contexts[context_id] = Context(
            context_id, group, fork, is_temporary=is_temporary
        )
        if fork is not None:
            self.pending_forks[context] = None
        elif self._hasher is not None:
            context.root = self._hasher.root(salt, public_len)
        return context

    def apply_fork(self, child: Context, length: int) -> None:
        """Give `child` the first `length` tokens of its parent, and share their KV.

        The child computes the KV that the parent does not have."""
        assert child.fork is not None, f"context {child.context_id} has no pending fork"
        parent = child.fork.parent
        child.fork = None
        del self.pending_forks[child]
        child.token_ids = parent.token_ids[:length]
        child.num_computed = min(parent.num_computed, length)
        child.block_ids = parent.block_ids[: self.pool.blocks_for(child.num_computed)]
        child.owned_from = len(child.block_ids)
        self.pool.share(child.block_ids)
        num_full = length // self.block_size
        child.root = parent.root.cut(num_full)
        child.keys = parent.keys[:num_full]
        child.num_published = min(parent.num_published, child.num_computed // self.block_size)

    def next_key(self, context: Context) -> bytes | None:
        """The key of the first full block without KV.

        None if there is no such block, or if the context does not publish."""
        block = context.num_computed // self.block_size
        if self._hasher is None or context.is_temporary:
            return None
        if block >= (num_full := len(context.token_ids) // self.block_size):
            return None
        self._hasher.extend(context.keys, context.root, context.token_ids, num_full)
        return context.keys[block]

    def adopt(self, context: Context) -> int:
        """Adopt published blocks for the context's next tokens, up to the first gap.

        Returns the number of tokens with new KV."""
        if self.next_key(context) is None:
            return 0
        first = context.num_computed // self.block_size
        num_full = len(context.token_ids) // self.block_size
        found = self.pool.find_run(context.keys[first:num_full])
        if self.has_windows:
            found = self._adoptable(context, found)
        if not found:
            return 0
        before = context.num_computed
        self.pool.share(found)
        self.truncate(context, first)
        context.block_ids += found
        context.owned_from = context.num_published = len(context.block_ids)
        context.num_computed = len(context.block_ids) * self.block_size
        return context.num_computed - before

    def _adoptable(self, context: Context, found: list[int]) -> list[int]:
        """The first of the published blocks `found`, after which the context can continue."""
        return found

    def num_to_compute(self, context: Context, elsewhere: Container[bytes] = ()) -> int:
        """Tokens that must be computed, at least 1.

        Tokens in published blocks, and in blocks with a key in `elsewhere`, are not counted."""
        if self.next_key(context) is None:
            return max(1, context.num_missing)
        keys = context.keys[context.num_computed // self.block_size :]
        num_found = len(self.pool.find_run(keys))
        for key in keys[num_found:]:
            if key not in elsewhere and self.pool.find(key) is None:
                break
            num_found += 1
        return max(1, context.num_missing - num_found * self.block_size)

    def publish(self, context: Context) -> None:
        """Publish the context's full computed blocks.

        A block whose key is published already is replaced by the published block. So contexts that
        share a block also share all blocks before it."""
        num_full = context.num_computed // self.block_size
        if self._hasher is None or context.is_temporary or num_full <= context.num_published:
            return
        self._hasher.extend(context.keys, context.root, context.token_ids, num_full)
        first = context.num_published
        blocks, keys = context.block_ids[first:num_full], context.keys[first:num_full]
        found = self.pool.publish_run(blocks, keys)
        for index, (own, published) in enumerate(zip(blocks, found, strict=True), first):
            if published != own and self._may_replace(context, index, published):
                self.pool.share((published,))
                self.pool.release((own,))
                context.block_ids[index] = published
                context.owned_from = max(context.owned_from, index + 1)
        context.num_published = num_full

    def _may_replace(self, context: Context, index: int, published: int) -> bool:
        """Whether the published block may replace block `index` of the context."""
        return True

    def num_blocks_needed(self, context: Context, end: int) -> int:
        """Free blocks that `reserve(context, end)` would allocate."""
        return max(0, self.pool.blocks_for(end) - len(context.block_ids)) + self.must_copy(context)

    def max_end(self, context: Context) -> int:
        """The largest `end` that `reserve` can make writable."""
        return (len(context.block_ids) + self.pool.num_free) * self.block_size

    def settle(self, context: Context) -> None:
        """See `WindowedTree`, also for the following methods."""

    def leave(self, context: Context) -> None:
        pass

    def advance(self, context: Context) -> None:
        pass

    def slots_info(self) -> WindowSlots | None:
        return None

    def take_slot_changes(self) -> tuple[tuple[int, int], ...]:
        return ()

    def resend_slots(self) -> None:
        pass

    def reserve(
        self, context: Context, end: int, step_end: int | None = None
    ) -> tuple[BlockCopy, ...] | None:
        """Make positions [num_computed, end) writable. The next step ends at `step_end`.

        Returns the copies that must happen before the positions are written. Returns None, and
        changes nothing, if there are not enough free blocks."""
        size = self.block_size
        tail = context.num_computed // size
        if tail >= context.owned_from and end <= len(context.block_ids) * size:
            return ()  # Most generated tokens take this path.
        must_copy = self.must_copy(context)
        taken = self.pool.allocate(self.num_blocks_needed(context, end), context.group)
        if taken is None:
            return None
        copies: tuple[BlockCopy, ...] = ()
        if must_copy:
            shared, own = context.block_ids[tail], taken.pop()
            context.block_ids[tail] = own
            self.pool.release((shared,))
            num_tokens = context.num_computed - tail * size
            copies = (BlockCopy(shared, own, num_tokens),) if num_tokens else ()
        else:
            self._make_private(context, tail)
        context.num_published = min(context.num_published, tail)
        context.owned_from = min(context.owned_from, tail)
        context.block_ids += taken
        return copies

    def must_copy(self, context: Context) -> bool:
        """Whether the block of position `num_computed` is shared and must be copied before a write.

        The only holder of a block needs no copy."""
        tail = context.num_computed // self.block_size
        if tail >= context.owned_from or tail >= len(context.block_ids):
            return False
        return self.pool.num_refs(context.block_ids[tail]) > 1

    def rewind_one(self, context: Context) -> None:
        """Drop the KV of the last token, so that its logits are computed again."""
        assert context.num_missing == 0, f"context {context.context_id} is not computed"
        context.num_computed -= 1
        tail = context.num_computed // self.block_size
        if self.pool.num_refs(context.block_ids[tail]) > 1:  # A fork may read this position.
            context.owned_from = max(context.owned_from, tail + 1)
        else:
            self._make_private(context, tail)

    def _make_private(self, context: Context, tail: int) -> None:
        """Unpublish a block that its only holder, the context, will write to."""
        self.pool.unpublish(context.block_ids[tail : tail + 1])
        context.num_published = min(context.num_published, tail)

    def truncate(self, context: Context, num_blocks: int) -> None:
        """Release all blocks after the first `num_blocks`. Full blocks are published before."""
        self.publish(context)
        self._cut(context, num_blocks)

    def drop_blocks(self, blocks: Set[int], keys: Iterable[bytes]) -> list[Context]:
        """Drop blocks with wrong KV, and all blocks after them, from all contexts.

        `keys`: the keys of the blocks, which are invalidated. Returns the contexts that lost KV."""
        self.pool.invalidate(keys)
        changed = []
        for context in self:
            held = (index for index, block in enumerate(context.block_ids) if block in blocks)
            if (first := next(held, None)) is not None:
                self._cut(context, first)
                changed.append(context)
        return changed

    def invalidate(self, context: Context) -> None:
        """Drop the context's own KV, and unpublish all of its blocks, because KV may be wrong."""
        self.pool.invalidate(context.keys)
        self._cut(context, context.owned_from)

    def _cut(self, context: Context, num_blocks: int) -> None:
        if context.window:
            self.leave(context)
        self.pool.release(context.block_ids[num_blocks:])
        del context.block_ids[num_blocks:]
        context.num_computed = min(context.num_computed, num_blocks * self.block_size)
        context.owned_from = min(context.owned_from, num_blocks)
        context.num_published = min(context.num_published, num_blocks)

    def free(self, context: Context) -> int:
        """Remove the context, and return the number of its tokens.

        Pending forks of the context must have been applied or redirected before."""
        del self._contexts[context.context_id]
        self.pending_forks.pop(context, None)
        self.publish(context)
        if self.pool.watcher is not None:
            self.pool.watcher.on_abandoned(context.keys[len(context.block_ids) :])
        if context.window:
            self.leave(context)
        self.pool.release(context.block_ids)
        context.block_ids = []
        context.num_computed = 0
        context.group.num_contexts -= 1
        self.shares.remove_if_empty(context.group)
        return len(context.token_ids)

    def check_integrity(
        self,
        held_by_others: Iterable[Sequence[int]] = (),
        on_host: Iterable[ShareGroup] = (),
        slots_held_by_others: Iterable[Sequence[int]] = (),
    ) -> None:
        """Check all counts. Raises AssertionError.

        `held_by_others`: block tables of other holders. `on_host`: the group of each slot in CPU
        memory. `slots_held_by_others`: blocks whose window slots other holders hold."""
        self.pool.check_integrity([*(context.block_ids for context in self), *held_by_others])
        owners = Counter(
            block for context in self for block in context.block_ids[context.owned_from :]
        )
        twice = [block for block, count in owners.items() if count > 1]
        assert not twice, f"blocks with more than one owner: {twice}"
        waiting = [context for context in self if context.fork is not None]
        assert waiting == list(self.pending_forks), (waiting, self.pending_forks)
        for context in self:
            assert 0 <= context.num_computed <= len(context.token_ids), context
            assert context.num_computed <= len(context.block_ids) * self.block_size, context
            assert 0 <= context.owned_from <= len(context.block_ids), context
            assert context.fork is None or not context.token_ids, context
            self._check_keys(context)
        self._check_shares(Counter(on_host))

    def _check_shares(self, on_host: Counter[ShareGroup]) -> None:
        contexts = Counter(context.group for context in self)
        blocks = self.pool.count_owners()
        groups = {*contexts, *on_host, *(group for group, _ in blocks)}
        counts = {
            group: (contexts[group], blocks[group, True], blocks[group, False] + on_host[group])
            for group in groups
        }
        self.shares.check_integrity(counts)

    def _check_keys(self, context: Context) -> None:
        assert context.num_published <= len(context.block_ids), context
        if self._hasher is None:
            return
        keys: list[bytes] = []
        num_full = len(context.token_ids) // self.block_size
        self._hasher.extend(keys, context.root, context.token_ids, num_full)
        assert context.keys == keys[: len(context.keys)], f"{context} has wrong keys"
        for index in range(context.num_computed // self.block_size):
            published = self.pool.key_of(context.block_ids[index])
            assert published in (None, keys[index]), f"block {index} of {context} has a wrong key"


class IdleContexts:
    """Contexts with KV and without jobs, in the order in which their KV is evicted.

    The next context is the least recently used one of the group that loses first."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._shares = tree.shares
        self._queue: EvictionQueue[Context] = EvictionQueue(tree.shares, num_used)
        self._failed_at: tuple[int, int, ShareGroup | None] = _NOT_FAILED

    def __contains__(self, context: Context) -> bool:
        return self._queue.has(context.group, context)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._queue)

    def add(self, context: Context) -> None:
        """Add a context that was used just now."""
        self.discard(context)
        if context.block_ids:
            self._shares.touch(context.group)
            self._queue.add(context.group, context)
            self._failed_at = _NOT_FAILED

    def discard(self, context: Context) -> None:
        self._queue.discard(context.group, context)

    def evict(self, num_free: int, requester: ShareGroup | None = None) -> bool:
        """Evict KV until `num_free` blocks are free; return whether that was possible.

        KV of unprotected groups is evicted first, then KV of `requester`."""
        pool = self._tree.pool
        if pool.num_free >= num_free:
            return True
        if self._failed_at == (pool.num_releases, self._shares.num_changes, requester):
            return False  # Nothing has changed since the last attempt failed.
        suspended: list[ShareGroup] = []
        while pool.num_free < num_free:
            group, surplus = self._queue.first_group(), None
            if group is not None and group not in suspended and not self._shares.protects(group):
                surplus = self._queue.surplus(group)
            elif requester is not None and requester not in suspended:
                group = requester
            else:
                break
            goal = num_free if surplus is None else min(num_free, pool.num_free + surplus)
            for context in drop_kv(self._tree, self._queue.of(group), goal):
                if not context.block_ids:
                    self.discard(context)
            if pool.num_free < goal:
                self._queue.suspend(group)
                suspended.append(group)
        self._queue.resume(suspended)
        if pool.num_free >= num_free:
            return True
        self._failed_at = (pool.num_releases, self._shares.num_changes, requester)
        return False

    def free_blocks_for(
        self, context: Context, later: Sequence[Context], num_blocks: int, *, is_first: bool
    ) -> tuple[set[Context], bool]:
        """Evict idle contexts and contexts of later jobs until `num_blocks` blocks are free.

        If the contexts hold too few blocks, only the block that `context` would copy before a write
        is evicted. `is_first`: the first job may also evict protected KV, so that the job never
        waits. Returns the contexts that lost KV, and whether it was enough."""
        tree = self._tree
        groups = self._queue.groups()
        protected = [g for g in groups if g is not context.group and self._shares.protects(g)]
        contexts = [c for g in groups if g not in protected for c in self._queue.of(g)]
        contexts += later
        changed = set()
        if is_first or sum(len(c.block_ids) for c in contexts) >= num_blocks - tree.pool.num_free:
            changed = drop_kv(tree, contexts, num_blocks)
        if is_first and tree.pool.num_free < num_blocks:
            contexts += [c for g in protected for c in self._queue.of(g)]
            changed |= drop_kv(tree, contexts, num_blocks)
        unshared = set()
        if tree.pool.num_free < num_blocks:
            unshared = unshare_tail(tree, context, contexts)
        return changed | unshared, bool(unshared) or tree.pool.num_free >= num_blocks


def drop_kv(tree: ContextTree, contexts: Collection[Context], num_free: int) -> set[Context]:
    """Drop KV of the contexts, in order and from the end, until `num_free` blocks are free.

    Blocks with one holder are dropped first, then blocks that only these contexts share.
    Returns the contexts that lost KV."""
    changed: set[Context] = set()
    for context in contexts:
        if (short := num_free - tree.pool.num_free) <= 0:
            return changed
        if _drop_own_tail(tree, context, short):
            changed.add(context)
    if tree.pool.num_free < num_free:
        changed.update(_drop_shared_tails(tree, contexts, num_free))
    return changed


def _drop_own_tail(tree: ContextTree, context: Context, max_blocks: int) -> bool:
    """Drop up to `max_blocks` of the context's last blocks; return whether any was dropped.

    Only blocks with one holder are dropped."""
    # Reference counts seldom rise along a block table, because sharing is by prefix. They rise if a
    # parent's blocks were replaced by published ones after it was forked.
    blocks = context.block_ids
    keep = len(blocks)
    floor = max(0, keep - max_blocks)
    while keep > floor and tree.pool.num_refs(blocks[keep - 1]) == 1:
        keep -= 1
    return _truncate_to(tree, context, keep)


def _drop_shared_tails(
    tree: ContextTree, contexts: Collection[Context], num_free: int
) -> list[Context]:
    """Drop blocks that only these contexts hold, and all later blocks, context by context.

    Stops when `num_free` blocks are free. Returns the contexts that lost KV."""
    held = Counter(block for context in contexts for block in context.block_ids)
    inside = {block for block, count in held.items() if count == tree.pool.num_refs(block)}
    changed = []
    for context in contexts:
        if tree.pool.num_free >= num_free:
            break
        own = (index for index, block in enumerate(context.block_ids) if block in inside)
        keep = next(own, len(context.block_ids))
        if _truncate_to(tree, context, keep):
            changed.append(context)
    return changed


def _truncate_to(tree: ContextTree, context: Context, num_blocks: int) -> bool:
    if num_blocks == len(context.block_ids):
        return False
    tree.truncate(context, num_blocks)
    return True


def unshare_tail(tree: ContextTree, context: Context, others: Sequence[Context]) -> set[Context]:
    """Drop the block that `context` would copy before a write from the other contexts.

    Returns the contexts that lost KV."""
    if not tree.must_copy(context):
        return set()
    tail = context.num_computed // tree.block_size
    block = context.block_ids[tail]
    sharers = {o for o in others if len(o.block_ids) > tail and o.block_ids[tail] == block}
    for other in sharers:
        tree.truncate(other, tail)
    return sharers
