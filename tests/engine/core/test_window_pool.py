"""The pool of window slots against a model that keeps lists."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from parrot.engine.core.shares import KvShares, ShareGroup
from parrot.engine.core.window_pool import WindowPool

BLOCKS = st.integers(0, 11)


class PoolMachine(RuleBasedStateMachine):
    """`order` has the blocks with a free slot, in the order in which their slots are reused."""

    @initialize(num_slots=st.integers(1, 8))
    def start(self, num_slots):
        shares = KvShares(12)
        self.group: ShareGroup = shares.group("")
        self.pool = WindowPool(num_slots, shares, lambda _: self.group)
        self.holds: dict[int, int] = {}
        self.passed: list[int] = []
        self.kept: list[int] = []
        self.marked: set[int] = set()
        self.at_runner: dict[int, int] = {}

    @property
    def with_slots(self):
        return {*self.holds, *self.passed, *self.kept}

    @rule(blocks=st.lists(BLOCKS, max_size=4, unique=True))
    def attach(self, blocks):
        blocks = [block for block in blocks if not self.pool.has(block)]
        if len(blocks) > self.pool.num_free:
            return
        num_blank = self.pool.num_slots - len(self.with_slots)
        before = {*self.passed, *self.kept}
        self.pool.attach(blocks)
        reused = before - {*self.pool.blocks()}
        assert len(reused) == max(0, len(blocks) - num_blank)
        # Passed slots go first. Then slots of common prefixes compete with the others.
        num_passed = min(len(reused), len(self.passed))
        assert {*self.passed[:num_passed]} <= reused
        for is_common in (False, True):
            queue = [block for block in self.kept if (block in self.marked) == is_common]
            count = len(reused.intersection(queue))
            assert {*queue[:count]} <= reused
        self.passed = [block for block in self.passed if block not in reused]
        self.kept = [block for block in self.kept if block not in reused]
        self.marked -= reused
        self.holds.update(dict.fromkeys(blocks, 1))

    @rule(block=BLOCKS)
    def hold(self, block):
        if self.pool.has(block):
            self.pool.hold((block,))
            self.passed = [other for other in self.passed if other != block]
            self.kept = [other for other in self.kept if other != block]
            self.holds[block] = self.holds.get(block, 0) + 1

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), keep=st.booleans(), goes_first=st.booleans())
    def release(self, data, keep, goes_first):
        block = data.draw(st.sampled_from(sorted(self.holds)))
        self.pool.release((block,), keep=keep, goes_first=goes_first)
        self.holds[block] -= 1
        if self.holds[block]:
            return
        del self.holds[block]
        if keep or block in self.marked:
            self.kept.insert(0 if goes_first else len(self.kept), block)
        else:
            self.passed.append(block)

    @rule(block=BLOCKS)
    def mark(self, block):
        if block in self.holds:
            self.pool.mark(block)
            self.marked.add(block)

    @rule(block=BLOCKS)
    def detach(self, block):
        if block not in self.holds:
            self.pool.detach(block)
            self.marked.discard(block)
            self.passed = [other for other in self.passed if other != block]
            self.kept = [other for other in self.kept if other != block]

    @rule(source=BLOCKS, new=BLOCKS)
    def move(self, source, new):
        if not self.pool.has(source) or self.pool.has(new):
            return
        slot = self.pool.slot_of(source)
        self.pool.move(source, new)
        assert self.pool.slot_of(new) == slot
        if source in self.holds:
            self.holds[new] = self.holds.pop(source)
        if source in self.passed:
            self.passed[self.passed.index(source)] = new
        if source in self.kept:
            self.kept.remove(source)
            self.kept.append(new)
        if source in self.marked:
            self.marked.remove(source)
            self.marked.add(new)

    @rule(is_lost=st.booleans())
    def send(self, is_lost):
        changes = dict(self.pool.take_changes())
        if is_lost:
            self.pool.resend()
            changes = dict(self.pool.take_changes())
        self.at_runner.update(changes)
        for block in self.with_slots:
            assert self.at_runner[block] == self.pool.slot_of(block)

    @invariant()
    def holds_what_the_model_holds(self):
        if not hasattr(self, "pool"):
            return
        holders = [[b] for b, count in self.holds.items() for _ in range(count)]
        self.pool.check_integrity(holders)
        assert set(self.pool.blocks()) == self.with_slots
        assert self.pool.num_free == self.pool.num_slots - len(self.holds)


TestWindowPool = PoolMachine.TestCase
