"""Making room in the KV pool: whose KV is dropped, and in which order."""

from collections.abc import Iterator, Sequence

from parrot.engine.core.contexts import Context, ContextTree


class IdleContexts:
    """Contexts that hold KV and have no job, least recently used first. Their KV is a cache: any
    of it may be dropped."""

    def __init__(self, tree: ContextTree) -> None:
        self._tree = tree
        self._contexts: dict[Context, None] = {}
        self._exhausted_at = -1

    def __contains__(self, context: Context) -> bool:
        return context in self._contexts

    def __iter__(self) -> Iterator[Context]:
        return iter(self._contexts)

    def add(self, context: Context) -> None:
        """`context` has just been used."""
        self._contexts.pop(context, None)
        if context.block_ids:
            self._contexts[context] = None
            self._exhausted_at = -1

    def discard(self, context: Context) -> None:
        self._contexts.pop(context, None)

    def evict(self, num_free: int) -> bool:
        """Drop KV until `num_free` blocks are free; False if that cannot be reached so."""
        if self._tree.num_free_blocks >= num_free:
            return True
        if self._exhausted_at == self._tree.num_releases:
            return False  # nothing was released or became idle since the last vain attempt
        changed = drop_kv(self._tree, list(self._contexts), num_free)
        for context in changed:
            if not context.block_ids:
                self.discard(context)
        if self._tree.num_free_blocks >= num_free:
            return True
        self._exhausted_at = self._tree.num_releases
        return False


def drop_kv(tree: ContextTree, contexts: Sequence[Context], num_free: int) -> set[Context]:
    """Drop KV of these contexts, in order and from their ends, until `num_free` blocks are free.
    First blocks that one context holds alone, then those that only these contexts share. Returns
    the contexts that lost KV."""
    changed: set[Context] = set()
    for context in contexts:
        if (short := num_free - tree.num_free_blocks) <= 0:
            return changed
        if tree.free_tail(context, short):
            changed.add(context)
    if tree.num_free_blocks < num_free:
        changed.update(tree.free_shared_tails(contexts, num_free))
    return changed
