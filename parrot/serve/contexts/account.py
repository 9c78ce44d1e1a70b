"""The ledger's account of one engine: its contexts, and what they take."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from parrot.serve.contexts.index import Context
from parrot.serve.contexts.kept import Kept
from parrot.serve.contexts.residence import Residence
from parrot.serve.contexts.shares import IdleByTenant


@dataclass(slots=True)
class Account:
    """Sizes are in tokens, rounded up to blocks. `idle`: those without users and children.
    `capacity` counts the `host`'s, too; `residence` None: there is no host tier; `kept` None: the
    engine keeps what the ledger says, with no server behind it that does as it likes."""

    capacity: int
    block_size: int
    idle: IdleByTenant
    contexts: dict[int, Context] = field(default_factory=dict)
    used: int = 0
    residence: Residence | None = None
    kept: Kept | None = None
    host: int = 0

    def resize(self, on_device: int) -> None:
        """The device holds so many tokens from now on."""
        self.capacity = self.idle.capacity = on_device + self.host
        if self.residence is not None:
            self.residence.resize(on_device)

    def use(self, context: Context) -> None:
        """A run has it on the device."""
        if self.residence is not None:
            self.residence.use(context)
        if self.kept is not None:
            self.kept.use(context)

    def trim(self) -> None:
        if self.kept is not None:
            self.kept.trim()

    def size(self, context: Context) -> int:
        """Tokens of the blocks that only this context and its forks have: a fork inside a block
        copies that block."""
        end = context.length + context.reserved
        num_blocks = -(-end // self.block_size) - context.parent_len // self.block_size
        return num_blocks * self.block_size

    def check_integrity(self) -> None:
        """Recount. Raises AssertionError with what differs."""
        contexts = self.contexts.values()
        used = sum(map(self.size, contexts))
        assert self.used == used, (self.used, used)
        idle = {context.id for context in contexts if not context.pins and not context.children}
        assert set(self.idle.context_ids()) == idle, (self.idle, idle)
        self.idle.check_integrity({context: self.size(context) for context in contexts})
        for context in contexts:
            _check_links(context, self.contexts)
        if self.residence is not None:
            self.residence.check_integrity()
        if self.kept is not None:
            self.kept.check_integrity(contexts)


def _check_links(context: Context, live: Mapping[int, Context]) -> None:
    pinned = sum(1 for child in context.children if child.pins)
    assert context.pins == context.users + pinned, (context.id, context.pins, pinned)
    assert all(live.get(child.id) is child for child in context.children), context.id
    assert context.retired is None or context.pins or context.children, context.id
    if context.parent is not None:
        assert live.get(context.parent.id) is context.parent, context.id
        assert context in context.parent.children, context.id
