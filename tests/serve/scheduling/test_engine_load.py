"""The predicted load of an engine: its usual load, harm to other tasks, and step costs."""

import pytest

from parrot.protocol.engine_api import ServerLoad, StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.scheduling.load import EngineLoad, LoadIndex, latency_weight
from tests.serve.scheduling.scheduler_bench import LATENCY, THROUGHPUT, Bench


def engine_of(bench: Bench, engine_id: int = 0) -> EngineLoad:
    load = bench.scheduler.engines.get(engine_id)
    assert load is not None
    return load


def test_averages_do_not_depend_on_how_often_they_are_updated() -> None:
    costs = StepCosts(token_s=0.0)
    load = {"num_tasks": 4, "num_read": 1000, "weight": 40.0, "prefill_until": 2.0}
    index = LoadIndex()
    often, seldom = [EngineLoad(index, i, "m", 9, 9999, 9999, costs, **load) for i in range(2)]
    for tenth in range(1, 51):
        often.outlook(tenth / 10)
    later = seldom.outlook(5.0)
    assert often.outlook(5.0) == pytest.approx(later)
    assert 0 < seldom.usual_tasks < 4
    assert seldom.usual_read / seldom.usual_tasks == pytest.approx(250)
    assert later.usual_weight / seldom.usual_tasks == pytest.approx(10)
    stretch = later.usual_step_s / costs.decode_step_s(seldom.usual_tasks, 0)
    assert 1 < stretch < 1.2
    often.num_tasks, often.num_read, often.weight = 0, 0, 0.0
    idle = often.outlook(1000.0)
    assert idle.usual_weight == pytest.approx(0.0, abs=1e-9)
    assert idle.usual_step_s == pytest.approx(costs.decode_step_s(0, 0))


def test_steps_have_the_present_length_first_and_the_usual_length_later() -> None:
    bench = Bench()
    bench.engines(1)
    load = engine_of(bench)
    assert load.outlook(0.0).steps_s(1000) == pytest.approx(1000 * load.step_s)
    bench.add(*[bench.task(own_len=2000, output=100) for _ in range(50)])
    bench.run()
    outlook = load.outlook(bench.clock.now())
    left_s = outlook.remaining_s
    assert outlook.steps_s(10) == pytest.approx(10 * load.step_s)
    idle_s = StepCosts().step_s  # No task has run, so the usual load is 0.
    rest = 5000 - left_s / load.step_s
    assert outlook.steps_s(5000) == pytest.approx(left_s + rest * idle_s, rel=0.01)


def test_an_engine_whose_tasks_have_finished_has_no_wait() -> None:
    bench = Bench()
    bench.engines(1)
    task = bench.task(own_len=100_000)
    bench.add(task)
    bench.run()
    assert engine_of(bench).outlook(bench.clock.now()).wait_s > 1.0
    bench.scheduler.finished(task, 0)
    outlook = engine_of(bench).outlook(bench.clock.now())
    assert (outlook.wait_s, outlook.remaining_s, outlook.weight) == (0.0, 0.0, 0.0)


def test_present_tasks_wait_for_the_prompt_of_a_new_task() -> None:
    bench = Bench()
    bench.engines(1)
    task = bench.task(output=2000)
    bench.add(task)
    bench.run()
    outlook = engine_of(bench).outlook(bench.clock.now())
    assert outlook.remaining_s > 1.0
    assert outlook.harm_s(0.5, 0, 0.0) == pytest.approx(0.5 * latency_weight(task))
    assert outlook.harm_s(0.5, 10, 1e-3) == pytest.approx(0.51 * latency_weight(task))
    assert outlook.harm_s(1e9, 0, 0.0) == pytest.approx(outlook.remaining_s * latency_weight(task))


def test_harm_includes_the_usual_load() -> None:
    bench = Bench()
    bench.engines(1)
    load = engine_of(bench)
    assert load.outlook(0.0).harm_s(1.0, 1000, 1e-3) == 0.0
    for _ in range(30):
        task = bench.task()
        bench.add(task)
        bench.run()
        bench.later(1.0)
        bench.scheduler.finished(task, 0)
    now = bench.clock.now()
    assert not load.num_tasks
    assert load.outlook(now).usual_weight > 1.0
    assert load.outlook(now).harm_s(1.0, 1000, 1e-3) == pytest.approx(
        load.outlook(now).usual_weight
    )


def test_a_chat_goes_where_its_steps_will_be_short() -> None:
    """Engine 0 is idle for a moment. Engine 1 always has little work."""
    bench = Bench()
    bench.engines(2, slots=1000)
    for _ in range(20):
        maps = [bench.task(session=2, criteria=THROUGHPUT, own_len=1000) for _ in range(80)]
        one = bench.task(session=3, criteria=THROUGHPUT, own_len=1000)
        for task in maps:
            task.failed_engines.add(1)
        one.failed_engines.add(0)
        bench.add(*maps, one)
        placed = bench.run()
        assert placed[one] == 1
        assert {placed[task] for task in maps} == {0}
        bench.later(4.0)
        for task in maps:
            bench.scheduler.finished(task, 0)
        if len(engine_of(bench, 1).tasks) > 3:
            bench.scheduler.finished(next(iter(engine_of(bench, 1).tasks)), 1)
    chat = bench.task(session=1, output=1000)
    bench.add(chat)
    assert bench.run() == {chat: 1}


@pytest.mark.parametrize("is_streamed", [True, False])
def test_the_weight_of_a_stream_depends_on_its_output_length(is_streamed: bool) -> None:
    bench = Bench()
    bench.engines(1)
    criteria = LATENCY if is_streamed else PerformanceCriteria.TPOT
    short, long = [bench.task(output=output, criteria=criteria) for output in (400, 1600)]
    for task in (short, long):
        task.completion.wants_stream = is_streamed
    assert latency_weight(short) == pytest.approx(4 * latency_weight(long), rel=0.01)
    bench.add(short, long)
    bench.run()
    assert engine_of(bench).weight == pytest.approx(latency_weight(short) + latency_weight(long))


def test_the_weight_of_a_whole_value_does_not_depend_on_its_length() -> None:
    bench = Bench()
    short, long = bench.task(output=100), bench.task(output=1000)
    assert latency_weight(short) == latency_weight(long) > 1.0
    assert latency_weight(bench.task(output=100, criteria=THROUGHPUT)) == 1.0


def test_an_engine_without_costs_gets_the_median_of_its_model_and_device() -> None:
    bench = Bench()
    bench.engines(6)
    engines = bench.scheduler.engines
    fast, middle, slow = [StepCosts(step_s=seconds) for seconds in (0.01, 0.02, 0.5)]
    engines.reported(0, device="A")
    assert engine_of(bench, 0).costs == StepCosts()
    engines.reported(4, StepCosts(step_s=0.1), device="B")
    engines.reported(0, device="A")
    assert engine_of(bench, 0).costs.step_s == 0.1  # The last report of the model.
    for engine_id, own in enumerate((slow, fast, middle), 1):
        engines.reported(engine_id, own, device="A")
    for _ in range(2):
        engines.reported(0, device="A")
        assert engine_of(bench, 0).costs == middle
        assert engine_of(bench, 1).costs == slow  # Its own costs.
        engines.reported(1, device="A")
    engines.remove(2)
    engines.remove(3)
    engines.reported(0, device="A")
    assert engine_of(bench, 0).costs == slow
    engines.reported(0, fast, device="A")
    engines.reported(0, device="A")
    assert engine_of(bench, 0).costs == fast
    engines.reported(0, device="B")  # The server reports its device later.
    engines.reported(5, device="B")
    assert engine_of(bench, 5).costs in (fast, StepCosts(step_s=0.1))
    for engine_id in (0, 1, 4, 5):
        engines.remove(engine_id)
    bench.engines(1)
    # The last costs of the model, although no engine was left.
    assert engine_of(bench, 6).costs == fast
    assert not engines._measured


def test_costs_reported_at_registration_count_for_other_engines() -> None:
    bench = Bench()
    costs = StepCosts(step_s=0.7)
    bench.engines(1)
    bench.engines(1, costs=costs)
    for engine_id in (1, 0):
        bench.scheduler.engines.reported(engine_id, device="A")
        assert engine_of(bench, engine_id).costs == costs


def test_requests_of_a_servers_other_clients_are_load() -> None:
    """Requests of other clients lengthen steps, and a new task waits for those that wait there."""
    bench = Bench()
    bench.engines(2)
    idle, shared = engine_of(bench, 0), engine_of(bench, 1)
    server = ServerLoad(num_running=20, num_others=20, other_tokens=10_000)
    bench.scheduler.engines.reported(shared.id, server=server)
    assert shared.step_s == idle.costs.decode_step_s(20, 10_000)
    now = bench.clock.now()
    assert shared.outlook(now).wait_s == 0.0
    full = server.model_copy(update={"num_waiting": 20, "num_others": 40})
    bench.scheduler.engines.reported(shared.id, server=full)
    assert shared.outlook(now).wait_s == pytest.approx(300 * shared.step_s)

    tasks = [bench.task(output=100) for _ in range(8)]
    bench.add(*tasks)
    bench.run()
    assert (idle.num_tasks, shared.num_tasks) == (8, 0)
    bench.scheduler.engines.reported(shared.id)
    assert shared.step_s == shared.costs.decode_step_s(0, 0)
    bench.add(bench.task(output=100))
    bench.run()
    assert shared.num_tasks == 1
    bench.scheduler.check_integrity()
