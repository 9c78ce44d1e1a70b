"""Placement by predicted seconds, in blocks, and by the rules of routers."""

import pytest

from benchmark.serve.baselines import PLACERS, PrefixAware, RoundRobin
from parrot.protocol.engine_api import StepCosts
from parrot.serve.contexts.index import Boundary, KvUsage, LedgerContext
from parrot.serve.scheduling.task import CompletionTask
from tests.serve.scheduling.scheduler_bench import LATENCY, THROUGHPUT, Bench

PLACEMENTS = {"predicted": None, **PLACERS}


def test_load_is_spread() -> None:
    bench = Bench()
    bench.engines(4)
    bench.add(*[bench.task(f"t{i}", session=i) for i in range(20)])
    placed = list(bench.run().values())
    assert {placed.count(engine) for engine in range(4)} == {5}


@pytest.mark.parametrize("num_engines", [2, 40])
@pytest.mark.parametrize("group", [None, "g"])
def test_of_equal_engines_the_first_is_chosen(num_engines: int, group: str | None) -> None:
    bench = Bench()
    bench.engines(num_engines)
    task = bench.task(group=group)
    bench.add(task)
    assert bench.run() == {task: 0}
    other = bench.task(session=2, own_len=5000)
    bench.add(other)
    assert bench.run() == {other: 1}


def test_an_engine_with_uncomputed_prompts_is_avoided() -> None:
    """Both engines run the same task. Engine 1 has computed its prompt."""
    bench = Bench()
    bench.engines(2)
    for engine_id in (1, 0):
        long = bench.task(own_len=100_000, output=2000, criteria=THROUGHPUT, session=engine_id)
        long.failed_engines.add(1 - engine_id)
        bench.add(long)
        assert bench.run() == {long: engine_id}
        bench.later(3.0)
    bench.later(-3.0)
    task = bench.task(session=5, output=20)
    bench.add(task)
    assert bench.run() == {task: 1}


def test_a_prompt_goes_where_it_evicts_the_least_session_kv() -> None:
    bench = Bench()
    bench.engines(3)
    task, small = bench.task(own_len=500), bench.task(own_len=50)
    for engine_id, promised in enumerate((800, 400, 600)):
        bench.index.kv_usage[engine_id] = KvUsage(1000, 900, promised)
    bench.add(task)
    assert bench.run() == {task: 1}
    bench.scheduler.finished(task, 1)
    for usage in bench.index.kv_usage.values():
        usage.used = 800
    bench.add(small)
    assert bench.run() == {small: 0}  # It fits on both engines.
    assert [KvUsage(100, used, 40).session_tokens_evicted(50) for used in (0, 50, 80, 100)] == [
        0,
        0,
        15,
        20,
    ]


def cache(
    bench: Bench, task: CompletionTask, engine_id: int, length: int, *, on_host: bool = False
) -> None:
    context = LedgerContext(engine_id, engine_id, "tenant", None, 0, length, 0, 0.0, 0.0)
    context.on_host = on_host
    bench.index.publish(context, Boundary(task.keys[0], length, 0))


@pytest.mark.parametrize("ctx_aware", [True, False])
def test_a_cached_prefix_attracts(ctx_aware: bool) -> None:
    bench = Bench(ctx_aware=ctx_aware)
    bench.engines(50)
    task = bench.task("system", prefix_len=2000)
    cache(bench, task, 33, 2000)
    bench.add(task)
    assert (bench.run()[task] == 33) is ctx_aware


@pytest.mark.parametrize("host_token_s", [0.0, 1e-6, 1e-4])
def test_a_prefix_in_cpu_memory_attracts_less_than_in_gpu_memory(host_token_s: float) -> None:
    """It attracts more than no prefix, except if the copy takes longer than the computation."""
    bench = Bench()
    bench.engines(3, costs=StepCosts(host_token_s=host_token_s))
    task = bench.task("system", prefix_len=2000)
    cache(bench, task, 1, 2000, on_host=True)
    bench.add(task)
    assert (bench.run()[task] == 1) is (host_token_s < 1e-5)
    if host_token_s:
        bench = Bench()
        bench.engines(3, costs=StepCosts(host_token_s=host_token_s))
        cache(bench, task, 1, 2000, on_host=True)
        cache(bench, task, 2, 2000)
        bench.add(task)
        assert bench.run()[task] == 2


def test_a_cached_prefix_on_a_full_engine_does_not_attract() -> None:
    bench = Bench(ctx_group=False)
    bench.engines(50, slots=1)
    tasks = [bench.task("system", prefix_len=2000, session=i) for i in range(3)]
    cache(bench, tasks[0], 33, 2000)
    placed = []
    for task in tasks:
        bench.add(task)
        placed.append(bench.run()[task])
    assert placed[0] == 33
    assert len(set(placed)) == 3


def test_a_cached_prefix_does_not_outweigh_the_load() -> None:
    bench = Bench(ctx_group=False)
    bench.engines(2, slots=1000)
    example = bench.task("system", prefix_len=500)
    cache(bench, example, 0, 500)
    tasks = [bench.task("system", prefix_len=500, session=i) for i in range(300)]
    bench.add(*tasks)
    placed = list(bench.run().values())
    assert placed[0] == 0
    assert 0 < placed.count(1) < 150


@pytest.mark.parametrize("ctx_group", [True, False])
def test_tasks_with_a_common_prefix_share_an_engine_before_it_is_cached(ctx_group: bool) -> None:
    bench = Bench(ctx_group=ctx_group, graph_group=False)
    bench.engines(4)
    tasks = [bench.task("doc", prefix_len=8000, criteria=THROUGHPUT) for _ in range(8)]
    bench.add(*tasks)
    assert len(set(bench.run().values())) == (1 if ctx_group else 4)


def test_each_of_several_blocks_gets_its_share_of_the_engines() -> None:
    """Each block alone would be split over all four engines: its prompt is short, its outputs
    many."""
    bench = Bench(graph_group=False)
    bench.engines(4, slots=64)
    blocks = {
        name: [bench.task(name, prefix_len=500, criteria=THROUGHPUT) for _ in range(16)]
        for name in ("a", "b", "c", "d")
    }
    bench.add(*[task for turn in zip(*blocks.values(), strict=True) for task in turn])
    placed = bench.run()
    used = {name: {placed[task] for task in tasks} for name, tasks in blocks.items()}
    assert sorted(map(len, used.values())) == [1, 1, 1, 1]
    assert len(set().union(*used.values())) == 4


@pytest.mark.parametrize("graph_group", [True, False])
def test_tasks_of_a_group_share_an_engine(graph_group: bool) -> None:
    bench = Bench(graph_group=graph_group)
    bench.engines(4)
    tasks = [bench.task(criteria=THROUGHPUT, group="g") for _ in range(8)]
    bench.add(*tasks)
    assert len(set(bench.run().values())) == (1 if graph_group else 4)


def test_task_groups_split_when_they_do_not_fit() -> None:
    bench = Bench()
    bench.engines(4, slots=3)
    bench.add(*[bench.task(criteria=THROUGHPUT, group="g") for _ in range(8)])
    placed = list(bench.run().values())
    assert len(placed) == 8
    assert len(set(placed)) == 3


def test_throughput_work_avoids_engines_with_latency_work() -> None:
    bench = Bench()
    bench.engines(2)
    chat = bench.task(session=1)
    bench.add(chat)
    chat_engine = bench.run()[chat]
    batch = [bench.task(session=2, criteria=THROUGHPUT) for _ in range(4)]
    bench.add(*batch)
    assert chat_engine not in set(bench.run().values())


def test_latency_tasks_limit_their_batch() -> None:
    bench = Bench()
    bench.engines(1, slots=1000)
    chat = bench.task(session=1)
    bench.add(chat)
    engine_id = bench.run()[chat]
    batch = [bench.task(session=2, criteria=THROUGHPUT) for _ in range(500)]
    bench.add(*batch)
    placed = len(bench.run())
    assert 10 < placed < 200
    bench.scheduler.finished(chat, engine_id)
    assert len(bench.run()) == 500 - placed


def test_a_throughput_task_waits_for_latency_tasks_only_as_long_as_it_runs() -> None:
    """Otherwise a task that fits only next to no chat would starve on an engine with constant
    chats."""
    bench = Bench()
    bench.engines(1, slots=1000)
    bench.add(bench.task(session=1))
    bench.run()
    bench.add(*[bench.task(session=2, criteria=THROUGHPUT, path=5.0) for _ in range(500)])
    num_left = 500 - len(bench.run())
    assert num_left > 300
    bench.later(4.9)
    assert not bench.run()
    bench.later(0.2)
    assert len(bench.run()) == num_left


def test_engines_that_failed_with_a_task_are_avoided() -> None:
    bench = Bench()
    bench.engines(3)
    task = bench.task()
    task.failed_engines.update({0, 1})
    bench.add(task)
    assert bench.run()[task] == 2
    bench = Bench()
    bench.engines(1)
    task = bench.task()
    task.failed_engines.add(0)
    bench.add(task)
    assert bench.run()[task] == 0  # The last engine left.


def test_a_task_waits_for_an_engine_that_accepts_its_length() -> None:
    bench = Bench()
    bench.engines(6, max_len=100)
    bench.engines(1, slots=1, max_len=1000)
    long, next_long, short = [bench.task(output=n) for n in (500, 500, 50)]
    bench.add(long, next_long, short)
    placed = bench.run()
    assert placed[long] == 6
    assert placed[short] != 6
    assert next_long not in placed
    bench.scheduler.finished(long, 6)
    assert bench.run() == {next_long: 6}


def test_a_block_is_split_over_engines_that_accept_its_length() -> None:
    bench = Bench()
    bench.engines(4, max_len=1000)
    bench.engines(4, max_len=9000)
    bench.add(*[bench.task("doc", prefix_len=3000, output=500, own_len=900) for _ in range(16)])
    assert set(bench.run().values()) <= {4, 5, 6, 7}


def test_a_task_that_is_too_long_for_all_engines_goes_to_the_longest() -> None:
    bench = Bench()
    bench.engines(6, max_len=100)
    bench.engines(1, max_len=200)
    task = bench.task(output=500)
    bench.add(task)
    (placement,) = bench.scheduler.schedule()
    assert (placement.engine_id, placement.is_longest) == (6, True)
    bench.scheduler.requeue(task, 6)
    bench.scheduler.engines.remove(6)
    (placement,) = bench.scheduler.schedule()
    assert placement.is_longest


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_preview_changes_nothing(placement: str) -> None:
    def engines(previews: int) -> list[int]:
        bench = Bench(placer=PLACEMENTS[placement])
        bench.engines(3)
        chosen = []
        for i in range(7):
            for _ in range(previews):
                bench.scheduler.preview(bench.task("waits for an input", session=9))
            bench.add(task := bench.task("doc", session=i, prefix_len=200))
            chosen.append(bench.run()[task])
        return chosen

    assert engines(previews=2) == engines(previews=0)


def test_a_preview_prefers_the_first_engine_that_may_run_the_task() -> None:
    bench = Bench()
    bench.engines(2)
    bench.engines(1, model="other")
    scheduler, task = bench.scheduler, bench.task(models=("m",))
    assert [scheduler.preview(task, [2, 7, i]) for i in (0, 1)] == [0, 1]
    drained = list(scheduler.engines)[1]
    scheduler.engines.set_draining(drained, True)
    assert scheduler.preview(task, [1]) == scheduler.preview(task, [2]) == 0


@pytest.mark.parametrize("limits", [{"slots": 1}, {"tokens": 150}])
def test_a_preview_finds_no_engine_while_the_preferred_one_is_full(limits: dict[str, int]) -> None:
    bench = Bench()
    bench.engines(2, **limits)
    bench.add(running := bench.task())
    (engine_id,) = bench.run().values()
    assert bench.scheduler.preview(bench.task()) == 1 - engine_id
    assert bench.scheduler.preview(bench.task(), [engine_id]) is None
    bench.scheduler.finished(running, engine_id)
    assert bench.scheduler.preview(bench.task(), [engine_id]) == engine_id


# Blocks


def test_a_block_with_long_own_prompts_is_split_at_once() -> None:
    bench = Bench()
    bench.engines(4)
    tasks = [
        bench.task("instruction", prefix_len=200, own_len=2000, criteria=THROUGHPUT, group="g")
        for _ in range(16)
    ]
    bench.add(*tasks)
    placed = list(bench.run().values())
    assert sorted(placed.count(engine) for engine in range(4)) == [4, 4, 4, 4]


def test_a_block_is_assigned_to_its_engines_in_turns() -> None:
    """Its tasks are sorted by length, and no engine may get all of the longest ones."""
    bench = Bench()
    bench.engines(4)
    tasks = [bench.task("instruction", prefix_len=200, own_len=2000 + 10 * i) for i in range(16)]
    bench.add(*tasks)
    placed = bench.run()
    assert [len({placed[task] for task in tasks[i : i + 4]}) for i in range(0, 16, 4)] == [4] * 4


def test_a_block_leaves_out_an_engine_that_is_busy() -> None:
    bench = Bench()
    bench.engines(4)
    (busy,) = [bench.task(own_len=40_000)]
    bench.add(busy)
    engine_id = bench.run()[busy]
    tasks = [bench.task("doc", prefix_len=2000, own_len=200, group="g") for _ in range(12)]
    bench.add(*tasks)
    assert engine_id not in set(bench.run().values())


def test_a_block_runs_where_its_prefix_is_cached() -> None:
    bench = Bench()
    bench.engines(4)
    tasks = [bench.task("doc", prefix_len=8000, criteria=THROUGHPUT) for _ in range(4)]
    cache(bench, tasks[0], 2, 8000)
    bench.add(*tasks)
    assert set(bench.run().values()) == {2}


def test_a_block_larger_than_all_engines_fills_them() -> None:
    bench = Bench()
    bench.engines(3, slots=4)
    tasks = [bench.task("doc", prefix_len=1000, criteria=THROUGHPUT) for _ in range(20)]
    bench.add(*tasks)
    placed = list(bench.run().values())
    assert sorted(placed.count(engine) for engine in range(3)) == [4, 4, 4]
    assert bench.scheduler.num_queued == 8


@pytest.mark.parametrize("group", ["g", None])
def test_without_the_switches_common_prefixes_are_ignored(group: str | None) -> None:
    bench = Bench(ctx_group=False, graph_group=False)
    bench.engines(4)
    tasks = [bench.task("doc", prefix_len=8000, criteria=THROUGHPUT, group=group) for _ in range(8)]
    bench.add(*tasks)
    assert len(set(bench.run().values())) == 4


# What engines report


def report(bench: Bench, slowness: list[float]) -> None:
    """Each engine reports its step costs."""
    costs = StepCosts().model_dump()
    for engine_id, factor in enumerate(slowness):
        own = {name: factor * cost for name, cost in costs.items()}
        bench.scheduler.engines.reported(engine_id, StepCosts(**own))


def test_a_slow_engine_gets_fewer_tasks() -> None:
    """One of two engines of a model is four times as slow. It gets work only under load."""
    bench = Bench()
    bench.engines(2, slots=1000)
    report(bench, [1.0, 4.0])
    bench.add(*[bench.task(own_len=500) for _ in range(4)])
    assert set(bench.run().values()) == {0}
    bench.add(*[bench.task(own_len=500) for _ in range(300)])
    placed = list(bench.run().values())
    assert 0 < placed.count(1) < 100


def test_slow_engines_are_not_among_the_least_loaded() -> None:
    bench = Bench()
    bench.engines(40)
    report(bench, [4.0] * 20 + [1.0] * 20)
    bench.add(*[bench.task(own_len=500, session=i) for i in range(20)])
    assert sorted(bench.run().values()) == list(range(20, 40))


@pytest.mark.parametrize("slower", [0.0, 0.02])
def test_tasks_rotate_among_all_idle_engines(slower: float) -> None:
    """A session between two turns adds no load. An engine that always received the next session
    would be full of their KV. Measured costs always differ slightly."""
    bench, used = Bench(), set[int]()
    bench.engines(40)
    report(bench, [1.0 + slower * (number % 3) for number in range(40)])
    for number in range(80):
        task = bench.task(own_len=500, session=number)
        bench.add(task)
        (engine_id,) = bench.run().values()
        used.add(engine_id)
        bench.later(1.0)
        bench.scheduler.finished(task, engine_id)
    assert len(used) > 30


def test_a_block_is_split_by_speed() -> None:
    bench = Bench()
    bench.engines(2, slots=1000)
    report(bench, [1.0, 4.0])
    tasks = [bench.task(own_len=3000, group="g", criteria=THROUGHPUT, output=20) for _ in range(50)]
    bench.add(*tasks)
    placed = list(bench.run().values())
    assert 5 <= placed.count(1) <= 15  # A fifth would be 10.


def test_engines_without_costs_get_those_of_their_model() -> None:
    bench = Bench()
    bench.engines(1, model="slow", costs=StepCosts(step_s=0.1, prefill_s=0.001))
    bench.engines(1, model="slow")
    bench.engines(1, model="unknown")
    bench.add(bench.task(models=("slow",)))
    assert bench.run()
    pace = [bench.scheduler.engines.pace(models) for models in (("slow",), ("unknown",), ("none",))]
    assert pace[0].step_alone_s == pytest.approx(0.1, rel=0.01)
    assert pace[0].step_s == pytest.approx(0.1, rel=0.01)
    assert pace[1].step_alone_s == pace[2].step_alone_s == StepCosts().decode_step_s(1, 0)


def test_the_pace_follows_the_load() -> None:
    bench = Bench()
    bench.engines(2)
    idle_s = bench.scheduler.engines.pace(()).step_s
    bench.add(*[bench.task(own_len=20_000, session=i) for i in range(8)])
    placed = bench.run()
    busy_s = bench.scheduler.engines.pace(()).step_s
    assert busy_s > 1.2 * idle_s
    bench.scheduler.check_integrity()
    for task, engine_id in placed.items():
        bench.scheduler.finished(task, engine_id)
    assert bench.scheduler.engines.pace(()).step_s == pytest.approx(idle_s)


# Routers


def test_round_robin_takes_turns() -> None:
    bench = Bench(placer=RoundRobin)
    bench.engines(3)
    tasks = [bench.task("same", prefix_len=1000) for _ in range(7)]
    bench.add(*tasks)
    placed = bench.run()
    assert [placed[task] for task in tasks] == [0, 1, 2, 0, 1, 2, 0]


def test_round_robin_skips_engines_that_are_full() -> None:
    bench = Bench(placer=RoundRobin)
    bench.engines(1, slots=1)
    bench.engines(1, slots=3)
    bench.add(*[bench.task() for _ in range(5)])
    placed = list(bench.run().values())
    assert (placed.count(0), placed.count(1)) == (1, 3)


def test_prefix_aware_follows_earlier_placements() -> None:
    bench = Bench(placer=PrefixAware)
    bench.engines(3)
    for _ in range(3):
        tasks = [bench.task(text, prefix_len=1000) for text in ("a", "b", "c")]
        bench.add(*tasks)
        placed = bench.run()
        assert [placed[task] for task in tasks] == [0, 1, 2]
        for task in tasks:
            bench.scheduler.finished(task, placed[task])


def test_prefix_aware_ignores_short_matches_and_balances() -> None:
    bench = Bench(placer=PrefixAware)
    bench.engines(2, slots=1000)
    bench.add(*[bench.task("a", prefix_len=10, own_len=1000) for _ in range(10)])
    placed = list(bench.run().values())
    assert placed.count(0) == 5
    bench = Bench(placer=PrefixAware)
    bench.engines(2, slots=1000)
    bench.add(*[bench.task("a", prefix_len=1000) for _ in range(100)])
    placed = list(bench.run().values())
    assert placed == [0] * 65 + [1] * 35  # Until the difference in load is too large.


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_engines_of_the_model_are_chosen_and_bad_ones_avoided(placement: str) -> None:
    bench = Bench(placer=PLACEMENTS[placement])
    bench.engines(2, model="a")
    bench.engines(2, model="b")
    task = bench.task(models=("b",))
    task.failed_engines.add(2)
    bench.add(task)
    assert bench.run()[task] == 3
    other = bench.task(models=("b",))
    other.failed_engines.update({2, 3})
    bench.add(other)
    assert bench.run()[other] in (2, 3)


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_placement_ends_every_task(placement: str) -> None:
    bench = Bench(placer=PLACEMENTS[placement])
    bench.engines(3, slots=2, tokens=3000)
    tasks = [
        bench.task(
            f"text {i % 4}",
            prefix_len=300 * (i % 4),
            criteria=THROUGHPUT if i % 3 else LATENCY,
            group="g" if i % 2 else None,
        )
        for i in range(60)
    ]
    bench.add(*tasks)
    assert set(bench.order()) == set(tasks)
    bench.scheduler.check_integrity()
