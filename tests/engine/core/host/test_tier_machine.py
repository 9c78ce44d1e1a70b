"""Random programs against the core with a host tier.

Copies land late or fail, and requests end while their KV is loading. Each step must read the KV of
its own context."""

import random
from array import array
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from parrot.engine.core.jobs import Piece
from parrot.protocol.sampling import SamplingConfig
from tests.engine.core.test_engine_core_machine import (
    EngineMachine,
    after_last_token,
    as_test,
    one_of,
)
from tests.support.tiered_runner import TieredLaunchingRunner, TieredRunner


class TieredMachine(EngineMachine):
    runner_type: ClassVar = TieredRunner
    num_host_blocks: ClassVar = 9

    @initialize(seed=st.integers(0, 99), max_polls=st.sampled_from([0, 1, 6]))
    def set_slowness(self, seed, max_polls):
        self.slowness = (seed, max_polls)

    @precondition(lambda self: self.runner.max_polls == 0)
    @rule(fail_every=st.sampled_from([None, None, 1, 3]))
    def configure(self, fail_every):
        self.runner.rng = random.Random(self.slowness[0])
        self.runner.max_polls = self.slowness[1]
        self.runner.fail_every = fail_every

    @rule(num=st.integers(1, 6))
    def drop_idle_kv(self, num):
        """Evict KV as if other requests needed the blocks."""
        self.core._scheduler.idle.evict(num)

    def teardown(self):
        super().teardown()
        if hasattr(self, "core") and self.core.host is not None:
            while self.step():
                pass
            assert not self.runner.flights
            assert not self.core.host.tier.has_work


class OverlappingTieredMachine(TieredMachine):
    runner_type: ClassVar = TieredLaunchingRunner


class FaultyTieredMachine(TieredMachine):
    faults: ClassVar = {"crash_token": 99, "nan_token": 98}


class FaultyOverlappingTieredMachine(FaultyTieredMachine):
    runner_type: ClassVar = TieredLaunchingRunner


class SmallTierMachine(OverlappingTieredMachine):
    """CPU memory with very few slots."""

    num_host_blocks: ClassVar = 1


class DraftingTieredMachine(OverlappingTieredMachine):
    """Steps verify drafts of contexts whose KV is evicted and loaded."""

    model: ClassVar = staticmethod(after_last_token)
    takes_drafts: ClassVar = True

    @precondition(lambda self: self.usable)
    @rule(data=st.data(), num_steps=st.integers(0, 20), num_evicted=st.sampled_from([0, 2, 99]))
    def continue_session(self, data, num_steps, num_evicted):
        """Continue an earlier session, whose KV may be in CPU memory by then."""
        parent = one_of(data, self.usable)
        for _ in range(num_steps):
            self.step()
        self.core._scheduler.idle.evict(num_evicted)
        drafts = self.draw_drafts(data, [97])
        turn = Piece(self.new_context(), array("i", [97]), parent)
        self.submit([turn], SamplingConfig(max_gen_length=14), drafts=drafts)


class WindowedTieredMachine(TieredMachine):
    """Windows are evicted from the GPU and loaded again, with and without their blocks."""

    has_windows: ClassVar = True
    num_host_blocks: ClassVar = 12


class OverlappingWindowedTieredMachine(WindowedTieredMachine):
    runner_type: ClassVar = TieredLaunchingRunner


class DraftingWindowedTieredMachine(DraftingTieredMachine):
    has_windows: ClassVar = True


class FaultyDraftingTieredMachine(DraftingTieredMachine):
    """The bad letters are rare in outputs, so they occur mostly in drafts."""

    faults: ClassVar = {"crash_token": 120, "nan_token": 121}


class FaultyDraftingWindowedTieredMachine(FaultyDraftingTieredMachine):
    has_windows: ClassVar = True


TestTieredMachine = as_test(TieredMachine, 50)
TestOverlappingTieredMachine = as_test(OverlappingTieredMachine, 50)
TestFaultyTieredMachine = as_test(FaultyTieredMachine, 50)
TestFaultyOverlappingTieredMachine = as_test(FaultyOverlappingTieredMachine, 50)
TestSmallTierMachine = as_test(SmallTierMachine, 50)
TestDraftingTieredMachine = as_test(DraftingTieredMachine, 50)
TestFaultyDraftingTieredMachine = as_test(FaultyDraftingTieredMachine, 50)
TestWindowedTieredMachine = as_test(WindowedTieredMachine, 50)
TestOverlappingWindowedTieredMachine = as_test(OverlappingWindowedTieredMachine, 50)
TestDraftingWindowedTieredMachine = as_test(DraftingWindowedTieredMachine, 50)
TestFaultyDraftingWindowedTieredMachine = as_test(FaultyDraftingWindowedTieredMachine, 50)
