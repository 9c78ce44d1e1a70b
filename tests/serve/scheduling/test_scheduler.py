"""The global scheduler: order, capacity, starvation and leaks."""

import random
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmark.serve.baselines import ORDERS, AppFifo, RoundRobin
from parrot.serve.config import OrderName
from parrot.serve.graph.nodes import Objective
from parrot.serve.scheduling.placement import LowestCostPlacer
from parrot.serve.scheduling.queue import OrderPolicy
from parrot.serve.scheduling.scheduler import queued_by_model
from parrot.serve.scheduling.task import CompletionTask
from tests.serve.scheduling.scheduler_bench import LATENCY, THROUGHPUT, Bench

# Order


def test_latency_before_throughput_and_longest_path_first() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    slow = bench.task(criteria=THROUGHPUT, path=50)
    short, long = bench.task(path=1), bench.task(path=9)
    bench.add(slow, short, long)
    assert bench.order() == [long, short, slow]


def test_fcfs_ignores_the_path() -> None:
    bench = Bench(policy="fcfs")
    bench.engines(1, slots=1)
    short = bench.task(path=1)
    bench.later(0.1)
    long = bench.task(path=9)
    bench.add(long, short)
    assert bench.order() == [short, long]


def test_older_apps_finish_first() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    first = [bench.task(session=1)]
    bench.add(*first)
    bench.later(1)
    second = [bench.task(session=2, path=30) for _ in range(2)]
    bench.add(*second)
    bench.later(1)
    first += [bench.task(session=1) for _ in range(2)]
    bench.add(*first[1:])
    assert bench.order()[:3] == first


def test_without_app_fifo_only_tasks_count() -> None:
    bench = Bench(app_fifo=False)
    bench.engines(1, slots=1)
    tasks = []
    for session in (1, 2, 1, 2):
        tasks.append(bench.task(session=session))
        bench.add(tasks[-1])
        bench.later(1)
    assert bench.order() == tasks


@pytest.mark.parametrize("app_fifo", [True, False])
def test_no_application_starves(app_fifo: bool) -> None:
    """An old application fills the only slot with latency work. A later one still gets service."""
    bench = Bench(app_fifo=app_fifo)
    bench.engines(1, slots=1)
    flood = [bench.task(session=1, path=60) for _ in range(3)]
    bench.add(*flood)
    bench.later(1)
    victim = bench.task(session=2, criteria=THROUGHPUT)
    bench.add(victim)
    for _ in range(2000):
        placed = bench.run()
        if victim in placed:
            return
        bench.later(1)
        for task, engine_id in placed.items():
            bench.scheduler.finished(task, engine_id)
        bench.add(bench.task(session=1, path=60, output=200))
    pytest.fail("starved")


def test_an_app_that_paused_gets_a_new_start_time() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    bench.add(bench.task(session=1))
    bench.order()
    bench.later(60)
    newer = bench.task(session=2)
    bench.add(newer)
    bench.later(1)
    again = bench.task(session=1, path=50)
    bench.add(again)
    assert bench.order() == [newer, again]


class LastComeFirst(OrderPolicy):
    def task_key(self, task: CompletionTask) -> float:
        return -task.arrived


def test_order_and_placement_can_be_given() -> None:
    bench = Bench(order=lambda clock: LastComeFirst(), placer=RoundRobin)
    bench.engines(3, slots=1)
    tasks = []
    for _ in range(3):
        tasks.append(bench.task("same", prefix_len=1000))
        bench.add(tasks[-1])
        bench.later(1)
    assert bench.run() == {tasks[2]: 0, tasks[1]: 1, tasks[0]: 2}


def test_update_moves_a_task() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    one, two = bench.task(criteria=THROUGHPUT), bench.task(criteria=THROUGHPUT)
    bench.add(one, two)
    two.completion.objective = Objective(LATENCY, 0, 0.0)
    bench.scheduler.update(two)
    assert bench.order() == [two, one]


def test_requeued_tasks_keep_their_age() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    old = bench.task()
    bench.add(old)
    ((_, engine_id),) = bench.run().items()
    bench.later(5)
    young = bench.task()
    bench.add(young)
    bench.scheduler.requeue(old, engine_id)
    assert bench.order() == [old, young]


def test_priorities_follow_the_order_of_apps() -> None:
    bench = Bench(order=AppFifo)
    bench.engines(1)
    early = bench.task(session=1)
    bench.add(early)
    bench.later(5)
    late = bench.task(session=2)
    batch = bench.task(session=2, criteria=THROUGHPUT)
    bench.add(late, batch)
    priority = {p.task: p.priority for p in bench.scheduler.schedule()}
    assert priority[early] < priority[late] == priority[batch]


# Time


def test_next_change_is_the_time_at_which_throughput_work_may_start() -> None:
    bench = Bench()
    bench.engines(1, slots=1000)
    bench.add(bench.task(session=1))
    bench.run()
    assert bench.scheduler.next_change() is None
    crowd = [bench.task(session=2, criteria=THROUGHPUT, path=30, output=400) for _ in range(300)]
    bench.add(*crowd)
    bench.run()
    assert bench.scheduler.num_queued
    when = bench.scheduler.next_change()
    assert when is not None
    assert when == pytest.approx(bench.clock.now() + 30)
    bench.later(when - bench.clock.now())
    assert bench.run()


def test_next_change_is_the_time_at_which_a_deadline_changes_the_order() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    bench.add(bench.task(session=3))
    bench.run()
    task = bench.task(session=2, criteria=THROUGHPUT, path=10)
    task.completion.objective = Objective(THROUGHPUT, 0, 10.0, deadline=bench.clock.now() + 100)
    task.refresh()
    bench.add(task)
    bench.run()
    when = bench.scheduler.next_change()
    assert when == pytest.approx(bench.clock.now() + 100 - 21)  # Twice its path plus 1 s.
    bench.scheduler.remove(task)
    assert bench.scheduler.next_change() is None


def test_an_exception_in_the_placer_fails_one_task(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    bench.engines(2)
    good, bad, later = [bench.task(session=i) for i in range(3)]
    choose = LowestCostPlacer.choose

    def fail_for_one(self: LowestCostPlacer, task: CompletionTask, now: float) -> object:
        if task is bad:
            raise ZeroDivisionError
        return choose(self, task, now)

    monkeypatch.setattr(LowestCostPlacer, "choose", fail_for_one)
    bench.add(good, bad, later)
    assert set(bench.run()) == {good, later}
    assert bench.scheduler.take_failed() == [bad]
    assert bench.scheduler.take_failed() == []
    assert bench.scheduler.num_queued == 0
    assert "no engine could be chosen" in caplog.text


# Capacity


def test_slots_and_tokens_are_respected() -> None:
    bench = Bench()
    bench.engines(1, slots=3)
    bench.add(*[bench.task() for _ in range(5)])
    assert len(bench.run()) == 3
    assert bench.scheduler.num_queued == 2
    bench = Bench()
    bench.engines(1, tokens=300)
    bench.add(*[bench.task() for _ in range(5)])  # 111 tokens each.
    assert len(bench.run()) == 2


def test_shared_tokens_count_once() -> None:
    bench = Bench()
    bench.engines(1, tokens=1500)
    bench.add(*[bench.task("shared", prefix_len=1000) for _ in range(6)])  # 1000 + 6 * 101
    assert len(bench.run()) == 4


def test_tasks_may_estimate_the_same_text_differently() -> None:
    bench = Bench()
    bench.engines(1)
    short, long = bench.task("same", prefix_len=10), bench.task("same", prefix_len=30)
    assert short.keys[0] == long.keys[0]
    bench.add(short, long)
    placed = bench.run()
    for task in (short, long):
        bench.scheduler.finished(task, placed[task])
        bench.scheduler.check_integrity()


def test_a_task_that_exceeds_an_engine_runs_alone_on_it() -> None:
    bench = Bench()
    bench.engines(1, tokens=100)
    big, small = bench.task(prefix_len=500), bench.task(output=5)
    bench.add(big, small)
    placed = bench.run()
    assert list(placed) == [big]
    bench.scheduler.finished(big, placed[big])
    assert list(bench.run()) == [small]


def test_smaller_tasks_pass_a_task_that_does_not_fit_a_limited_number_of_times() -> None:
    bench = Bench()
    bench.engines(1, tokens=1000)
    filler = bench.task(output=500)
    bench.add(filler)
    bench.run()
    bench.later(1)
    big = bench.task(output=900)
    bench.add(big)
    passed = 0
    for _ in range(200):
        bench.later(0.01)
        bench.add(bench.task(output=50))
        placed = bench.run()
        passed += len(placed)
        for task, engine_id in placed.items():
            assert task is not big
            bench.scheduler.finished(task, engine_id)
    assert 10 < passed < 100


def test_models() -> None:
    bench = Bench()
    bench.engines(1, model="a")
    bench.engines(1, model="b")
    on_a, on_b = bench.task(models=("a",)), bench.task(models=("b", "x"))
    nowhere, anywhere = bench.task(models=("c",)), bench.task()
    bench.add(on_a, on_b, nowhere, anywhere)
    placed = bench.run()
    assert (placed[on_a], placed[on_b]) == (0, 1)
    assert anywhere in placed
    assert nowhere not in placed
    assert list(bench.scheduler.queues) == [("c",)]
    assert bench.scheduler.queued(("c",)) == [nowhere]
    assert bench.scheduler.engines.num_members(("c", "a"))
    bench.scheduler.remove(nowhere)
    assert not bench.scheduler.queues


def test_order_holds_across_sets_of_models() -> None:
    bench = Bench()
    bench.engines(1, slots=1)
    first = bench.task(models=("m",))
    bench.add(first)
    bench.later(1)
    second = bench.task(session=2)
    bench.add(second)
    bench.later(1)
    third = bench.task(session=3, models=("m", "n"))
    bench.add(third)
    assert bench.order() == [first, second, third]


def test_a_removed_engine_gets_no_tasks() -> None:
    bench = Bench()
    bench.engines(2)
    bench.scheduler.engines.remove(0)
    bench.add(*[bench.task() for _ in range(4)])
    assert set(bench.run().values()) == {1}


# Everything at once


@settings(max_examples=40)
@given(
    st.integers(0, 10_000),
    st.sampled_from([*get_args(OrderName), *ORDERS]),
    st.booleans(),
    st.integers(1, 3),
)
def test_random_histories_leave_no_state(
    seed: int, policy: str, grouped: bool, num_tenants: int
) -> None:
    rng = random.Random(seed)
    config: dict[str, object] = {} if policy in ORDERS else {"policy": policy}
    bench = Bench(ORDERS.get(policy), ctx_group=grouped, graph_group=grouped, **config)
    bench.engines(3, slots=3, tokens=900)
    running: dict[CompletionTask, int] = {}
    queued: set[CompletionTask] = set()
    for _ in range(60):
        bench.later(rng.random())
        bench.scheduler.update_remaining_work(rng.randrange(3), rng.random() * 20)
        action = rng.randrange(6)
        if action < 3:
            session = rng.randrange(3)
            task = bench.task(
                rng.choice(["a", "b", None]),
                session=session,
                criteria=rng.choice([LATENCY, THROUGHPUT]),
                path=rng.random() * 20,
                group=rng.choice(["g", "h", None]),
                output=rng.randrange(1, 400),
                models=rng.choice([(), ("m",), ("m", "z")]),
                tenant=f"tenant {session % num_tenants}",
            )
            bench.add(task)
            queued.add(task)
        elif action == 3 and running:
            task = rng.choice(list(running))
            bench.scheduler.finished(task, running.pop(task))
        elif action == 4 and running:
            task = rng.choice(list(running))
            task.completion.objective = Objective(LATENCY, 0, 1.0)
            bench.scheduler.requeue(task, running.pop(task))
            queued.add(task)
        elif queued:
            task = rng.choice(sorted(queued, key=lambda t: t.completion.id))
            if rng.random() < 0.5:
                bench.scheduler.remove(task)
                queued.remove(task)
            else:
                criteria, end = rng.choice([LATENCY, THROUGHPUT]), bench.clock.now() + 5
                task.completion.objective = Objective(criteria, 0, 2.0, None, end)
                bench.scheduler.update(task)
        placed = bench.run()
        assert queued.issuperset(placed)
        queued -= set(placed)
        running.update(placed)
        assert bench.scheduler.num_queued == len(queued)
        assert not queued or running, "work waits while every engine is idle"
    for task, engine_id in running.items():
        bench.scheduler.finished(task, engine_id)
    assert set(bench.order()) == queued
    bench.scheduler.check_integrity()
    for session in range(3):
        bench.scheduler.forget_session(session)


def test_queued_tasks_are_counted_for_each_model_once() -> None:
    bench = Bench()
    bench.add(*[bench.task(models=models) for models in ((), (), ("a",), ("a", "b"), ("b", "b"))])
    assert queued_by_model(bench.scheduler) == {"": 2, "a": 2, "b": 2}
