"""The simulated cluster: all is counted, and the model of an engine is what it says."""

import asyncio

import pytest

from benchmark.scale.simulate import engine_config
from benchmark.scale.simulated.blocks import BlockPool
from benchmark.scale.simulated.device import Device, Job
from benchmark.scale.simulated.division import Rule, balance, divide, load_of, moved, order
from benchmark.scale.simulated.shard import Window, simulate
from benchmark.scale.simulated.summary import joined, summary
from benchmark.scale.simulated.traffic import applications, load_at, starts
from parrot.protocol.engine_api import FillPiece
from parrot.simulation import run_virtual

APPS = applications(3, seed=1)


def outcome(seed, num_killed=0, num_engines=3):
    sessions = starts([(app, 1.0) for app in APPS], num_engines, 0.5, 16.0, seed)
    return simulate(engine_config(), num_engines, sessions, Window(4.0, 16.0, num_killed))


def test_every_call_ends_once_and_the_same_seed_gives_the_same():
    found = outcome("a")
    assert len(found.calls) > 20
    assert {call.num_ends for call in found.calls} == {1}
    row = summary(found)
    assert row["failed"] == 0
    assert 0.0 < row["hit"] <= row["bound"] < 1.0
    assert summary(outcome("a")) == row
    assert summary(joined([found]))["hit"] == row["hit"]
    assert summary(outcome("b")) != row


def test_calls_of_engines_that_die_run_elsewhere():
    found = outcome("a", num_killed=1)
    assert {call.num_ends for call in found.calls} == {1}
    row = summary(found)
    assert row["failed"] == 0
    assert row["rerun"] > 0
    assert found.counts[0].requests == 0  # it is dead while it counts


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("hot_share", [0.0, 0.3])
def test_sessions_are_divided_without_a_rest(rule, hot_share):
    apps = applications(50, seed=0, hot_share=hot_share)
    assert sum(load_of(app).calls for app in apps) == pytest.approx(1.0)
    shards = range(8)
    divided = divide(apps, shards, rule)
    for app in apps:
        parts = [part for own in divided.values() for one, part in own if one is app]
        assert sum(parts) == pytest.approx(1.0)
    found = balance(apps, divided)
    if rule is Rule.SESSION:
        assert (found.most_calls, found.most_kv) == pytest.approx((1.0, 1.0))
    if rule in (Rule.BY_CALLS, Rule.BOUNDED):
        assert found.most_calls <= 1.2500001
    if rule is Rule.BOUNDED:
        assert found.most_kv <= 1.2500001
    rest = divide(apps, [n for n in shards if n != 3], rule)
    if rule is Rule.AFFINITY:  # nobody else's moves
        gone = sum(load_of(app).calls * part for app, part in divided[3])
        assert moved(divided, rest) == pytest.approx(gone)


def test_an_application_has_the_same_first_choice_among_others():
    for app in APPS:
        first, *others = order(app, range(64))
        assert order(app, others) == others
        assert order(app, [first, others[3]]) == [first, others[3]]


def test_the_day_has_one_peak():
    loads = [load_at(hour) for hour in range(24)]
    assert max(loads) == loads[15] == pytest.approx(1.0)
    assert min(loads) == loads[3] == pytest.approx(0.35)


def piece(context_id, tokens, parent=-1, length=None):
    return FillPiece(
        context_id=context_id, parent_context_id=parent, parent_len=length, token_ids=tokens
    )


def test_a_pool_finds_the_blocks_that_it_still_has():
    pool = BlockPool(num_blocks=8, block_size=4)
    prompt = list(range(10))
    assert pool.extend(piece(1, prompt), "salt") == (10, 0)
    assert pool.extend(piece(2, [50, 51], parent=1, length=6), "salt") == (8, 6)
    assert pool.extend(piece(3, prompt), "salt") == (10, 8)  # the rest of it is no full block
    assert pool.extend(piece(4, prompt), "other") == (10, 0)
    pool.check_integrity()
    assert [pool.free(number) for number in (1, 2, 3, 4, 5)] == [10, 8, 10, 10, 0]
    pool.check_integrity()
    assert pool.extend(piece(6, [1] * 24), "salt") == (24, 0)  # the oldest ones give way
    assert pool.extend(piece(7, prompt), "salt") == (10, 0)
    pool.check_integrity()
    assert pool.most_over == 0


def test_a_step_takes_as_long_as_what_is_in_it():
    costs = engine_config().instance

    async def main():
        loop, device = asyncio.get_running_loop(), Device(costs)
        jobs = [Job(500, 100, output, loop.create_future()) for output in (0, 3)]
        times = []
        for job in jobs:
            device.add(job)
            job.ended.add_done_callback(lambda _: times.append(loop.time()))
        for job in jobs:
            await job.ended
        assert device.busy_s == pytest.approx(loop.time())
        return times

    first, second = run_virtual(main())
    prompt_s = 100 * (costs.prefill_token_s + 450 * costs.prefill_pair_s)
    assert first == pytest.approx(costs.step_s + prompt_s)
    decode_s = costs.step_s + costs.sequence_s + 500 * costs.context_token_s
    assert second == pytest.approx(2 * (costs.step_s + prompt_s) + 3 * decode_s)
