"""The simulated cluster: all is counted, and the model of an engine is what it says."""

import asyncio
from collections import Counter

import pytest

from benchmark.scale.simulate import engine_config
from benchmark.scale.simulated.blocks import BlockPool
from benchmark.scale.simulated.device import Device, Job
from benchmark.scale.simulated.division import Rule, balance, divide
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
def test_each_session_has_one_shard(rule):
    apps = applications(50, seed=0, hot_share=0.3)
    sessions = starts([(app, 1.0) for app in apps], 256, 1.0, 20.0, "a")
    divided = divide(sessions, range(8), rule, seed=0)
    assert Counter(s for own in divided.values() for s in own) == Counter(sessions)
    found = balance(divided, 20.0)
    alone = balance(divide(sessions, range(8), Rule.HOME, seed=0), 20.0)
    if rule is Rule.SESSION:
        assert (found.most_calls, found.most_kv) == pytest.approx((1.0, 1.0), abs=0.2)
    elif rule is Rule.HOME:
        assert (found.spilt, found.homes) == (0.0, 1.0)
    else:
        assert found.most_kv < 0.8 * alone.most_kv
        assert found.most_calls < alone.most_calls
        assert 0.0 < found.spilt < 0.6
    rest = divide(sessions, [n for n in range(8) if n != 3], Rule.HOME, seed=0)
    if rule is Rule.HOME:  # nobody else's move
        assert all(set(divided[n]) <= set(own) for n, own in rest.items())


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
