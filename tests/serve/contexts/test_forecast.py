"""Ready prefixes of waiting completions, and forecasts of their missing inputs."""

from collections import Counter
from collections.abc import Iterable
from itertools import accumulate
from math import inf

import pytest
from hypothesis import settings
from hypothesis.stateful import invariant

from parrot.protocol.errors import EngineFailed
from parrot.protocol.fields import PerformanceCriteria as Criteria
from parrot.serve.contexts.forecast import GROUP_SIZE, Expectations, Forecast, ReadyPrefixes
from parrot.serve.graph.graph import SessionGraph
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.prompts.segments import PrefixHasher, Segment
from tests.serve.graph.held_runner import HeldRunner, add_reader, link_call, make_graph
from tests.serve.graph.test_graph_machine import GraphMachine
from tests.support.manual_clock import ManualClock
from tests.support.prompts import prefix_keys, prompt_segments
from tests.support.requests import given, made, native, semantic, taken, var_ids

HASHER = PrefixHasher(b"a secret")


class Uses(Expectations):
    """Expectations that record all pairs of prefix key and forecast."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: set[tuple[bytes, Forecast]] = set()

    @property
    def counts(self) -> Counter[bytes]:
        return Counter(key for key, _ in self.pairs)

    @property
    def forecasts(self) -> dict[bytes, Forecast]:
        return dict(self.pairs)

    def add_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        self.pairs.update((key, forecast) for key in keys)

    def remove_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        removed = {(key, forecast) for key in keys}
        assert {other for other in self.pairs if other[1] is forecast} == removed
        self.pairs -= removed


class ForecastingRunner(HeldRunner):
    """Starts completions with their prompts, as the dispatcher does, and records ready prefixes."""

    def __init__(self) -> None:
        super().__init__()
        self.uses = Uses()
        self.prefixes = ReadyPrefixes(self.uses, HASHER)
        self.texts: dict[Completion, list[str]] = {}
        self.num_grown = 0

    def expect(self, completion: Completion, forecast: Forecast) -> None:
        super().expect(completion, forecast)
        prefix = self.prefixes.expect(completion, forecast)
        if prefix is not None:
            assert len(prefix.segments) == len(prefix.keys) > len(self.texts.get(completion, []))
            self.texts[completion] = [segment.text for segment in prefix.segments]
            self.num_grown += 1

    def stop_expecting(self, completion: Completion) -> None:
        super().stop_expecting(completion)
        self.prefixes.drop(completion)
        self.texts.pop(completion, None)

    def start(self, task: Task) -> None:
        if isinstance(task, Completion):
            segments, keys = self.prefixes.prompt(task)
            pieces = [piece for segment in segments for piece in segment.parts or [segment]]
            assert pieces == prompt_segments(task)
            all_keys = prefix_keys(HASHER, "tenant", task.options.chat, pieces)
            ends = accumulate(len(segment.parts or [segment]) for segment in segments)
            assert keys == tuple(all_keys[end - 1] for end in ends)
            self.texts.pop(task, None)
        super().start(task)

    def check(self) -> None:
        assert self.prefixes.check_integrity() == self.uses.counts


@pytest.fixture
def runner() -> ForecastingRunner:
    return ForecastingRunner()


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock(100.0)


@pytest.fixture
def graph(runner: ForecastingRunner, clock: ManualClock) -> SessionGraph:
    return make_graph(runner, clock)


def shown(runner: ForecastingRunner) -> list[list[str]]:
    runner.check()
    return list(runner.texts.values())


def test_a_prefix_grows_up_to_the_first_missing_input(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    x, y, z = (graph.add_variable(name).id for name in "xyz")
    out = graph.submit(
        semantic(
            "A {{x}} B {{y}} C {{z}} D {{o}}",
            *(taken(name, var_id) for name, var_id in zip("xyz", (x, y, z), strict=True)),
            made("o"),
        )
    )
    assert shown(runner) == []  # It has no reader.
    add_reader(graph, graph.variable(var_ids(out)["o"]), Criteria.LATENCY)
    assert shown(runner) == [["A "]]
    graph.set_variable(y, "2")
    assert shown(runner) == [["A "]]
    assert runner.num_grown == 1
    graph.set_variable(x, "1")
    assert shown(runner) == [["A ", "1", " B ", "2", " C "]]
    graph.set_variable(z, "3")
    assert shown(runner) == []
    assert runner.names() == ["o"]
    assert not runner.uses.counts


def test_a_prefix_is_dropped_without_readers(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    a = link_call(graph, "a", [])
    b = link_call(graph, "b", [a])
    reader = add_reader(graph, graph.variable(b), Criteria.LATENCY)
    assert shown(runner) == [["f "]]
    graph.activation.remove_reader(reader)
    assert shown(runner) == []
    add_reader(graph, graph.variable(b), Criteria.LATENCY)
    assert shown(runner) == [["f "]]
    runner.fail(runner.started[0], EngineFailed("broken"))
    assert shown(runner) == []
    assert len(runner.prefixes) == 0


def test_a_cancelled_call_has_no_prefix(graph: SessionGraph, runner: ForecastingRunner) -> None:
    b = link_call(graph, "b", [link_call(graph, "a", [])])
    add_reader(graph, graph.variable(b), Criteria.LATENCY)
    graph.cancel_variable(b)
    assert shown(runner) == []


def test_a_successor_continues_a_finished_call(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    """While its predecessor is unfinished, the successor has no prefix of its own."""
    hint = graph.add_variable("hint").id
    first = graph.submit(semantic("Hello {{x}} {{a}}", given("x", "you"), made("a")))
    second = graph.submit(
        semantic(
            "And {{hint}}? {{b}}",
            taken("hint", hint),
            made("b"),
            successor_of=first.request_id,
        )
    )
    add_reader(graph, graph.variable(var_ids(second)["b"]), Criteria.LATENCY)
    assert shown(runner) == []
    runner.finish(runner.started[0], "hi")
    assert shown(runner) == [["Hello ", "you", " ", "hi", "And "]]
    graph.set_variable(hint, "now")
    assert runner.names() == ["b"]


def test_an_output_of_a_native_call_is_awaited_like_any_other(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    tool = var_ids(graph.submit(native("tool", made("r"))))["r"]
    out = link_call(graph, "o", [tool])
    add_reader(graph, graph.variable(out), Criteria.LATENCY)
    assert shown(runner) == [["f "]]
    runner.finish(runner.started[0], "found")
    assert runner.names() == ["o"]


def test_the_time_at_which_inputs_are_ready_is_predicted(
    graph: SessionGraph, runner: ForecastingRunner, clock: ManualClock
) -> None:
    """At first by the path upstream, and later by the pace of the inputs."""
    inputs = [link_call(graph, f"a{i}", []) for i in range(4)]
    out = link_call(graph, "o", inputs)
    add_reader(graph, graph.variable(out), Criteria.LATENCY)
    key = runner.prefixes.check_integrity().popitem()[0]
    forecast = runner.uses.forecasts[key]
    assert 0 < forecast() - clock.now() < 1  # One call generates 10 tokens.
    clock._now += 30
    assert forecast() == clock.now()
    runner.finish(runner.started[0])
    assert forecast() == clock.now() + 90  # One of four inputs took 30 s.


def test_a_forecast_includes_the_calls_upstream(
    graph: SessionGraph, runner: ForecastingRunner, clock: ManualClock
) -> None:
    inputs = [link_call(graph, f"a{i}", []) for i in range(2)]
    out = link_call(graph, "o", [link_call(graph, "b", inputs)])
    add_reader(graph, graph.variable(out), Criteria.LATENCY)
    clock._now += 50
    runner.finish(runner.started[0])
    waiting = runner.prefixes._waiting[graph.variable(out).producer]  # type: ignore[index]
    last = waiting.forecast
    assert 50 < last() - clock.now() < 51  # Call `b` gets its last input, then runs.


def test_an_input_of_the_program_has_no_forecast(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    out = link_call(graph, "o", [link_call(graph, "a", [graph.add_variable("v").id])])
    add_reader(graph, graph.variable(out), Criteria.LATENCY)
    assert {forecast() for forecast in runner.uses.forecasts.values()} == {inf}


def test_a_long_stateful_chain_has_one_prefix(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    response = graph.submit(semantic("a {{o}}", made("o")))
    for _ in range(2000):
        response = graph.submit(semantic("b {{o}}", made("o"), successor_of=response.request_id))
    add_reader(graph, graph.variable(var_ids(response)["o"]), Criteria.LATENCY)
    assert len(runner.prefixes) == 0
    runner.finish(runner.started[0])
    assert len(runner.prefixes) == 0
    assert runner.num_grown == 0


def test_old_turns_of_a_long_conversation_are_grouped(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    """The prompt has fewer boundaries, but each of the newest turns keeps its own."""
    response = graph.submit(semantic("0 {{o}}", made("o")))
    for i in range(1, 4 * GROUP_SIZE):
        add_reader(graph, graph.variable(var_ids(response)["o"]), Criteria.LATENCY)
        runner.finish(runner.started[-1], f"<{i}>")
        call = semantic(f"{i} {{{{o}}}}", made("o"), successor_of=response.request_id)
        response = graph.submit(call)
    add_reader(graph, graph.variable(var_ids(response)["o"]), Criteria.LATENCY)
    last = runner.started[-1]
    assert isinstance(last, Completion)
    segments, keys = ReadyPrefixes(Expectations(), HASHER).prompt(last)
    assert len(segments) == len(keys) < 2 * 2 * GROUP_SIZE + 4
    assert (
        "".join(map(text_of, segments))
        == "".join(f"{i} <{i + 1}>" for i in range(4 * GROUP_SIZE - 1)) + f"{4 * GROUP_SIZE - 1} "
    )
    every = prefix_keys(HASHER, "tenant", False, prompt_segments(last))
    assert set(keys) < set(every)
    assert keys[-2 * GROUP_SIZE :] == every[-2 * GROUP_SIZE :]


def text_of(segment: Segment) -> str:
    return segment.text or "".join(part.text for part in segment.parts)


def test_inputs_in_order_cost_only_their_new_segments(
    graph: SessionGraph, runner: ForecastingRunner
) -> None:
    inputs = [graph.add_variable("v").id for _ in range(300)]
    out = link_call(graph, "o", inputs)
    add_reader(graph, graph.variable(out), Criteria.LATENCY)
    for var_id in inputs[:-1]:
        graph.set_variable(var_id, "text")
    runner.check()
    assert runner.num_grown == 300
    assert sum(runner.uses.counts.values()) == 2 * 299 + 1
    graph.set_variable(inputs[-1], "text")
    runner.check()
    assert not runner.uses.counts


class ReadyPrefixesMachine(GraphMachine):
    """Random programs: no prefix is left when all calls have ended."""

    def __init__(self) -> None:
        super().__init__()
        self.runner: ForecastingRunner = ForecastingRunner()
        self.graph = make_graph(self.runner)

    @invariant()
    def only_waiting_completions_have_prefixes(self) -> None:
        self.runner.check()
        expected = set(self.runner.expected)
        assert set(self.runner.prefixes._waiting) <= expected
        assert set(self.runner.texts) <= expected

    def teardown(self) -> None:
        super().teardown()
        assert len(self.runner.prefixes) == 0
        assert not self.runner.uses.counts
        assert not self.runner.texts


TestReadyPrefixesMachine = ReadyPrefixesMachine.TestCase
TestReadyPrefixesMachine.settings = settings(max_examples=50, stateful_step_count=40)
