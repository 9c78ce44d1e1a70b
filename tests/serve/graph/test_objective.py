import itertools

import networkx as nx
import pytest
from hypothesis import given as fuzz
from hypothesis import strategies as st

from parrot.protocol.errors import CyclicGraph
from parrot.protocol.fields import PerformanceCriteria as Criteria
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import Objective, Prediction, Task
from parrot.serve.graph.objective import strictest
from parrot.serve.scheduling.load import LoadIndex
from parrot.serve.scheduling.task import Estimates
from tests.serve.graph.held_runner import HeldRunner, add_reader, link_call, make_graph
from tests.support.requests import made, native, semantic, taken, var_ids

ESTIMATES = Estimates(LoadIndex().pace)


def task(graph: SessionGraph, var_id: str) -> Task:
    producer = graph.variable(var_id).producer
    assert producer is not None
    return producer


def objective(graph: SessionGraph, var_id: str) -> Objective:
    found = task(graph, var_id).objective
    assert found is not None
    return found


@pytest.fixture
def graph() -> SessionGraph:
    return make_graph()


def test_a_map_stage_is_throughput_work_in_one_task_group(graph: SessionGraph) -> None:
    split = link_call(graph, "split", [])
    maps = [link_call(graph, f"map{n}", [split]) for n in range(4)]
    reduce = link_call(graph, "reduce", maps)
    final = link_call(graph, "final", [reduce])
    add_reader(graph, graph.variable(final), Criteria.LATENCY)
    assert objective(graph, final).criteria is Criteria.LATENCY
    assert objective(graph, reduce).criteria is Criteria.LATENCY
    assert objective(graph, final).task_group is None
    assert {objective(graph, m).criteria for m in maps} == {Criteria.THROUGHPUT}
    assert {objective(graph, m).task_group for m in maps} == {str(task(graph, reduce).id)}
    assert objective(graph, split).criteria is Criteria.THROUGHPUT
    assert objective(graph, split).task_group is None
    depths = [objective(graph, v).depth for v in (final, reduce, maps[0], split)]
    assert depths == [0, 1, 2, 3]


def test_a_stage_that_two_calls_read_is_throughput_work(graph: SessionGraph) -> None:
    maps = [link_call(graph, f"map{n}", []) for n in range(3)]
    readers = [link_call(graph, name, maps) for name in ("summary", "title")]
    for variable in readers:
        add_reader(graph, graph.variable(variable), Criteria.LATENCY)
    assert {objective(graph, m).criteria for m in maps} == {Criteria.THROUGHPUT}


@pytest.mark.parametrize("criteria", list(Criteria))
def test_a_chain_has_the_criteria_of_its_reader(graph: SessionGraph, criteria: Criteria) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    c = link_call(graph, "c", [b, a])  # It also takes a, which is before b: still a chain.
    add_reader(graph, graph.variable(c), criteria)
    before = Criteria.THROUGHPUT if criteria is Criteria.THROUGHPUT else Criteria.LATENCY
    assert objective(graph, c).criteria is criteria
    assert objective(graph, b).criteria is before
    assert objective(graph, a).criteria is before
    assert objective(graph, a).task_group is None


@pytest.mark.parametrize("deadlines", [(40, 60), (60, 40)])
def test_a_task_with_two_consumers_has_the_earlier_deadline(
    graph: SessionGraph, deadlines: tuple[int, int]
) -> None:
    shared = link_call(graph, "shared", [])
    ends = [link_call(graph, f"end{n}", [shared]) for n in range(2)]
    for end, deadline in zip(ends, deadlines, strict=True):
        add_reader(graph, graph.variable(end), Criteria.LATENCY, deadline=deadline)
    assert objective(graph, shared).deadline == 40


@pytest.mark.parametrize("deadlines", [(40, 60), (60, 40)])
def test_a_call_submitted_after_its_readers_has_the_earlier_deadline(
    graph: SessionGraph, deadlines: tuple[int, int]
) -> None:
    variable = graph.add_variable("x")
    for deadline in deadlines:
        add_reader(graph, variable, Criteria.LATENCY, deadline=deadline)
    graph.submit(semantic("a {{y}}", made("y", variable.id)))
    assert objective(graph, variable.id).deadline == 40


def test_a_later_stricter_reader_tightens_all_producers(graph: SessionGraph) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    c = link_call(graph, "c", [b])
    add_reader(graph, graph.variable(c), Criteria.THROUGHPUT)
    assert objective(graph, a).criteria is Criteria.THROUGHPUT
    add_reader(graph, graph.variable(b), Criteria.TTFT, deadline=50)
    assert objective(graph, c).criteria is Criteria.THROUGHPUT
    assert objective(graph, b).criteria is Criteria.TTFT
    assert objective(graph, a).criteria is Criteria.LATENCY
    assert (objective(graph, b).deadline, objective(graph, a).deadline) == (50, 50)
    add_reader(graph, graph.variable(c), Criteria.TPOT, deadline=40)
    assert objective(graph, c).criteria is Criteria.TPOT
    assert objective(graph, b).criteria is Criteria.LATENCY
    assert objective(graph, a).deadline == 40
    add_reader(graph, graph.variable(c), Criteria.THROUGHPUT, deadline=60)
    assert objective(graph, c).criteria is Criteria.TPOT  # The criteria stays strict.
    assert objective(graph, c).deadline == 40


def test_one_task_of_a_stage_can_have_a_stricter_reader(graph: SessionGraph) -> None:
    maps = [link_call(graph, f"map{n}", []) for n in range(3)]
    reduce = link_call(graph, "reduce", maps)
    add_reader(graph, graph.variable(reduce), Criteria.LATENCY)
    add_reader(graph, graph.variable(maps[1]), Criteria.LATENCY)
    found = [objective(graph, m).criteria for m in maps]
    assert found == [Criteria.THROUGHPUT, Criteria.LATENCY, Criteria.THROUGHPUT]


def test_a_longer_path_reaches_waiting_producers(graph: SessionGraph) -> None:
    gate = graph.add_variable("gate").id
    a = link_call(graph, "a", [gate], output_criteria="throughput")
    alone = objective(graph, a)
    b = link_call(graph, "b", [a], output_criteria="throughput")
    assert objective(graph, a).depth == alone.depth + 1
    expected = alone.remaining_path_s + objective(graph, b).remaining_path_s
    assert objective(graph, a).remaining_path_s == pytest.approx(expected)


@pytest.mark.parametrize("num_turns", [2, 3, 6])
def test_turns_that_take_all_earlier_turns_are_not_a_stage(
    graph: SessionGraph, num_turns: int
) -> None:
    """This also holds for the first turn, which is wanted before the others."""
    turns = list[str]()
    for number in range(num_turns):
        turns.append(link_call(graph, f"turn{number}", turns))
    add_reader(graph, graph.variable(turns[0]), Criteria.LATENCY)
    graph.activation.start_background()
    depths = [objective(graph, turn).depth for turn in turns]
    assert depths == list(reversed(range(num_turns)))
    assert {objective(graph, turn).task_group for turn in turns} == {None}


def test_queued_work_is_reprioritised_when_it_gets_stricter() -> None:
    runner = HeldRunner()
    graph = make_graph(runner)
    a = link_call(graph, "a", [], output_criteria="throughput")
    add_reader(graph, graph.variable(a), Criteria.THROUGHPUT)
    assert runner.reprioritised == []
    add_reader(graph, graph.variable(a), Criteria.LATENCY)
    assert runner.reprioritised == [task(graph, a)]


def test_a_native_function_passes_urgency_on(graph: SessionGraph) -> None:
    a = link_call(graph, "a", [])
    o = var_ids(graph.submit(native("f", taken("i", a), made("o"))))["o"]
    b = link_call(graph, "b", [o])
    add_reader(graph, graph.variable(b), Criteria.TPOT)
    assert objective(graph, o).criteria is Criteria.LATENCY
    assert objective(graph, a).criteria is Criteria.LATENCY
    assert objective(graph, a).depth == 2


def test_the_second_output_of_a_call_is_after_the_first(graph: SessionGraph) -> None:
    ids = var_ids(graph.submit(semantic("a {{y}} b {{z}}", made("y"), made("z"))))
    add_reader(graph, graph.variable(ids["z"]), Criteria.LATENCY)
    assert objective(graph, ids["y"]).depth == 1
    assert objective(graph, ids["y"]).criteria is Criteria.LATENCY


def test_strictest_is_a_least_upper_bound() -> None:
    def covers(a: Criteria, b: Criteria) -> bool:
        return strictest(a, b) is a

    for a, b in itertools.product(Criteria, repeat=2):
        upper = strictest(a, b)
        assert upper is strictest(b, a)
        assert covers(upper, a)
        assert covers(upper, b)
        assert not any(covers(c, a) and covers(c, b) and not covers(c, upper) for c in Criteria)


@st.composite
def dags(draw: st.DrawFn) -> list[tuple[int, list[int]]]:
    """Tasks in topological order: (max_gen_length, indices of earlier tasks it takes)."""
    tasks: list[tuple[int, list[int]]] = []
    for n in range(draw(st.integers(1, 12))):
        inputs = draw(st.lists(st.integers(0, n - 1), unique=True, max_size=4)) if n else []
        tasks.append((draw(st.integers(1, 400)), inputs))
    return tasks


@fuzz(dags(), st.data())
def test_paths_and_depths_equal_the_longest_paths_of_networkx(
    tasks: list[tuple[int, list[int]]], data: st.DataObject
) -> None:
    graph = make_graph()
    gate = graph.add_variable("gate").id
    ids: list[str] = []
    for length, inputs in tasks:
        taken_ids = [ids[i] for i in inputs] or [gate]
        parameters = [taken(f"i{n}", var_id) for n, var_id in enumerate(taken_ids)]
        template = "".join(f"t {{{{{p['name']}}}}}" for p in parameters) + "{{o}}"
        request = semantic(template, *parameters, made("o", max_gen_length=length))
        ids.append(var_ids(graph.submit(request))["o"])
    sink = data.draw(st.integers(0, len(ids) - 1))
    add_reader(graph, graph.variable(ids[sink]), Criteria.LATENCY)

    oracle = nx.DiGraph()
    oracle.add_nodes_from(range(len(tasks)))
    for consumer, (_, inputs) in enumerate(tasks):
        for producer in inputs:
            oracle.add_edge(producer, consumer)
    for n, var_id in enumerate(ids):
        if n != sink and not nx.has_path(oracle, n, sink):
            assert task(graph, var_id).objective is None
            continue
        paths = list(nx.all_simple_paths(oracle, n, sink)) if n != sink else [[sink]]
        seconds = max(
            sum(ESTIMATES.predict(task(graph, ids[i])).seconds for i in path) for path in paths
        )
        found = objective(graph, var_id)
        assert found.remaining_path_s == pytest.approx(seconds)
        assert found.depth == max(len(path) for path in paths) - 1
        group = found.task_group
        if group is not None:
            (consumer,) = (v for v in ids if str(task(graph, v).id) == group)
            stage = [ids[i] for i in tasks[ids.index(consumer)][1]]
            assert var_id in stage
            assert sum(objective(graph, v).depth == found.depth for v in stage) > 1
            assert objective(graph, consumer).depth == found.depth - 1
    graph.check_integrity()


@fuzz(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), max_size=14))
def test_exactly_the_edges_that_close_a_cycle_are_rejected(edges: list[tuple[int, int]]) -> None:
    """For each pair (a, b), submit a call from variable a to variable b, if b has no producer."""
    graph = make_graph()
    variables = [graph.add_variable(str(n)) for n in range(8)]
    oracle = nx.DiGraph()
    oracle.add_nodes_from(range(8))
    for a, b in edges:
        if variables[b].producer is not None:
            continue
        closes = a == b or nx.has_path(oracle, b, a)
        request = semantic(
            "x {{i}} {{o}}",
            taken("i", variables[a].id),
            made("o", variables[b].id),
        )
        if closes:
            with pytest.raises(CyclicGraph):
                graph.submit(request)
            assert variables[b].producer is None
        else:
            graph.submit(request)
            oracle.add_edge(a, b)
    assert nx.is_directed_acyclic_graph(oracle)
    graph.check_integrity()


class Price:
    """Predicts the seconds that the test sets for the name of the output."""

    def __init__(self, **seconds: float) -> None:
        self.by_name = seconds

    def predict(self, task: Task) -> Prediction:
        (variable,) = task.outputs
        seconds = self.by_name[variable.name]
        return Prediction(seconds, seconds)


def test_finished_tasks_are_not_part_of_the_remaining_work() -> None:
    runner, price = HeldRunner(), Price(a=1.0, b=2.0, c=4.0, d=8.0)
    graph = make_graph(runner, predictor=price)
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    c = link_call(graph, "c", [a])
    d = link_call(graph, "d", [b, c])
    reader = add_reader(graph, graph.variable(d), Criteria.LATENCY)
    assert runner.remaining_s == {7: 15.0}
    assert objective(graph, a).remaining_path_s == 13.0  # The path through c.
    runner.finish(task(graph, a))
    assert runner.remaining_s == {7: 14.0}
    runner.finish(task(graph, c))
    assert runner.remaining_s == {7: 10.0}
    assert objective(graph, b).remaining_path_s == 10.0
    graph.activation.remove_reader(reader)
    assert runner.remaining_s == {7: 0.0}
    add_reader(graph, graph.variable(d), Criteria.LATENCY)
    assert runner.remaining_s == {7: 10.0}
    graph.check_integrity()


def test_calls_submitted_later_add_to_the_remaining_work() -> None:
    runner, price = HeldRunner(), Price(a=1.0, b=2.0, c=4.0)
    graph = make_graph(runner, predictor=price)
    a = link_call(graph, "a", [], output_criteria="latency")
    assert runner.remaining_s == {7: 1.0}
    b = link_call(graph, "b", [a], output_criteria="latency")
    link_call(graph, "c", [b], output_criteria="latency")
    assert runner.remaining_s == {7: 7.0}
    assert objective(graph, a).remaining_path_s == 7.0
    assert runner.reprioritised == [task(graph, a), task(graph, a)]
    runner.finish(task(graph, a))
    assert objective(graph, b).remaining_path_s == 6.0


def test_new_statistics_reach_wanted_tasks() -> None:
    runner, price = HeldRunner(), Price(a=10.0, b=10.0, c=10.0)
    graph = make_graph(runner, predictor=price)
    a = link_call(graph, "a", [])
    other = link_call(graph, "a", [])  # Another call of the same function.
    b = link_call(graph, "b", [a, other])
    c = link_call(graph, "c", [b])
    add_reader(graph, graph.variable(c), Criteria.LATENCY)
    assert objective(graph, a).remaining_path_s == 30.0
    price.by_name = {"a": 1.0, "b": 1.0, "c": 1.0}
    runner.finish(task(graph, a))
    assert runner.reprioritised == [task(graph, other)]
    assert objective(graph, other).remaining_path_s == 3.0
    assert runner.remaining_s == {7: 3.0}
    price.by_name = {"a": 1.0, "b": 5.0, "c": 1.0}
    runner.finish(task(graph, other))
    assert objective(graph, b).remaining_path_s == 6.0  # Its inputs are complete.
    graph.check_integrity()
