"""Who uses which block of the KV cache. Only this module touches block reference counts."""

from collections import Counter
from collections.abc import Iterable, Sequence


class BlockPool:
    """Blocks 0..num_blocks-1 of `block_size` token slots each, counted by reference.

    A block is free, or held by as many contexts as its count says. The block freed last is
    handed out first, while it may still be warm in a cache."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._refs = [0] * num_blocks
        self.num_releases = 0

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def num_refs(self, block: int) -> int:
        return self._refs[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take blocks, each with one reference; None (and nothing taken) when there is no room."""
        if num_blocks > len(self._free):
            return None
        if num_blocks == 0:
            return []
        taken = self._free[-num_blocks:]
        del self._free[-num_blocks:]
        for block in taken:
            self._refs[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference on each block; all must be in use."""
        refs = self._refs
        for block in blocks:
            assert refs[block] > 0, f"block {block} is free and cannot be shared"
            refs[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less on each block; at zero it is free. Later blocks are freed first."""
        refs = self._refs
        self.num_releases += len(blocks)
        for block in reversed(blocks):
            assert refs[block] > 0, f"block {block} is already free"
            refs[block] -= 1
            if refs[block] == 0:
                self._free.append(block)

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Recount the references from the block tables of all holders."""
        counted: Counter[int] = Counter()
        for blocks in holders:
            assert len(set(blocks)) == len(blocks), f"a table holds a block twice: {blocks}"
            counted.update(blocks)
        for block, refs in enumerate(self._refs):
            assert refs == counted[block], f"block {block}: {refs} refs, {counted[block]} holders"
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert free == {block for block, refs in enumerate(self._refs) if refs == 0}
