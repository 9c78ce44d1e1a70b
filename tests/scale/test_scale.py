"""The simulated cluster counts each call once, and modelled engines have the specified costs."""

import asyncio
import math
from collections import Counter
from statistics import fmean

import pytest

from parrot.protocol.engine_api import FillPiece
from parrot.simulation import run_virtual
from tests.scale.simulate import engine_config, kv_of
from tests.scale.simulated.blocks import BlockPool
from tests.scale.simulated.device import Device, Job
from tests.scale.simulated.division import Rule, balance, divide
from tests.scale.simulated.shard import Window, simulate, simulate_on
from tests.scale.simulated.summary import joined, summary
from tests.scale.simulated.traffic import (
    PEAK,
    RATES,
    SEATS,
    Day,
    Kind,
    applications,
    loads_at,
    starts,
)

APPS = applications(3, seed=1)
HALF = dict.fromkeys(Kind, 0.5)


def outcome(seed, num_killed=0, num_engines=3):
    sessions = starts([(app, 1.0) for app in APPS], num_engines, HALF, 16.0, seed)
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
    assert found.counts[0].requests == 0  # the engine is dead while requests are counted


@pytest.mark.parametrize("rule", Rule)
def test_each_session_has_one_shard(rule):
    apps = applications(50, seed=0, hot_share=0.3)
    sessions = starts([(app, 1.0) for app in apps], 256, PEAK, 20.0, "a")
    kv_tokens = kv_of(32)
    divided = divide(sessions, range(8), rule, 0, kv_tokens)
    assert Counter(s for own in divided.values() for s in own) == Counter(sessions)
    found = balance(divided, 20.0)
    alone = balance(divide(sessions, range(8), Rule.HOME, 0, kv_tokens), 20.0)
    if rule is Rule.SESSION:
        assert (found.most_calls, found.most_kv) == pytest.approx((1.0, 1.0), abs=0.2)
    elif rule is Rule.HOME:
        assert (found.spilt, found.homes) == (0.0, 1.0)
    else:
        assert found.most_kv < 0.8 * alone.most_kv
        assert found.most_calls < alone.most_calls
        assert 0.0 < found.spilt < 0.6
    rest = divide(sessions, [n for n in range(8) if n != 3], Rule.HOME, 0, kv_tokens)
    if rule is Rule.HOME:  # only sessions of the removed shard move
        assert all(set(divided[n]) <= set(own) for n, own in rest.items())


def test_interactive_load_peaks_by_day_and_map_reduce_load_by_night():
    for kind in Kind:
        loads = [loads_at(hour)[kind] for hour in range(24)]
        assert loads[15] == 1.0
        if kind is Kind.MAP:
            assert max(loads) == loads[3]
        else:
            assert max(loads) == loads[15]
            assert min(loads) == loads[4] < 0.5
        assert loads_at(24.0) == loads_at(0.0)
        assert loads_at(-1.0) == loads_at(23.0)


@pytest.mark.parametrize(("agent_s", "settle_s"), [(math.inf, 0.0), (100.0, 0.0), (math.inf, 50.0)])
def test_a_day_follows_its_curve(agent_s, settle_s):
    day, shares = Day(200.0, agent_s, settle_s=settle_s), [(app, 1.0) for app in APPS]
    sessions = list(day.starts(shares, 40, "a"))
    assert sessions == sorted(sessions, key=lambda start: start.at)
    for hour in (3, 9, 15, 21):
        begin, counted, end = day.marks[2 * hour : 2 * hour + 3]
        assert (counted - begin, end - begin) == (settle_s, 200.0)
        loads = loads_at(hour + 0.5)
        for kind in Kind:
            mine = [start for start in sessions if start.app.kind is kind]
            if kind is Kind.AGENT:
                at_work = sum(start.at <= (begin + end) / 2 < start.until for start in mine)
                assert at_work == pytest.approx(SEATS * 40 * loads[kind], abs=15)
            else:
                begun = sum(begin <= start.at < end for start in mine)
                assert begun == pytest.approx(RATES[kind] * 40 * 200 * loads[kind], rel=0.3)
    lives = [start.until - start.at for start in sessions if start.app.kind is Kind.AGENT]
    assert all(life > 0 for life in lives)
    if agent_s < math.inf:
        assert fmean(life for life in lives if life < math.inf) < 2 * agent_s


def test_hours_count_each_call_exactly_once():
    day = Day(4.0)
    sessions = list(day.starts([(app, 1.0) for app in APPS], 3, "a"))
    marks = [number * day.hour_s for number in range(10, 16)]
    hours = simulate_on(engine_config(), 3, sessions, marks)
    rows = [summary(hour) for hour in hours]
    calls = [call for hour in hours for call in hour.calls]
    assert {call.num_ends for call in calls} == {1}
    counted = [call for call in calls if marks[0] <= call.ended < marks[-1]]
    assert sum(row["calls"] for row in rows) == len(counted) > 30
    assert rows[-1]["late"] == sum(call.ended >= marks[-1] for call in calls)
    assert all(hour.core_s > 0 for hour in hours)
    assert all(0 < end.journal[0] <= end.journal[1] for hour in hours for end in hour.ends)


def test_sessions_continue_after_their_serve_core_dies():
    sessions = starts([(app, 1.0) for app in APPS], 3, HALF, 30.0, "a")
    marks = [8.0, 12.0, 30.0]
    alone = simulate_on(engine_config(), 3, sessions, marks)
    found = simulate_on(engine_config(), 3, sessions, marks, down_s=2.0)
    calls = [call for outcome in found for call in outcome.calls]
    assert {call.num_ends for call in calls} == {1}
    assert not [call for call in calls if 8.0 <= call.ended < 10.0]
    rows = [summary(outcome) for outcome in found]
    assert sum(row["failed"] for row in rows) == 0
    assert rows[1]["hit"] > 0.8 * summary(alone[1])["hit"]  # engines have kept their KV
    assert all(waited.took_s > 1.0 for o in found for waited in o.jobs if 8.0 < waited.began < 9.0)


def piece(context_id, tokens, parent=-1, length=None):
    return FillPiece(
        context_id=context_id, parent_context_id=parent, parent_len=length, token_ids=tokens
    )


def test_a_pool_finds_the_blocks_that_it_still_has():
    pool = BlockPool(num_blocks=8, block_size=4)
    prompt = list(range(10))
    assert pool.extend(piece(1, prompt), "salt") == (10, 0)
    assert pool.extend(piece(2, [50, 51], parent=1, length=6), "salt") == (8, 6)
    assert pool.extend(piece(3, prompt), "salt") == (10, 8)  # the last block is not full
    assert pool.extend(piece(4, prompt), "other") == (10, 0)
    begun = list(range(6))
    assert pool.extend(piece(5, begun), "salt") == (6, 4)
    assert pool.extend(piece(6, prompt[6:], parent=5), "salt") == (10, 8)  # also after a fork
    pool.check_integrity()
    assert [pool.free(number) for number in (1, 2, 3, 4, 5, 6, 7)] == [10, 8, 10, 10, 6, 10, 0]
    pool.check_integrity()
    assert pool.extend(piece(8, [1] * 32), "salt") == (32, 0)  # evicts all idle blocks
    assert pool.free(8) == 32
    assert pool.extend(piece(9, prompt), "salt") == (10, 0)
    pool.check_integrity()
    assert pool.most_over == 0


def test_the_duration_of_a_step_follows_from_its_work():
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
