import asyncio
import cProfile
import gc
from collections.abc import Callable

import pytest

from parrot.protocol.errors import (
    AlreadySet,
    Cancelled,
    Conflict,
    CyclicGraph,
    NoEngine,
    NotFound,
    SessionGone,
)
from parrot.protocol.fields import PerformanceCriteria as Criteria
from parrot.serve.graph.graph import SessionGraph
from tests.serve.graph.held_runner import HeldRunner, add_reader, link_call, make_graph
from tests.serve.graph.test_graph_machine import Slices
from tests.support.manual_clock import ManualClock
from tests.support.requests import given, made, native, semantic, taken, var_ids


@pytest.fixture
def runner() -> HeldRunner:
    return HeldRunner()


@pytest.fixture
def graph(runner: HeldRunner) -> SessionGraph:
    return make_graph(runner)


def test_tasks_run_only_with_demand(graph: SessionGraph, runner: HeldRunner) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    link_call(graph, "c", [a])
    assert runner.names() == []
    add_reader(graph, graph.variable(b), Criteria.LATENCY)
    assert runner.names() == ["a"]
    runner.finish(runner.started[0])
    assert runner.names() == ["b"]  # c has no demand.
    runner.finish(runner.started[0])
    assert runner.names() == []
    graph.check_integrity()


def test_output_criteria_adds_a_permanent_reader(graph: SessionGraph, runner: HeldRunner) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a], output_criteria="latency")
    assert runner.names() == ["a"]
    reader = add_reader(graph, graph.variable(b), Criteria.LATENCY)
    graph.activation.remove_reader(reader)
    assert runner.names() == ["a"]
    assert runner.withdrawn == []


def test_reading_the_first_of_two_outputs_does_not_run_the_second(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    ids = var_ids(graph.submit(semantic("a {{y}} b {{z}}", made("y"), made("z"))))
    add_reader(graph, graph.variable(ids["y"]), Criteria.LATENCY)
    runner.finish(runner.started[0])
    assert runner.names() == []
    add_reader(graph, graph.variable(ids["z"]), Criteria.LATENCY)
    assert runner.names() == ["z"]


def test_work_without_other_demand_is_withdrawn_upstream(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    shared = link_call(graph, "shared", [])
    alone = link_call(graph, "alone", [])
    both = link_call(graph, "both", [shared, alone])
    other = link_call(graph, "other", [shared])
    reader = add_reader(graph, graph.variable(both), Criteria.LATENCY)
    add_reader(graph, graph.variable(other), Criteria.LATENCY)
    assert runner.names() == ["shared", "alone"]
    runner.started[1].output.append("partial")  # type: ignore[union-attr]
    graph.activation.remove_reader(reader)
    graph.activation.remove_reader(reader)
    assert runner.names() == ["shared"]
    assert graph.variable(alone).partial_text == ""
    graph.check_integrity()


def test_withdrawn_work_runs_again_for_a_later_reader(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    for _ in range(3):
        graph.activation.remove_reader(add_reader(graph, graph.variable(b), Criteria.LATENCY))
    assert runner.names() == []
    add_reader(graph, graph.variable(b), Criteria.THROUGHPUT)
    assert runner.names() == ["a"]
    assert runner.started[0].objective is not None
    assert runner.started[0].objective.criteria is Criteria.THROUGHPUT
    graph.check_integrity()


def test_a_failure_reaches_every_dependent_with_its_type_and_chain(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [], func_name="first")
    b = link_call(graph, "b", [a], func_name="second")
    c = link_call(graph, "c", [b], func_name="third")
    free = link_call(graph, "free", [])
    late_reader = add_reader(graph, graph.variable(c), Criteria.LATENCY)
    add_reader(graph, graph.variable(free), Criteria.LATENCY)
    runner.fail(runner.started[0], NoEngine("nobody is there"))
    error = graph.variable(c).error
    assert isinstance(error, NoEngine)
    assert error.message == "`third` needs `b`, which failed: nobody is there"
    assert isinstance(error.__cause__, NoEngine)
    assert error.__cause__.__cause__ is graph.variable(a).error
    assert runner.names() == ["free"]  # An independent branch continues.
    graph.activation.remove_reader(late_reader)
    late = link_call(graph, "late", [c], func_name="fourth")
    error = graph.variable(late).error
    assert isinstance(error, NoEngine)
    assert error.message == "`fourth` needs `c`, which failed: nobody is there"
    graph.check_integrity()


def test_a_failed_input_stops_the_work_on_the_other_inputs(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    inputs = [link_call(graph, f"m{n}", []) for n in range(3)]
    reduce = link_call(graph, "reduce", inputs)
    add_reader(graph, graph.variable(reduce), Criteria.LATENCY)
    assert runner.names() == ["m0", "m1", "m2"]
    runner.fail(runner.started[1], NoEngine("gone"))
    assert runner.names() == []
    assert len(runner.withdrawn) == 2
    assert graph.variable(inputs[0]).error is None
    graph.check_integrity()


def test_cancelling_stops_producers_and_fails_consumers(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    c = link_call(graph, "c", [b])
    add_reader(graph, graph.variable(c), Criteria.LATENCY)
    graph.cancel_variable(b)
    assert runner.withdrawn  # a has no demand left.
    assert isinstance(graph.variable(b).error, Cancelled)
    assert isinstance(graph.variable(c).error, Cancelled)
    assert not graph.variable(a).is_settled
    graph.cancel_variable(b)  # A second cancellation has no effect.
    add_reader(graph, graph.variable(a), Criteria.LATENCY)
    graph.cancel_variable(a)
    assert len(runner.cancelled) == 1
    assert runner.started == []
    graph.check_integrity()


def test_cancelling_a_request_cancels_all_its_outputs(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    response = graph.submit(
        semantic("a {{y}} b {{z}}", made("y"), made("z"), output_criteria="latency")
    )
    graph.cancel_call(response.request_id)
    for name in ("y", "z"):
        error = graph.variable(var_ids(response)[name]).error
        assert isinstance(error, Cancelled)
    assert runner.started == []
    with pytest.raises(NotFound):
        graph.cancel_call(12345)
    graph.check_integrity()


def test_cancelling_a_variable_without_producer_fails_it(graph: SessionGraph) -> None:
    node = graph.add_variable("x")
    after = link_call(graph, "y", [node.id])
    graph.cancel_variable(node.id)
    assert isinstance(node.error, Cancelled)
    assert isinstance(graph.variable(after).error, Cancelled)


def test_the_program_sets_a_variable_late_and_once(graph: SessionGraph, runner: HeldRunner) -> None:
    node = graph.add_variable("x")
    y = link_call(graph, "y", [node.id], output_criteria="latency")
    assert runner.names() == []
    graph.set_variable(node.id, "text")
    assert runner.names() == ["y"]
    with pytest.raises(AlreadySet):
        graph.set_variable(node.id, "text")
    with pytest.raises(Conflict, match="output of a call"):
        graph.set_variable(y, "mine")
    with pytest.raises(NotFound):
        graph.set_variable("nowhere", "text")


def test_a_producer_may_come_after_its_readers(graph: SessionGraph, runner: HeldRunner) -> None:
    node = graph.add_variable("x")
    y = link_call(graph, "y", [node.id])
    add_reader(graph, graph.variable(y), Criteria.LATENCY)
    early = add_reader(graph, node, Criteria.TTFT)
    graph.submit(semantic("p {{o}}", made("o", node.id)))
    assert runner.names() == ["x"]
    assert runner.started[0].objective.criteria is Criteria.LATENCY  # type: ignore[union-attr]
    graph.activation.remove_reader(early)
    assert runner.names() == ["x"]
    runner.finish(runner.started[0])
    assert runner.names() == ["y"]
    graph.check_integrity()


def test_a_cycle_is_rejected_by_name_and_changes_nothing(graph: SessionGraph) -> None:
    a, b, c = (graph.add_variable(name) for name in "abc")
    ids = {name: node.id for name, node in zip("abc", (a, b, c), strict=True)}
    graph.submit(semantic("x {{i}} {{o}}", taken("i", ids["a"]), made("o", ids["b"])))
    graph.submit(semantic("x {{i}} {{o}}", taken("i", ids["b"]), made("o", ids["c"])))
    before = set(graph.variables), set(graph.calls)
    closing = semantic(
        "x {{v}} {{n}} {{i}} {{o}}",
        given("v", "1"),
        made("n"),
        taken("i", ids["c"]),
        made("o", ids["a"]),
    )
    with pytest.raises(CyclicGraph, match="`a` -> `b` -> `c` -> `a`"):
        graph.submit(closing)
    assert (set(graph.variables), set(graph.calls)) == before
    assert a.producer is None
    assert c.consumers == []
    with pytest.raises(CyclicGraph, match="`a` -> `a`"):
        graph.submit(semantic("x {{i}} {{o}}", taken("i", ids["a"]), made("o", ids["a"])))
    with pytest.raises(CyclicGraph):
        graph.submit(native("f", taken("i", ids["c"]), made("o", ids["a"])))
    graph.check_integrity()


def test_order_inside_a_call_is_not_a_cycle(graph: SessionGraph, runner: HeldRunner) -> None:
    """The second completion of a call may use a native function's result from the first."""
    x, b = graph.add_variable("x"), graph.add_variable("b")
    graph.submit(native("f", taken("i", x.id), made("o", b.id)))
    both = semantic(
        "s {{x}} then {{b}} {{y}}",
        made("x", x.id),
        taken("b", b.id),
        made("y"),
        output_criteria="latency",
    )
    graph.submit(both)
    for name in ("x", "b", "y"):
        assert runner.names() == [name]
        runner.finish(runner.started[0])
    graph.check_integrity()


def test_a_native_node_runs_when_any_of_its_outputs_is_wanted(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    x = link_call(graph, "x", [])
    response = graph.submit(native("f", taken("i", x), made("o"), made("p")))
    ids = var_ids(response)
    reader = add_reader(graph, graph.variable(ids["p"]), Criteria.LATENCY)
    runner.finish(runner.started[0])
    assert runner.names() == ["o,p"]
    graph.activation.remove_reader(reader)
    assert runner.started == []
    y = link_call(graph, "y", [ids["o"], ids["p"]])
    add_reader(graph, graph.variable(y), Criteria.LATENCY)
    runner.finish(runner.started[0])
    assert runner.names() == ["y"]
    graph.check_integrity()


async def test_a_stream_reader_is_reported_to_the_runner(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    x = link_call(graph, "x", [])
    y = link_call(graph, "y", [x], output_criteria="throughput")
    queued = runner.started[0]
    reader = add_reader(graph, graph.variable(x), Criteria.THROUGHPUT, wants_stream=True)
    assert queued.wants_stream  # type: ignore[union-attr]
    assert runner.reprioritised == [queued]
    add_reader(graph, graph.variable(x), Criteria.THROUGHPUT)
    graph.activation.remove_reader(reader)
    assert not queued.wants_stream  # type: ignore[union-attr]
    assert runner.reprioritised == [queued, queued]  # The remaining reader does not stream.
    add_reader(graph, graph.variable(y), Criteria.LATENCY)
    assert runner.reprioritised == [queued, queued, queued]  # Tightened by a reader of y.


def test_closing_cancels_all_tasks_and_variables(graph: SessionGraph, runner: HeldRunner) -> None:
    empty = graph.add_variable("empty")
    x = link_call(graph, "x", [])
    y = link_call(graph, "y", [x, empty.id], output_criteria="latency")
    list(graph.close(SessionGone("the session has expired")))
    for var_id in (x, y, empty.id):
        assert isinstance(graph.variable(var_id).error, SessionGone)
    assert runner.started == []
    assert graph.activation.num_started == 0
    graph.check_integrity()


def test_times_are_stamped(runner: HeldRunner) -> None:
    clock = ManualClock(start=10)
    graph = make_graph(runner, clock)
    x = link_call(graph, "x", [])
    y = link_call(graph, "y", [x])

    async def scenario() -> None:
        await clock.advance(1)
        add_reader(graph, graph.variable(y), Criteria.LATENCY)
        await clock.advance(1)
        runner.finish(runner.started[0])
        await clock.advance(1)
        runner.finish(runner.started[0])

    asyncio.run(scenario())
    node = graph.variable(y).producer
    assert node is not None
    times = node.times
    assert (times.submitted, times.activated, times.ready, times.finished) == (10, 11, 12, 13)


def chain(graph: SessionGraph, length: int, **fields: object) -> list[str]:
    ids = [link_call(graph, "v", [])]
    for _ in range(length - 1):
        ids.append(link_call(graph, "v", ids[-1:], **fields))
    return ids


def num_calls(work: Callable[[], object]) -> int:
    """The number of function calls, with built-in ones. Time would depend on other processes."""
    profile = cProfile.Profile()
    profile.runcall(work)
    return sum(entry.callcount for entry in profile.getstats())


def assert_not_quadratic(work: Callable[[int], object], size: int) -> None:
    """Four times the size costs about four times as much. Quadratic time would cost 16 times."""
    small, large = num_calls(lambda: work(size)), num_calls(lambda: work(4 * size))
    assert large < 5.5 * small, (small, large)


def run_and_fail_a_chain(length: int) -> SessionGraph:
    runner = HeldRunner(on_start=lambda task: runner.finish(task, "t"))
    graph = make_graph(runner)
    ids = chain(graph, length)
    add_reader(graph, graph.variable(ids[-1]), Criteria.LATENCY)
    assert all(graph.variable(var_id).is_settled for var_id in ids)
    runner.on_start = lambda task: runner.fail(task, NoEngine("gone"))
    ids = chain(graph, length, output_criteria="latency")  # Each call adds a reader.
    assert isinstance(graph.variable(ids[-1]).error, NoEngine)
    return graph


def test_three_thousand_calls_in_a_chain_run_fail_and_close() -> None:
    """Walks and errors use no recursion."""
    graph = run_and_fail_a_chain(3000)
    graph.check_integrity()
    graph.calls.clear()
    graph.variables.clear()
    gc.collect()  # A chain of 3,000 error causes is freed without recursion.


def test_a_chain_is_not_quadratic() -> None:
    assert_not_quadratic(run_and_fail_a_chain, 250)


def grow_a_waiting_chain(length: int, is_forward: bool) -> None:
    runner = HeldRunner()
    graph = make_graph(runner)
    gate = graph.add_variable("gate")
    links = [gate, *(graph.add_variable("v") for _ in range(length))]
    order = range(length) if is_forward else reversed(range(length))
    for n in order:
        call = semantic(
            "x {{i}} {{o}}",
            taken("i", links[n].id),
            made("o", links[n + 1].id),
            output_criteria="latency",
        )
        graph.submit(call)
    runner.on_start = lambda task: runner.finish(task, "t")
    graph.set_variable(gate.id, "go")
    assert links[-1].is_settled
    graph.check_integrity()


@pytest.mark.parametrize("is_forward", [True, False])
def test_a_waiting_chain_that_grows_under_demand_is_not_quadratic(is_forward: bool) -> None:
    assert_not_quadratic(lambda length: grow_a_waiting_chain(length, is_forward), 500)


def use_a_wide_stage(width: int) -> None:
    runner = HeldRunner()
    graph = make_graph(runner)
    ids = [link_call(graph, "m", []) for _ in range(width)]
    reduce = link_call(graph, "r", ids)
    for _ in range(width):  # Readers are added and removed.
        graph.activation.remove_reader(add_reader(graph, graph.variable(ids[0]), Criteria.LATENCY))
    add_reader(graph, graph.variable(reduce), Criteria.LATENCY)
    assert len(runner.started) == width
    for _ in range(width):
        graph.activation.remove_reader(add_reader(graph, graph.variable(reduce), Criteria.LATENCY))
    runner.started.sort(key=lambda task: -task.id)
    while runner.started:
        runner.finish(runner.started[-1])


def test_a_wide_stage_is_not_quadratic() -> None:
    assert_not_quadratic(use_a_wide_stage, 100)


def test_a_deadline_is_dropped_with_its_reader(graph: SessionGraph, runner: HeldRunner) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    c = link_call(graph, "c", [a])
    urgent = add_reader(graph, graph.variable(b), Criteria.LATENCY, deadline=5)
    add_reader(graph, graph.variable(c), Criteria.LATENCY, deadline=30)

    def deadlines() -> list[float | None]:
        objectives = [graph.variable(v).producer.objective for v in (a, b, c)]  # type: ignore[union-attr]
        return [None if o is None else o.deadline for o in objectives]

    assert deadlines() == [5, 5, 30]
    patient = add_reader(graph, graph.variable(b), Criteria.THROUGHPUT, deadline=50)
    graph.activation.remove_reader(urgent)
    assert deadlines() == [30, 50, 30]
    assert runner.reprioritised[-1].output.name == "a"
    graph.activation.remove_reader(patient)
    assert deadlines() == [30, None, 30]
    add_reader(graph, graph.variable(a), Criteria.LATENCY)
    graph.cancel_variable(c)
    assert deadlines()[:2] == [None, None]
    graph.check_integrity()


def objectives(graph: SessionGraph, *var_ids: str) -> list[tuple[Criteria, bool] | None]:
    """The criteria of each producer, and whether it is background work."""
    found = [graph.variable(var_id).producer.objective for var_id in var_ids]  # type: ignore[union-attr]
    return [None if o is None else (o.criteria, o.is_background) for o in found]


def test_unread_calls_run_in_the_background(graph: SessionGraph, runner: HeldRunner) -> None:
    parts = [link_call(graph, f"p{n}", []) for n in range(3)]
    lazy = link_call(graph, "lazy", [], on_demand=True)
    needed = link_call(graph, "needed", [], on_demand=True)
    link_call(graph, "needs", [needed])
    add_reader(graph, graph.variable(parts[1]), Criteria.LATENCY)
    assert runner.names() == ["p1"]
    graph.activation.start_background()
    assert sorted(runner.names()) == ["needed", "p0", "p1", "p2"]
    assert objectives(graph, *parts, needed, lazy) == [
        (Criteria.THROUGHPUT, True),
        (Criteria.LATENCY, False),
        (Criteria.THROUGHPUT, True),
        (Criteria.THROUGHPUT, True),
        None,
    ]
    later = link_call(graph, "later", [])
    assert "later" not in runner.names()
    assert not graph.activation.start_background()
    assert "later" in runner.names()
    add_reader(graph, graph.variable(later), Criteria.TTFT)
    assert objectives(graph, later) == [(Criteria.TTFT, False)]
    assert runner.reprioritised[-1].output.name == "later"
    graph.check_integrity()


def test_an_on_demand_session_runs_only_permitted_calls_in_the_background(
    runner: HeldRunner,
) -> None:
    graph = make_graph(runner, on_demand=True)
    link_call(graph, "a", [])
    link_call(graph, "b", [], on_demand=False)
    graph.activation.start_background()
    assert runner.names() == ["b"]


def test_a_reader_raises_the_background_work_upstream_and_stops_it_when_it_leaves(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    other = link_call(graph, "other", [a])
    graph.activation.start_background()
    assert objectives(graph, a, b) == [(Criteria.THROUGHPUT, True)] * 2
    reader = add_reader(graph, graph.variable(b), Criteria.LATENCY)
    assert objectives(graph, a, b) == [(Criteria.LATENCY, False)] * 2
    graph.activation.remove_reader(reader)
    assert objectives(graph, b, other) == [None, (Criteria.THROUGHPUT, True)]
    # `other` still needs it. The criteria stays strict.
    assert objectives(graph, a) == [(Criteria.LATENCY, True)]
    assert runner.names() == ["a"]
    graph.cancel_variable(other)
    assert runner.names() == ["a"]  # It still has background demand.
    graph.check_integrity()


def test_work_of_a_reader_that_left_stops_although_it_was_background_work(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    free = link_call(graph, "free", [])
    graph.activation.start_background()
    graph.activation.remove_reader(add_reader(graph, graph.variable(b), Criteria.LATENCY))
    assert runner.names() == ["free"]
    assert objectives(graph, a, b, free) == [None, None, (Criteria.THROUGHPUT, True)]
    add_reader(graph, graph.variable(b), Criteria.LATENCY)
    assert runner.names() == ["free", "a"]
    graph.check_integrity()


def test_consumers_of_a_released_variable_do_not_run_in_the_background(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    draft, other = link_call(graph, "draft", []), link_call(graph, "other", [])
    rating = link_call(graph, "rating", [draft, other])
    final = link_call(graph, "final", [rating])
    graph.activation.start_background()
    assert runner.names() == ["draft", "other"]
    graph.activation.release(graph.variable(draft))
    assert runner.names() == ["other"]
    assert objectives(graph, draft, rating, final) == [None] * 3
    graph.check_integrity()
    reader = add_reader(graph, graph.variable(final), Criteria.LATENCY)
    graph.activation.release(graph.variable(draft))
    assert runner.names() == ["other", "draft"]  # `draft` has a reader.
    graph.activation.remove_reader(reader)
    assert runner.names() == []
    graph.check_integrity()


def test_calls_released_before_the_background_start_stay_idle(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    graph.activation.release(graph.variable(a))
    graph.activation.start_background()
    assert runner.names() == []


def test_cancellation_and_closing_stop_background_work(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    response = graph.submit(semantic("a {{y}}", made("y")))
    b = link_call(graph, "b", [])
    link_call(graph, "c", [])
    graph.activation.start_background()
    graph.cancel_call(response.request_id)
    graph.cancel_variable(b)
    assert runner.names() == ["c"]
    list(graph.close(SessionGone("the session has expired")))
    assert runner.names() == []
    assert graph.activation.num_started == 0


def test_calls_whose_reader_left_before_the_background_start_stay_idle(
    graph: SessionGraph, runner: HeldRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    lazy = link_call(graph, "lazy", [b], on_demand=True)
    link_call(graph, "c", [lazy])
    link_call(graph, "free", [])
    graph.activation.remove_reader(add_reader(graph, graph.variable(b), Criteria.LATENCY))
    graph.activation.start_background()
    assert runner.names() == ["free"]
    graph.check_integrity()


async def test_background_calls_start_in_the_order_of_submission(runner: HeldRunner) -> None:
    clock = ManualClock(start=10)
    graph = make_graph(runner, clock)
    link_call(graph, "early", [])
    await clock.advance(2)
    link_call(graph, "late", [])
    assert graph.activation.start_background(until=11)
    assert runner.names() == ["early"]
    assert not graph.activation.start_background(until=12)
    assert runner.names() == ["early", "late"]
    graph.check_integrity()


def test_many_background_calls_start_in_slices(runner: HeldRunner) -> None:
    graph = make_graph(runner, ManualClock(start=10))
    for n in range(600):
        link_call(graph, f"p{n}", [])
    assert graph.activation.start_background()
    assert len(runner.names()) == 512
    assert not graph.activation.start_background()
    assert runner.names() == [f"p{n}" for n in range(600)]
    graph.check_integrity()


@pytest.mark.parametrize("read_as", list(Criteria))
def test_a_call_whose_input_the_program_sets_gets_the_criteria_of_the_last_read(
    graph: SessionGraph, runner: HeldRunner, read_as: Criteria
) -> None:
    """Only the call that takes the input gets the criteria. Calls downstream of it and calls of a
    stage do not."""
    facts = [graph.add_variable("fact").id for _ in range(3)]
    used, other = link_call(graph, "used", facts[:2]), link_call(graph, "other", [])
    behind = link_call(graph, "behind", [used])
    parts = [link_call(graph, f"part{n}", [facts[2]]) for n in range(2)]
    link_call(graph, "total", parts)
    reader = add_reader(graph, graph.variable(link_call(graph, "first", [])), read_as)
    graph.activation.start_background()
    runner.finish(runner.started[0])
    assert reader.variable.is_settled
    graph.set_variable(facts[0], "text")
    assert objectives(graph, used) == [(Criteria.THROUGHPUT, True)]
    for fact in facts[1:]:
        graph.set_variable(fact, "text")
    assert runner.names() == ["other", "used", "part0", "part1"]
    assert objectives(graph, used, other, *parts) == [
        (read_as, True),
        *[(Criteria.THROUGHPUT, True)] * 3,
    ]
    runner.finish(runner.started[1])
    # A call made its input, not the program.
    assert objectives(graph, behind) == [(Criteria.THROUGHPUT, True)]
    graph.check_integrity()


def test_a_reader_that_leaves_during_the_walk_leaves_background_work(
    runner: HeldRunner,
) -> None:
    backlog = Slices(per_slice=1)
    graph = make_graph(runner, backlog=backlog)
    call = link_call(graph, "call", [])
    graph.activation.start_background()
    backlog.finish()
    for n in range(3):
        link_call(graph, f"c{n}", [])
    graph.activation.start_background()
    graph.activation.remove_reader(add_reader(graph, graph.variable(call), Criteria.LATENCY))
    backlog.finish()
    assert objectives(graph, call) == [(Criteria.LATENCY, True)]
    graph.check_integrity()
