"""Two ranks copy KV between GPU memory and CPU memory, each at its own pace. The second rank's
device must read the same contents as the first rank's device, although only the first rank's
process checks which transfers have finished."""

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
"""The number in each block or slot."""


class DelayedUnit(Unit):
    """A unit with one other rank, which reads its messages later."""

    def __init__(self, messages: "deque[Any]") -> None:
        super().__init__(cast("Any", None), [], with_tables=False)
        self._messages = messages

    def send(self, step: Any) -> None:
        self._messages.append(self._writer.message(step))


class Rank:
    """A rank's KV cache and copies. `factor` is the sign of all its numbers, so that the two ranks
    differ."""

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
    """Random steps and transfers, within the limits of a core.

    Steps and transfers do not use blocks and slots that a running transfer writes. Slots that a
    running transfer reads are not written."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._messages: deque[Any] = deque()
        self._first, self._other = Rank(1, DelayedUnit(self._messages)), Rank(-1, None)
        self._reader = StepReader()
        # The numbers in blocks and in host slots after all running transfers.
        self._content: Contents = dict.fromkeys(range(NUM_BLOCKS), 0.0)
        self._host_content: Contents = {}
        self._running: dict[int, tuple[Transfer, list[float]]] = {}
        self._number = 0
        self.num_loaded = 0

    def run(self, num_operations: int) -> None:
        kinds = [self.step, self.transfer, self.poll, self.deliver, self.wait]
        for _ in range(num_operations):
            self._rng.choices(kinds, [3, 2, 2, 3, 3])[0]()
        while self._messages:
            self.deliver()
        while self._running:
            self.poll()
        self.step(range(NUM_BLOCKS), ())
        self.deliver()
        while LateStream.run_any():
            pass
        assert LateStream.all_done()

    def step(self, read: Iterable[int] | None = None, written: Iterable[int] | None = None) -> None:
        """Some blocks are read, then some are written, by tokens or by a copy."""
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
        """Start transfers in both directions, those to the host first."""
        planned = []
        for to_host in (True, False):
            busy = self._used(to_host=False)
            blocks = self._some([b for b in range(NUM_BLOCKS) if b not in busy], 3)
            if to_host:
                slots = [s for s in range(NUM_SLOTS) if s not in self._slots()]
            else:
                slots = list(self._host_content)
            count = min(len(blocks), len(slots))
            slots, blocks = self._rng.sample(slots, count), blocks[:count]
            if count:
                planned.append(self._start(to_host, blocks, slots))
        if planned:
            with on(self._first.stream):
                self._first.copies.transfer(planned)

    def _start(self, to_host: bool, blocks: Sequence[int], slots: Sequence[int]) -> Transfer:
        transfer = Transfer(int(self._next()), to_host, tuple(blocks), tuple(slots))
        if to_host:
            numbers = [self._content[block] for block in blocks]
            for slot in slots:
                self._host_content.pop(slot, None)
        else:
            numbers = [self._host_content[slot] for slot in slots]
        self._running[transfer.transfer_id] = transfer, numbers
        return transfer

    def poll(self) -> None:
        with on(self._first.stream):
            landed = self._first.copies.landed(wait=self._rng.random() < 0.5)
        for report in landed:
            transfer, numbers = self._running.pop(report.transfer_id)
            if transfer.to_host:
                self._host_content.update(zip(transfer.slots, numbers, strict=True))
            else:
                self._content.update(zip(transfer.blocks, numbers, strict=True))
                self.num_loaded += len(numbers)

    def deliver(self) -> None:
        """The other rank reads 1 to 3 messages."""
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
            LateStream.run_any()

    def _used(self, *, to_host: bool) -> set[int]:
        """The blocks of transfers in this direction."""
        running = [transfer for transfer, _ in self._running.values()]
        return {block for t in running if t.to_host is to_host for block in t.blocks}

    def _slots(self) -> set[int]:
        return {slot for transfer, _ in self._running.values() for slot in transfer.slots}

    def _some(self, among: Sequence[int], most: int) -> list[int]:
        return self._rng.sample(among, min(len(among), self._rng.randint(0, most)))

    def _next(self) -> float:
        self._number += 1
        return float(self._number)


def test_a_late_rank_reads_and_writes_blocks_in_order(
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
