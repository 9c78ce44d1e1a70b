"""How much KV the sequences of a step have between them."""

from collections import Counter
from collections.abc import Sequence

from parrot.engine.core.plan import SequenceStep


class UniqueKv:
    """Counts tokens of KV, those in shared blocks once. From step to step only what changed is
    counted again: while the same sequences decode, that is next to nothing."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._refs: Counter[int] = Counter()
        self._tables: dict[int, Sequence[int]] = {}  # by context id

    def count(self, sequences: Sequence[SequenceStep]) -> int:
        """Tokens that the attention of this step reads. Only the last block of a sequence may be
        partly filled, and nobody shares a block that is being written."""
        tables = {s.context_id: s.block_ids for s in sequences}
        for context_id in self._tables.keys() - tables.keys():
            self._drop(self._tables.pop(context_id), 0)
        for context_id, table in tables.items():
            self._update(context_id, table)
        size = self._block_size
        unfilled = sum(len(s.block_ids) * size - s.end for s in sequences)
        return len(self._refs) * size - unfilled

    def _update(self, context_id: int, table: Sequence[int]) -> None:
        known = self._tables.get(context_id, table[:0])
        if table == known:
            return
        self._tables[context_id] = table
        same = len(known)
        if table[:same] != known:  # it gave blocks away, or copied one to write to it
            pairs = enumerate(zip(known, table, strict=False))
            same = next((n for n, (old, new) in pairs if old != new), len(table))
            self._drop(known, same)
        for block in table[same:]:
            self._refs[block] += 1

    def _drop(self, table: Sequence[int], first: int) -> None:
        for block in table[first:]:
            self._refs[block] -= 1
            if not self._refs[block]:
                del self._refs[block]
