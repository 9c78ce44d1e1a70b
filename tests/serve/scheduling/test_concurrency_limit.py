"""The limit on the applications that an engine runs at once."""

import asyncio
from collections.abc import Sequence
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmark.serve.baselines import ORDERS
from parrot.engine.config import SimConfig
from parrot.serve.scheduling.queue import should_delay
from parrot.simulation import SimCluster, fixed, run_virtual
from tests.serve.scheduling.scheduler_bench import Bench
from tests.serve.scheduling.test_order_simulated import application, with_policy

STEP_S = 0.007


def num_at_once(num_apps: int, added_s: float) -> int:
    """The number of equal applications that run before the next one is delayed."""
    ahead = range(num_apps)
    return next((k for k in ahead if should_delay(k, num_apps, added_s, STEP_S)), num_apps)


def ends(waves: Sequence[int], added_s: float) -> list[float]:
    """The finishing times of equal applications that run in waves, from the lengths of steps."""
    times: list[float] = []
    now = 0.0
    for size in waves:
        now += STEP_S + size * added_s
        times += [now] * size
    return times


def cost(times: Sequence[float]) -> float:
    return mean(times) + max(times)


@given(st.integers(1, 200), st.floats(1e-5, 1e-2))
def test_no_other_split_into_two_waves_is_better(num_apps: int, added_s: float) -> None:
    size = num_at_once(num_apps, added_s)
    chosen = cost(ends([size, num_apps - size] if size < num_apps else [size], added_s))
    others = [cost(ends([k, num_apps - k], added_s)) for k in range(1, num_apps)]
    best = min([cost(ends([num_apps], added_s)), *others])
    assert chosen <= 1.01 * best


@given(st.integers(0, 100), st.integers(1, 100), st.floats(0, 1e-2), st.floats(1e-4, 1e-2))
def test_short_steps_and_single_applications_are_not_delayed(
    num_ahead: int, num_others: int, added_s: float, step_s: float
) -> None:
    assert not should_delay(0, 1 + num_others, added_s, step_s)
    if should_delay(num_ahead, num_ahead + num_others, added_s, step_s):
        assert (num_ahead + num_others) * added_s > 5 * step_s
        assert should_delay(num_ahead + 1, num_ahead + num_others, added_s, step_s)


@pytest.mark.parametrize("policy", ["critical_path", "las", "app_fifo", "fcfs"])
def test_only_the_order_by_remaining_work_delays_calls(policy: str) -> None:
    config: dict[str, object] = {} if policy in ORDERS else {"policy": policy}
    bench = Bench(ORDERS.get(policy), **config)
    bench.engines(1, slots=1000)
    tasks = [bench.task(session=i, prefix_len=4000, output=20) for i in range(40)]
    bench.add(*tasks)
    placed = bench.run()
    assert (len(placed) < 30) is (policy == "critical_path")
    for task, engine_id in placed.items():
        bench.scheduler.finished(task, engine_id)
    assert set(bench.order()) == set(tasks) - set(placed)


@pytest.mark.parametrize("depth", [0, 1])
def test_a_foreign_server_delays_only_calls_that_others_wait_for(depth: int) -> None:
    bench = Bench()
    bench.scheduler.engines.add(0, "m", 1000, 1_000_000, is_foreign=True)
    tasks = [bench.task(session=i, prefix_len=4000, output=20, depth=depth) for i in range(40)]
    bench.add(*tasks)
    assert (len(bench.run()) < 40) is bool(depth)


def test_a_call_that_adds_little_to_a_step_passes_delayed_calls() -> None:
    bench = Bench()
    bench.engines(1, slots=1000)
    for i in range(40):
        bench.scheduler.update_remaining_work(i, 50.0)
        bench.add(bench.task(session=i, prefix_len=4000, output=20))
    bench.run()
    assert bench.scheduler.num_queued
    chat = bench.task(session=100, prefix_len=10, output=20)
    bench.add(chat)
    assert set(bench.run()) == {chat}


@pytest.mark.parametrize("preferred", [(), (0,)])
def test_a_preview_finds_no_engine_if_the_call_would_be_delayed(preferred: Sequence[int]) -> None:
    bench = Bench()
    bench.engines(1, slots=1000, tokens=10_000_000)
    for i in range(40):
        bench.add(bench.task(session=i, prefix_len=100_000, output=20))
    bench.run()
    assert bench.scheduler.num_queued
    bench.scheduler.update_remaining_work(100, 50.0)
    long, short = (bench.task(session=100, prefix_len=n, output=20) for n in (100_000, 10))
    assert bench.scheduler.preview(long, preferred) is None
    assert bench.scheduler.preview(short, preferred) == 0


def test_equal_chains_run_in_two_waves() -> None:
    """Their prompts take the engine's time. With `fcfs` all finish together. Two waves lower the
    mean, and the last chain finishes later only by the cost of smaller batches."""
    costs = {"step_s": STEP_S, "prefill_token_s": 1e-3, "sequence_s": 0.0, "context_token_s": 0.0}
    engine = SimConfig.model_validate({"instance": costs})

    async def main(policy: str) -> list[float]:
        async with SimCluster(1, engine=engine, core=with_policy(policy)) as cluster:
            client = cluster.client(fixed(0.0))
            for _ in range(4):
                await application(client, 0.0, 1, 20)
            start = asyncio.get_running_loop().time()
            texts = [f"{i} {'x' * 50}" for i in range(30)]
            chains = [application(client, 0.0, 5, 10, text=text) for text in texts]
            times = await asyncio.gather(*chains)
            cluster.check_integrity()
            return [time - start for time in times]

    together = run_virtual(main("fcfs"))
    waves = run_virtual(main("critical_path"))
    assert mean(waves) < 0.9 * mean(together)
    assert max(waves) < 1.2 * max(together)
