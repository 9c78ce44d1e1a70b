"""The order of eviction between tenants: no tenant within its share loses KV to another."""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.engine.core.block_pool import BlockPool
from parrot.engine.core.contexts import Context
from parrot.engine.core.shares import EvictionQueue, KvShares, ShareGroup, TenantShare, num_used
from parrot.protocol.engine_api import NO_PARENT
from parrot.protocol.sampling import SamplingConfig
from parrot.utils.weighted_shares import LossOrder
from tests.engine.core.host.test_tier import Tiered
from tests.support.core_harness import Harness, piece
from tests.support.manual_clock import ManualClock

AWAY_S = 121.0
EIGHT = SamplingConfig(max_gen_length=8)


def fill(engine: Harness, number: int, salt: str, num_blocks: int = 1, weight: float = 1.0) -> int:
    """Fill a context of its own. Returns the number of cached tokens."""
    text = f"{number:03d}{salt[0]}" * num_blocks
    answer = engine.fill(
        piece(number, text), cache_salt=salt, share=TenantShare(f"tenant {salt}", weight)
    )
    engine.run()
    return answer.response.cached_tokens


def kept(engine: Harness, *numbers: int) -> list[int]:
    """The contexts that still have all their KV."""
    contexts = [engine.context(number) for number in numbers]
    return [c.context_id for c in contexts if c is not None and not c.num_missing]


def test_idle_contexts_of_a_crowd_are_evicted_before_an_older_one_of_another_tenant():
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet", 2)
    for number in range(10, 30):
        fill(engine, number, "crowd")
    assert kept(engine, 1) == [1]
    assert kept(engine, *range(10, 30)) == list(range(24, 30))  # The oldest were evicted.


def test_with_one_group_the_oldest_context_is_evicted():
    engine = Harness(num_blocks=8)
    fill(engine, 1, "crowd", 2)
    for number in range(10, 18):
        fill(engine, number, "crowd")
    assert kept(engine, 1) == []
    assert kept(engine, *range(10, 18)) == list(range(10, 18))


def test_running_calls_of_a_crowd_do_not_evict_a_tenant_within_its_share():
    """All contexts of the crowd are in use, so its later calls wait."""
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet", 2)
    crowd = [
        engine.submit(piece(n, f"{n}"), sampling=EIGHT, cache_salt="crowd") for n in range(10, 20)
    ]
    engine.run()
    assert all(answer.response is not None for answer in crowd)
    assert kept(engine, 1) == [1]


def test_idle_contexts_of_many_tenants_are_evicted_so_that_calls_run_together():
    engine = Harness(num_blocks=16)
    for number in range(8):
        fill(engine, number, f"{number}", 2)
    for number in range(10, 14):
        engine.generate(piece(number, f"{number}abcd"), length=2)
    engine.step()
    assert len(engine.last_plan.sequences) == 4


def test_the_first_call_evicts_protected_kv():
    """There is no other job to preempt."""
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet", 2)
    fill(engine, 2, "crowd", 8)
    assert kept(engine, 1, 2) == [2]


def test_a_call_that_must_wait_evicts_no_kv_of_later_calls():
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet", 2)
    engine.generate(piece(10, "ab"), length=12, priority=1)  # The first job.
    later = engine.generate(piece(11, "abcdef"), length=6, priority=3)
    engine.step()
    engine.step()
    waiting = engine.fill(piece(12, "ghijklmnopqrstuvwxyz0123"), priority=2)
    for _ in range(4):
        engine.step()
    assert kept(engine, 1) == [1]
    assert later.response is not None
    assert waiting.response is None
    engine.run()
    assert waiting.response is not None


def test_a_call_may_evict_kv_of_its_own_group():
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet", 2)
    engine.generate(piece(10, "abcdefghijklmnopqrst"), length=4)  # The first job.
    engine.step()
    fill(engine, 2, "quiet", 2)
    assert kept(engine, 1, 2) == [2]


def test_weights_divide_the_memory():
    engine = Harness(num_blocks=12)
    for number in range(40):
        fill(engine, number, "large", weight=3.0)
        fill(engine, 100 + number, "small")
    assert len(kept(engine, *range(40))) in (8, 9)
    assert len(kept(engine, *range(100, 140))) in (3, 4)


def test_the_weights_of_a_group_s_tenants_add_up():
    shares = KvShares(10)
    ours, other = shares.group("ours"), shares.group("other")
    for tenant in ("a", "b", "a"):
        shares.record_request(ours, tenant, 2.0)
    shares.record_request(other, "c", 1.0)
    assert (ours.weight, other.weight, shares.protected_per_weight) == (4.0, 1.0, 1.0)


def test_a_tenant_s_new_weight_replaces_the_old_one():
    engine = Harness(num_blocks=12)
    fill(engine, 200, "large")
    for number in range(40):
        fill(engine, number, "large", weight=3.0)
        fill(engine, 100 + number, "small")
    assert len(kept(engine, *range(40))) in (8, 9)


def test_a_group_that_returns_has_the_weights_of_its_present_tenants():
    clock = ManualClock()
    shares = KvShares(12, clock)
    ours, other = shares.group("ours"), shares.group("other")
    shares.record_request(ours, "a", 3.0)
    clock.pass_time(AWAY_S)
    shares.record_request(other, "c", 1.0)
    assert not shares.protects(ours)  # The group is inactive now.
    shares.record_request(ours, "b", 1.0)
    assert (ours.weight, shares.protected_per_weight) == (1.0, 3.0)


def test_the_protected_share_depends_on_the_weight():
    shares = KvShares(16)
    large, small = shares.group("large"), shares.group("small")
    shares.record_request(large, "a", 3.0)
    shares.record_request(small, "b", 1.0)
    large.num_used, small.num_used = 6, 2
    assert [shares.protects(large), shares.protects(small)] == [True, True]
    large.num_used, small.num_used = 7, 3
    assert [shares.protects(large), shares.protects(small)] == [False, False]


def test_kv_of_inactive_groups_is_evicted_first():
    engine = Harness(num_blocks=8)
    fill(engine, 1, "quiet")
    engine.clock.pass_time(AWAY_S)
    for number in range(10, 18):
        fill(engine, number, "crowd")
    assert kept(engine, 1) == []
    fill(engine, 1, "quiet")  # The group has its share again as soon as it is active.
    for number in range(20, 30):
        fill(engine, number, "crowd")
    assert kept(engine, 1) == [1]


def test_a_group_stays_protected_after_its_call_ends():
    """The 120 s begin when a call ends, because the next turn comes after that."""
    engine = Harness(num_blocks=8)
    chat = engine.submit(piece(1, "ab"), sampling=EIGHT, cache_salt="quiet")
    engine.step()
    engine.clock.pass_time(AWAY_S)  # The call has a long output.
    engine.run()
    assert chat.response is not None
    engine.clock.pass_time(AWAY_S - 2.0)
    blocks = list(engine.context(1).block_ids)
    for number in range(10, 30):
        fill(engine, number, "crowd")
    assert engine.context(1).block_ids == blocks
    engine.clock.pass_time(2.0)
    for number in range(30, 50):
        fill(engine, number, "crowd")
    assert engine.context(1).block_ids == []


def test_freed_blocks_are_evicted_by_group():
    engine = Harness(num_blocks=8)
    for number, salt in ((1, "quiet"), *((n, "crowd") for n in range(10, 16))):
        fill(engine, number, salt)
        engine.free(number)
    for number in range(20, 26):
        fill(engine, number, "crowd")
        engine.free(number)
    assert fill(engine, 1, "quiet", 2) == 4


def test_a_public_prefix_is_evicted_by_its_last_use():
    engine = Harness(num_blocks=8)
    engine.fill(piece(1, "publicpr", public=8), cache_salt="crowd")
    engine.run()
    engine.free(1)
    for number in range(10, 30):
        fill(engine, number, "crowd")
        engine.free(number)
        if number % 2:
            answer = engine.fill(piece(2, "publicprefix", public=8), cache_salt="quiet")
            engine.run()
            assert answer.response.cached_tokens >= 8
            engine.free(2)


def test_cpu_memory_has_a_share_for_each_group():
    engine = Tiered(num_blocks=4, num_host_blocks=8)
    fill(engine, 1, "quiet", 2)
    engine.free(1)
    for number in range(10, 40):
        fill(engine, number, "crowd", 2)
        engine.free(number)
    assert fill(engine, 2, "quiet") == 0
    again = engine.fill(piece(3, "001q001qx"), cache_salt="quiet")
    engine.run()
    assert again.response.cached_tokens == 8


def test_groups_without_contexts_and_kv_are_removed():
    engine = Harness(num_blocks=8)
    for number in range(200):
        fill(engine, number, f"salt {number}")
        engine.free(number)
    assert len(engine.core._tree.shares._groups) <= 8
    engine.embed("")  # The request is rejected.
    engine.run()
    engine.core.check_integrity()


class Losses:
    """Checks that evicted blocks belong to a group that holds the most by weight."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.num_given_away = 0

    def evicted(self, block: int) -> None:
        held: Counter[ShareGroup] = Counter()
        for (group, _), number in self.pool.count_owners().items():
            held[group] += number
        with_free = {g for (g, in_use), n in self.pool.count_owners().items() if n and not in_use}
        most = max(Fraction(held[g]) / Fraction(g.weight) for g in with_free)
        loser = self.pool.owner(block)
        assert Fraction(held[loser]) / Fraction(loser.weight) == most
        self.num_given_away += 1

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.5, 2.0**-19, 2.0**29]), min_size=1, max_size=4),
    steps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5)), max_size=60),
)
def test_cached_blocks_are_evicted_by_weight(weights, steps):
    pool = BlockPool(12, 4, KvShares(12, ManualClock()))
    pool.watcher = Losses(pool)
    groups = [pool.shares.group(f"{n}") for n in range(len(weights))]
    for group, weight in zip(groups, weights, strict=True):
        group.num_contexts = 1
        pool.shares.record_request(group, "", weight)
    tables: list[list[int]] = []
    for number, (turn, size) in enumerate(steps):
        if tables and turn == 3:
            pool.release(tables.pop(size % len(tables)))
        elif (blocks := pool.allocate(size, groups[turn % len(groups)])) is not None:
            for index, block in enumerate(blocks[: size - 1]):
                pool.publish(block, bytes([number, index]))
            tables.append(blocks)
        pool.check_integrity(tables)
        counts = pool.count_owners()
        pool.shares.check_integrity({g: (1, counts[g, True], counts[g, False]) for g in groups})


@dataclass
class Call:
    group: int
    num_blocks: int
    output: int
    fork: int | None
    steps: int
    frees: bool
    seconds: float


calls = st.builds(
    Call,
    group=st.integers(0, 2),
    num_blocks=st.integers(1, 4),
    output=st.integers(0, 9),
    fork=st.none() | st.integers(0, 3),
    steps=st.integers(0, 8),
    frees=st.booleans(),
    seconds=st.sampled_from([0.0, 0.0, 1.0, 70.0]),
)


class EvictionCheck:
    """Checks that protected groups lose KV only to their own jobs, or to the first of all jobs."""

    def __init__(self, engine: Harness) -> None:
        self.idle = engine.core._scheduler.idle
        self.shares, self.pool = engine.core._tree.shares, engine.core._tree.pool
        self.evict, self.free_blocks_for = self.idle.evict, self.idle.free_blocks_for
        self.idle.evict = self._evict  # type: ignore[method-assign]
        self.idle.free_blocks_for = self._free_blocks_for  # type: ignore[method-assign]
        self.num_spared = 0

    def _protected(self) -> dict[Context, int]:
        return {c: len(c.block_ids) for c in self.idle if self.shares.protects(c.group)}

    def _check(self, before: dict[Context, int]) -> None:
        assert {c: len(c.block_ids) for c in before} == before
        self.num_spared += len(before)

    def _evict(self, num_free: int, requester: ShareGroup | None = None) -> bool:
        before = {c: n for c, n in self._protected().items() if c.group is not requester}
        used = {c.group: c.group.num_used for c in self.idle}
        has_room = self.evict(num_free, requester)
        self._check(before)
        lost = {g: number - g.num_used for g, number in used.items() if g is not requester}
        for loser in (group for group, number in lost.items() if number and not group.is_away):
            others = [c for c in self.idle if not c.group.is_away and lost.get(c.group) == 0]
            for group in {c.group for c in others if self.pool.num_refs(c.block_ids[-1]) == 1}:
                assert group.num_used / group.weight <= (loser.num_used + 1) / loser.weight + 1e-9
        return has_room

    def _free_blocks_for(self, context, later, num_blocks, *, is_first):
        before = {} if is_first else self._protected()
        others = {c: number for c, number in before.items() if c.group is not context.group}
        answer = self.free_blocks_for(context, later, num_blocks, is_first=is_first)
        self._check(others)
        return answer


@settings(max_examples=60)
@given(
    weights=st.lists(st.sampled_from([1.0, 2.0, 0.5, 2.0**-19, 2.0**29]), min_size=3, max_size=3),
    program=st.lists(calls, max_size=30),
)
def test_no_group_within_its_share_loses_kv_to_another(weights, program):
    engine = Harness(num_blocks=10, max_seq_len=36)
    EvictionCheck(engine)
    answers, contexts = [], defaultdict(list)
    for number, call in enumerate(program, 1):
        salt = f"salt {call.group}"
        mine = contexts[call.group]
        parent = mine[call.fork % len(mine)] if call.fork is not None and mine else NO_PARENT
        text = f"{number:03d}{call.group}" * call.num_blocks
        wanted = SamplingConfig(max_gen_length=call.output) if call.output else None
        share = TenantShare(salt, weights[call.group])
        given = piece(number, text, parent, None if parent == NO_PARENT else 4)
        answers.append(engine.submit(given, sampling=wanted, cache_salt=salt, share=share))
        mine.append(number)
        for _ in range(call.steps):
            engine.step()
        if call.frees:
            engine.free(mine.pop(0))
        engine.clock.pass_time(call.seconds)
    engine.run()
    assert all(one.response is not None or one.error is not None for one in answers)


def test_the_random_programs_include_protected_groups():
    engine = Harness(num_blocks=8)
    spy = EvictionCheck(engine)
    fill(engine, 1, "quiet", 2)
    for number in range(10, 20):
        fill(engine, number, "crowd")
    assert spy.num_spared


def test_an_eviction_queue_takes_log_n_steps_for_many_groups():
    """Counts comparisons, not seconds."""
    shares = KvShares(10_000, ManualClock())
    looks = 0

    def amount(group: ShareGroup) -> int:
        nonlocal looks
        looks += 1
        return num_used(group)

    line: EvictionQueue[int] = EvictionQueue(shares, amount)
    for number in range(1000):
        group = shares.group(f"{number}")
        group.num_used = 10
        line.add(group, number)
        shares.grew(group)
    looks = 0
    for _ in range(1000):
        group = line.first_group()
        assert group is not None
        group.num_used -= 1
    assert looks < 5000


def test_the_sum_of_weights_is_exact_after_a_huge_weight_has_left():
    shares = KvShares(12, clock := ManualClock())
    for number in range(3):
        group = shares.group(f"{number}")
        group.num_contexts = 1
        shares.record_request(group, "", 1e9 if number == 0 else 1e-8)
        clock.pass_time(1.0)
    clock.pass_time(AWAY_S - 3.5)
    assert shares.protects(group)  # The first group is inactive.
    assert shares.protected_per_weight * 2e-8 == 6.0


def test_a_run_of_blocks_is_evicted_with_few_comparisons_of_groups():
    pool, looks = BlockPool(4096, 4, KvShares(4096, ManualClock())), 0
    groups = [pool.shares.group(f"{n}") for n in range(16)]
    for turn, group in enumerate(groups * 2):
        group.num_contexts = 1
        blocks = pool.allocate(128, group) or []
        for index, block in enumerate(blocks):
            pool.publish(block, bytes([turn, index]))
        pool.release(blocks)
    key = LossOrder.key

    def counted(order: LossOrder[ShareGroup], group: ShareGroup) -> tuple[float, ...]:
        nonlocal looks
        looks += 1
        return key(order, group)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LossOrder, "key", counted)
        taken = pool.allocate(1024, groups[0])
    assert taken is not None
    assert len(taken) == 1024
    pool.check_integrity([taken])
    assert looks < 1024
