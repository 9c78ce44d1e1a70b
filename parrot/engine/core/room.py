"""Making room in the KV pool: whose KV is dropped, and in which order."""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence

from parrot.engine.core.contexts import Context, ContextTree
from parrot.engine.core.fair.kv_shares import FairLine, ShareGroup, num_used

_NEVER = (-1, -1, None)


class IdleContexts:
    """Contexts that hold KV and have no job; of the group whose turn it is, the least recently used
    first. Their KV is a cache: any of it may be dropped."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._shares = tree.shares
        self._line: FairLine[Context] = FairLine(tree.shares, num_used)
        self._exhausted_at: tuple[int, int, ShareGroup | None] = _NEVER

    def __contains__(self, context: Context) -> bool:
        return self._line.has(context.group, context)

    def __iter__(self) -> Iterator[Context]:
        return iter(self._line)

    def add(self, context: Context) -> None:
        """`context` has just been used."""
        self.discard(context)
        if context.block_ids:
            self._shares.touch(context.group)
            self._line.add(context.group, context)
            self._exhausted_at = _NEVER

    def discard(self, context: Context) -> None:
        self._line.discard(context.group, context)

    def evict(self, num_free: int, asking: ShareGroup | None = None) -> bool:
        """Drop KV of groups that are not protected, and then of the one that asks, until `num_free`
        blocks are free; False if that cannot be reached so."""
        pool = self._tree.pool
        if pool.num_free >= num_free:
            return True
        if self._exhausted_at == (pool.num_releases, self._shares.num_changes, asking):
            return False  # nothing else may be dropped than at the last vain attempt
        spent: list[ShareGroup] = []
        while pool.num_free < num_free:
            group, surplus = self._line.first_group(), None
            if group is not None and not self._shares.protects(group):
                surplus = self._line.surplus(group)
            elif asking is not None and asking not in spent:
                group = asking
            else:
                break
            goal = num_free if surplus is None else min(num_free, pool.num_free + surplus)
            for context in drop_kv(self._tree, self._line.of(group), goal):
                if not context.block_ids:
                    self.discard(context)
            if pool.num_free < goal:
                self._line.pass_over(group)
                spent.append(group)
        self._line.restore(spent)
        if pool.num_free >= num_free:
            return True
        self._exhausted_at = (pool.num_releases, self._shares.num_changes, asking)
        return False

    def make_room(
        self, context: Context, later: Sequence[Context], num_blocks: int, *, is_first: bool
    ) -> tuple[set[Context], bool]:
        """Drop KV of the contexts of later jobs, too, till `num_blocks` blocks are free, or till
        `context` need not copy the block it writes to; nothing if all they hold is too little. If
        its job `is_first`, nobody is protected from it: else it might wait for ever. Returns the
        contexts that lost KV, and whether there is room."""
        tree = self._tree
        groups = self._line.groups()
        spared = [g for g in groups if g is not context.group and self._shares.protects(g)]
        contexts = [c for g in groups if g not in spared for c in self._line.of(g)]
        contexts += later
        changed = set()
        if is_first or sum(len(c.block_ids) for c in contexts) >= num_blocks - tree.pool.num_free:
            changed = drop_kv(tree, contexts, num_blocks)
        if is_first and tree.pool.num_free < num_blocks:
            contexts += [c for g in spared for c in self._line.of(g)]
            changed |= drop_kv(tree, contexts, num_blocks)
        unshared = set()
        if tree.pool.num_free < num_blocks:
            unshared = unshare_tail(tree, context, contexts)
        return changed | unshared, bool(unshared) or tree.pool.num_free >= num_blocks


def drop_kv(tree: ContextTree, contexts: Collection[Context], num_free: int) -> set[Context]:
    """Drop KV of these contexts, in order and from their ends, until `num_free` blocks are free.
    First blocks that one context holds alone, then those that only these contexts share. Returns
    the contexts that lost KV."""
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
    """Drop up to `max_blocks` of the last blocks that nobody shares; returns whether there are any.

    Sharing is by prefix, so reference counts seldom rise along a block table: where a fork was made
    before its parent's blocks were published, which then gave way to equal ones of others."""
    blocks = context.block_ids
    keep = len(blocks)
    floor = max(0, keep - max_blocks)
    while keep > floor and tree.pool.num_refs(blocks[keep - 1]) == 1:
        keep -= 1
    return _keep(tree, context, keep)


def _drop_shared_tails(
    tree: ContextTree, contexts: Collection[Context], num_free: int
) -> list[Context]:
    """Drop, context by context, the blocks that only these contexts hold, and what comes after
    them, until `num_free` blocks are free. Returns the contexts that lost KV."""
    held = Counter(block for context in contexts for block in context.block_ids)
    inside = {block for block, count in held.items() if count == tree.pool.num_refs(block)}
    changed = []
    for context in contexts:
        if tree.pool.num_free >= num_free:
            break
        own = (index for index, block in enumerate(context.block_ids) if block in inside)
        keep = next(own, len(context.block_ids))
        if _keep(tree, context, keep):
            changed.append(context)
    return changed


def _keep(tree: ContextTree, context: Context, num_blocks: int) -> bool:
    if num_blocks == len(context.block_ids):
        return False
    tree.truncate(context, num_blocks)
    return True


def unshare_tail(tree: ContextTree, context: Context, others: Sequence[Context]) -> set[Context]:
    """Make these other contexts drop the block that `context` would have to copy before it writes.
    Returns those that did."""
    if not tree.must_copy(context):
        return set()
    tail = context.num_computed // tree.block_size
    block = context.block_ids[tail]
    sharers = {o for o in others if len(o.block_ids) > tail and o.block_ids[tail] == block}
    for other in sharers:
        tree.truncate(other, tail)
    return sharers
