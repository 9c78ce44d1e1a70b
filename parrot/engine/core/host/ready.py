"""The free blocks of a GPU whose KV is also copied to CPU memory."""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from itertools import islice, takewhile

from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, num_resident


class ReadyQueue(EvictionQueue[int]):
    """Free blocks with a key. Ready blocks, which have a copy in CPU memory, are evicted first."""

    def __init__(self, shares: KvShares, owner: Callable[[int], ShareGroup]) -> None:
        super().__init__(shares, num_resident)
        self._owner = owner
        self._ready: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._ready) + super().__len__()

    def __iter__(self) -> Iterator[int]:
        yield from self._ready
        yield from super().__iter__()

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    def is_ready(self, block: int) -> bool:
        return block in self._ready

    def discard(self, group: ShareGroup, item: int) -> None:
        self._ready.pop(item, None)
        super().discard(group, item)

    def first_run(self, most: int) -> Sequence[int]:
        if not self._ready:
            return super().first_run(most)
        group = self._owner(next(iter(self._ready)))
        return list(takewhile(lambda block: self._owner(block) is group, islice(self._ready, most)))

    def discard_run(self, group: ShareGroup, items: Sequence[int]) -> None:
        if items[0] not in self._ready:
            super().discard_run(group, items)
            return
        for block in items:
            del self._ready[block]

    def make_ready(self, block: int) -> None:
        """Evict the block after the blocks that are ready now."""
        super().discard(self._owner(block), block)
        self._ready[block] = None

    def check_integrity(self) -> None:
        super().check_integrity()
        assert not any(self.has(self._owner(block), block) for block in self._ready), self._ready
