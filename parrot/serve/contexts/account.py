"""One engine's contexts, and how much of its memory they take."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parrot.serve.contexts.eviction import EvictionOrder
from parrot.serve.contexts.index import Context


@dataclass(slots=True)
class Account:
    """Sizes are in tokens, rounded up to blocks. `idle`: those without users and children."""

    capacity: int
    block_size: int
    idle: EvictionOrder
    contexts: dict[int, Context] = field(default_factory=dict)
    used: int = 0

    def size(self, context: Context) -> int:
        """Tokens of the blocks that only this context and its forks have: a fork inside a block
        copies that block."""
        end = context.length + context.reserved
        return (-(-end // self.block_size) - context.parent_len // self.block_size) * (
            self.block_size
        )

    def check_integrity(self) -> None:
        """Recount. Raises AssertionError with what differs."""
        contexts = self.contexts.values()
        used = sum(map(self.size, contexts))
        assert self.used == used, (self.used, used)
        idle = {context.id for context in contexts if not context.pins and not context.children}
        assert set(self.idle.context_ids()) == idle, (self.idle, idle)
        for context in contexts:
            _check_links(context, self.contexts)


def _check_links(context: Context, live: Mapping[int, Context]) -> None:
    pinned = sum(1 for child in context.children if child.pins)
    assert context.pins == context.users + pinned, (context.id, context.pins, pinned)
    assert all(live.get(child.id) is child for child in context.children), context.id
    assert context.retired is None or context.pins or context.children, context.id
    if context.parent is not None:
        assert live.get(context.parent.id) is context.parent, context.id
        assert context in context.parent.children, context.id
