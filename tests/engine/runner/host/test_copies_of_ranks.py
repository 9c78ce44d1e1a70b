"""Two ranks copy between the tiers, each as fast as it likes: what the second one's device reads is
what the first one's did, although only the first one's host looks at what has landed."""

import random
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, cast

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from parrot.engine.core.steps import BlockCopy, SequenceStep, StepPlan, Transfer
from parrot.engine.models.spec import LayerGroup
from parrot.engine.runner.host import cuda
from parrot.engine.runner.host.cuda import CudaCopies
from parrot.engine.runner.kv_cache import KVCache, KVLayout
from parrot.engine.runner.ranks import RankCopies, Unit
from parrot.engine.runner.ranks.steps import StepReader
from tests.support.late_streams import LateStream, late_streams, on

NUM_BLOCKS, NUM_SLOTS, BLOCK_SIZE = 7, 6, 2
LAYOUT = KVLayout((LayerGroup((0,), 1, 4),), BLOCK_SIZE, torch.float32)

Contents = dict[int, float]
"""By block."""


class HeardUnit(Unit):
    """One other rank, which comes to its messages later."""

    def __init__(self, messages: "deque[Any]") -> None:
        super().__init__(cast("Any", None), [], with_tables=False)
        self._messages = messages

    def send(self, step: Any) -> None:
        self._messages.append(self._writer.message(step))


class Rank:
    """`factor`: the sign of all its numbers."""

    def __init__(self, factor: int, unit: Unit | None) -> None:
        self._factor = factor
        self._cache = KVCache(LAYOUT, NUM_BLOCKS, torch.device("cpu"), paged=True)
        self.stream = LateStream()
        tensors = self._cache.block_tensors
        copies = CudaCopies(tensors, BLOCK_SIZE, NUM_SLOTS)
        self.copies = copies if unit is None else RankCopies(copies, unit)

    def step(self, read: Contents, written: Contents) -> None:
        for block, number in read.items():
            self.stream.put(lambda block=block, number=number: self._check(block, number))
        for block, number in written.items():
            self.stream.put(lambda block=block, number=number: self._fill(block, number))

    def _check(self, block: int, number: float) -> None:
        found = self._cache.pools[0][:, :, :, block]
        assert (found == self._factor * number).all(), (block, number, self._factor, found)

    def _fill(self, block: int, number: float) -> None:
        self._cache.pools[0][:, :, :, block] = self._factor * number


class World:
    """Does whatever a core may do. `content` of blocks, `held` by slots: as all that was begun
    leaves it. Nobody uses blocks and slots that transfers under way write to, and slots that they
    read are not filled; blocks that they read may be written."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._messages: deque[Any] = deque()
        self._first, self._other = Rank(1, HeardUnit(self._messages)), Rank(-1, None)
        self._reader = StepReader()
        self._content: Contents = dict.fromkeys(range(NUM_BLOCKS), 0.0)
        self._held: Contents = {}
        self._under_way: dict[int, tuple[Transfer, list[float]]] = {}
        self._number = 0
        self.num_loaded = 0

    def run(self, num_operations: int) -> None:
        kinds = [self.step, self.transfer, self.look, self.hear, self.wait]
        for _ in range(num_operations):
            self._rng.choices(kinds, [3, 2, 2, 3, 3])[0]()
        while self._messages:
            self.hear()
        while self._under_way:
            self.look()
        self.step(range(NUM_BLOCKS), ())
        self.hear()
        while LateStream.any_goes_on():
            pass
        assert LateStream.all_are_done()

    def step(self, read: Iterable[int] | None = None, written: Iterable[int] | None = None) -> None:
        """Some blocks are read, then some are written: by tokens, or a copy."""
        free = [b for b in range(NUM_BLOCKS) if b not in self._used(to_host=False)]
        read = self._some(free, 3) if read is None else read
        written = self._some(free, 2) if written is None else written
        contents = {block: self._content[block] for block in read}
        changes = {block: self._next() for block in written}
        self._content |= changes
        blocks = list(written)
        copies = tuple(BlockCopy(0, block, 1) for block in blocks[1:])
        sequence = SequenceStep(1, [0], BLOCK_SIZE, [0, *blocks[:1]], None)
        with on(self._first.stream):
            self._first.copies.guard(StepPlan((sequence,), copies))
        self._first.step(contents, changes)
        self._messages.append((contents, changes))

    def transfer(self) -> None:
        """Both ways, what leaves first."""
        planned = []
        for to_host in (True, False):
            busy = self._used(to_host=False)
            blocks = self._some([b for b in range(NUM_BLOCKS) if b not in busy], 3)
            if to_host:
                slots = [s for s in range(NUM_SLOTS) if s not in self._slots()]
            else:
                slots = list(self._held)
            count = min(len(blocks), len(slots))
            slots, blocks = self._rng.sample(slots, count), blocks[:count]
            if count:
                planned.append(self._begun(to_host, blocks, slots))
        if planned:
            with on(self._first.stream):
                self._first.copies.transfer(planned)

    def _begun(self, to_host: bool, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        transfer = Transfer(int(self._next()), to_host, tuple(blocks), tuple(slots))
        if to_host:
            numbers = [self._content[block] for block in blocks]
            for slot in slots:
                self._held.pop(slot, None)
        else:
            numbers = [self._held[slot] for slot in slots]
        self._under_way[transfer.transfer_id] = transfer, numbers
        return transfer

    def look(self) -> None:
        with on(self._first.stream):
            landed = self._first.copies.landed(wait=self._rng.random() < 0.5)
        for report in landed:
            transfer, numbers = self._under_way.pop(report.transfer_id)
            if transfer.to_host:
                self._held.update(zip(transfer.slots, numbers, strict=True))
            else:
                self._content.update(zip(transfer.blocks, numbers, strict=True))
                self.num_loaded += len(numbers)

    def hear(self) -> None:
        """The other rank comes to a few messages."""
        for _ in range(min(self._rng.randint(1, 3), len(self._messages))):
            message = self._messages.popleft()
            if isinstance(message, tuple):
                self._other.step(*message)
            else:
                with on(self._other.stream):
                    self._other.copies.follow(self._reader.step(message).transfers)

    def wait(self) -> None:
        LateStream.change_paces()
        for _ in range(self._rng.randint(1, 12)):
            LateStream.any_goes_on()

    def _used(self, *, to_host: bool) -> set[int]:
        """The blocks of transfers in this direction."""
        under_way = [transfer for transfer, _ in self._under_way.values()]
        return {block for t in under_way if t.to_host is to_host for block in t.blocks}

    def _slots(self) -> set[int]:
        return {slot for transfer, _ in self._under_way.values() for slot in transfer.slots}

    def _some(self, among: Sequence[int], most: int) -> list[int]:
        return self._rng.sample(among, min(len(among), self._rng.randint(0, most)))

    def _next(self) -> float:
        self._number += 1
        return float(self._number)


def test_whatever_is_late_on_another_rank_is_read_and_written_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda, "_STAGED_BYTES", 2 * LAYOUT.block_bytes)
    num_loaded = 0
    for seed in range(200):
        with late_streams(seed):
            world = World(seed)
            world.run(60)
        num_loaded += world.num_loaded
    assert num_loaded > 1000
