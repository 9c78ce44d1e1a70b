"""Random operations on a session's graph. After each, the counters are exact, only wanted tasks
run, and each variable has the expected state."""

from collections.abc import Callable, Iterable

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from parrot.protocol.errors import (
    Cancelled,
    CyclicGraph,
    EngineFailed,
    ParrotError,
    SessionGone,
)
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    Reader,
    SemanticVariable,
    Task,
    VariableState,
)
from parrot.utils.tasks import Backlog
from tests.serve.graph.held_runner import HeldRunner, add_reader, make_graph
from tests.support.examples import examples
from tests.support.requests import given, made, native, semantic, taken

CRITERIA = st.sampled_from(list(PerformanceCriteria))


class Slices(Backlog):
    """A backlog whose next slice runs when the test calls `turn`."""

    def _go_on(self) -> None:
        pass

    def turn(self) -> None:
        if self._work:
            self._next()


class GraphMachine(RuleBasedStateMachine):
    is_at_once = True

    def __init__(self) -> None:
        super().__init__()
        self.runner = HeldRunner()
        self.backlog = Slices(10**9 if self.is_at_once else 2)
        self.graph = make_graph(self.runner, backlog=self.backlog)
        self.readers: list[Reader] = []
        self.is_awake = False
        self.woken: set[Task] = set()
        # By the id of the variable that failed first.
        self.reasons: dict[str, type[ParrotError]] = {}
        self.held: set[Task] = set()  # Tasks that must still run in the background.

    def variables(self) -> list[SemanticVariable]:
        return list(self.graph.variables.values())

    def pick(self, data: st.DataObject, variables: list[SemanticVariable]) -> SemanticVariable:
        return variables[data.draw(st.integers(0, len(variables) - 1))]

    @rule(has_text=st.booleans())
    def add_variable(self, has_text: bool) -> None:
        self.graph.add_variable("v", "text" if has_text else None)

    @rule(
        data=st.data(),
        num_inputs=st.integers(0, 3),
        num_outputs=st.integers(1, 3),
        is_native=st.booleans(),
        criteria=st.one_of(st.none(), CRITERIA),
        on_demand=st.booleans(),
    )
    def submit(
        self,
        data: st.DataObject,
        num_inputs: int,
        num_outputs: int,
        is_native: bool,
        criteria: PerformanceCriteria | None,
        on_demand: bool,
    ) -> None:
        parameters, template = [], "t"
        variables = self.variables()
        for n in range(num_inputs if variables else 0):
            if data.draw(st.booleans()):
                parameters.append(taken(f"i{n}", self.pick(data, variables).id))
            else:
                parameters.append(given(f"i{n}", "value"))
            template += f"{{{{i{n}}}}}"
        free = [v for v in variables if v.producer is None and not v.is_settled]
        for n in range(num_outputs):
            premade = self.pick(data, free) if free and data.draw(st.booleans()) else None
            if premade is not None:
                free.remove(premade)
            parameters.append(made(f"o{n}", premade.id if premade else None))
            template += f" {{{{o{n}}}}}"
        count = len(self.graph.calls), len(self.graph.variables)
        try:
            options = {"output_criteria": criteria, "on_demand": on_demand}
            if is_native:
                response = self.graph.submit(native("f", *parameters, **options))
            else:
                response = self.graph.submit(semantic(template, *parameters, **options))
        except CyclicGraph:
            assert (len(self.graph.calls), len(self.graph.variables)) == count
            return
        if not on_demand:
            self.held |= set(self.graph.calls[response.request_id].tasks)

    @precondition(lambda self: any(not v.is_settled for v in self.variables()))
    @rule(data=st.data(), criteria=CRITERIA, stream=st.booleans())
    def read(self, data: st.DataObject, criteria: PerformanceCriteria, stream: bool) -> None:
        variable = self.pick(data, [v for v in self.variables() if not v.is_settled])
        self.readers.append(add_reader(self.graph, variable, criteria, wants_stream=stream))

    @rule()
    def wake(self) -> None:
        self.graph.activation.start_background()
        self.is_awake = True
        self.woken = {task for call in self.graph.calls.values() for task in call.tasks}

    @precondition(lambda self: self.readers)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """Remove a reader. Tasks without other demand stop, and so does background work
        downstream."""
        reader = self.readers.pop(data.draw(st.integers(0, len(self.readers) - 1)))
        connected = self.connected(reader.variable)
        self.graph.activation.remove_reader(reader)
        self.held -= connected

    @precondition(lambda self: self.variables())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Release a variable. Background work on it stops, and tasks with a reader continue."""
        variable = self.pick(data, self.variables())
        asked = self.tasks_with_readers()
        self.graph.activation.release(variable)
        assert self.tasks_with_readers() == asked
        if variable.producer is not None and variable.producer not in asked:
            assert self.is_busy() or not variable.producer.is_wanted
            self.held -= self.connected(variable)

    def connected(self, variable: SemanticVariable) -> set[Task]:
        """The tasks that may stop with the variable: all tasks downstream, and all their
        producers."""
        below = reachable(
            [*variable.consumers, *([variable.producer] if variable.producer else [])],
            lambda task: [consumer for v in task.outputs for consumer in v.consumers],
        )
        return reachable(below, lambda task: [v.producer for v in task.inputs if v.producer])

    def tasks_with_readers(self) -> set[Task]:
        """The unfinished tasks with reader demand, found by a walk from the readers."""
        stack = [
            v.producer for v in self.variables() if v.readers and v.producer and not v.is_settled
        ]
        found: set[Task] = set()
        while stack:
            task = stack.pop()
            if task in found or task.is_finished:
                continue
            found.add(task)
            stack += [v.producer for v in task.inputs if v.producer and not v.is_settled]
        return found

    @precondition(lambda self: self.runner.started)
    @rule(data=st.data(), fails=st.booleans())
    def end_a_task(self, data: st.DataObject, fails: bool) -> None:
        index = data.draw(st.integers(0, len(self.runner.started) - 1))
        task = self.runner.started[index]
        if fails:
            self.give_up(task.outputs[0].id)
            self.blame(task.outputs, EngineFailed)
            self.runner.fail(task, EngineFailed("broken"))
        else:
            self.runner.finish(task)

    @precondition(lambda self: any(not v.is_settled and not v.producer for v in self.variables()))
    @rule(data=st.data())
    def set_variable(self, data: st.DataObject) -> None:
        free = [v for v in self.variables() if not v.is_settled and not v.producer]
        self.graph.set_variable(self.pick(data, free).id, "text")

    @precondition(lambda self: self.variables())
    @rule(data=st.data())
    def cancel_variable(self, data: st.DataObject) -> None:
        variable = self.pick(data, self.variables())
        self.give_up(variable.id)
        made_with = variable.producer.outputs if variable.producer else [variable]
        self.blame((other for other in made_with), Cancelled)
        self.graph.cancel_variable(variable.id)
        assert variable.is_settled

    @precondition(lambda self: self.graph.calls)
    @rule(data=st.data())
    def cancel_call(self, data: st.DataObject) -> None:
        calls = list(self.graph.calls)
        request_id = calls[data.draw(st.integers(0, len(calls) - 1))]
        for task in self.graph.calls[request_id].tasks:
            self.give_up(task.outputs[0].id)
            self.blame(task.outputs, Cancelled)
        self.graph.cancel_call(request_id)

    def blame(self, variables: Iterable[SemanticVariable], reason: type[ParrotError]) -> None:
        """Record `reason` as the expected error if these variables fail now."""
        for variable in variables:
            if not variable.is_settled:
                self.reasons.setdefault(variable.id, reason)

    def give_up(self, var_id: str) -> None:
        self.held -= self.connected(self.graph.variable(var_id))

    def is_busy(self) -> bool:
        return self.graph.activation in self.backlog

    @invariant()
    def books_balance(self) -> None:
        self.graph.check_integrity()

    @precondition(lambda self: not self.is_busy())
    @invariant()
    def only_wanted_work_is_started(self) -> None:
        assert len(self.runner.started) == self.graph.activation.num_started
        for call in self.graph.calls.values():
            for task in call.tasks:
                assert (task in self.runner.started) == task.is_started
                if task.is_started:
                    assert task.demand > 0
                    assert all(v.state is VariableState.READY for v in task.inputs)

    @precondition(lambda self: not self.is_busy())
    @invariant()
    def what_is_tasks_with_readers_is_wanted_and_all_else_is_background_work(self) -> None:
        asked = self.tasks_with_readers()
        for call in self.graph.calls.values():
            for task in call.tasks:
                if task.is_finished:
                    continue
                assert task in asked or not task.reader_demand
                assert task.is_wanted or task not in asked
                if (objective := task.objective) is not None:
                    assert objective.is_background == (task not in asked)
                if not self.is_awake:
                    assert task.is_wanted == (task in asked)
                elif task in self.held and task in self.woken and self.is_at_once:
                    assert task.is_wanted

    @precondition(lambda self: not self.is_busy())
    @invariant()
    def whatever_waits_is_expected(self) -> None:
        waiting = {
            task.id
            for call in self.graph.calls.values()
            for task in call.tasks
            if task.state is CompletionState.WAITING and isinstance(task, Completion)
        }
        assert {completion.id for completion in self.runner.expected} == waiting

    @precondition(lambda self: not self.is_busy())
    @invariant()
    def every_variable_fails_for_a_reason_of_its_own_history(self) -> None:
        """The error has the type of a recorded reason of the variable or of a variable upstream."""
        for variable in self.variables():
            if variable.error is None:
                assert variable.state is VariableState.EMPTY or variable.id not in self.reasons
                continue
            above = reachable(
                [variable.producer] if variable.producer else [],
                lambda task: [v.producer for v in task.inputs if v.producer],
            )
            history = [variable, *(v for task in above for v in task.inputs)]
            reasons = {self.reasons.get(other.id) for other in history}
            assert type(variable.error) in reasons, (variable.error, reasons)

    @precondition(lambda self: not self.is_busy())
    @invariant()
    def failure_reaches_every_dependent(self) -> None:
        for variable in self.variables():
            if variable.state is VariableState.FAILED:
                for consumer in variable.consumers:
                    assert all(output.is_settled for output in consumer.outputs)

    def teardown(self) -> None:
        """Finish all tasks. Afterwards each reader has its value or lacks a producer."""
        self.backlog.finish()
        while self.runner.started:
            self.runner.finish(self.runner.started[0])
            self.backlog.finish()
        self.graph.check_integrity()
        for reader in self.readers:
            variable = reader.variable
            if not variable.is_settled:  # A producer upstream is missing.
                assert self.lacks_producer(variable)
        list(self.graph.close(SessionGone("the session ends")))
        self.graph.check_integrity()
        assert all(variable.is_settled for variable in self.variables())
        assert not self.runner.started

    def lacks_producer(self, variable: SemanticVariable) -> bool:
        if variable.is_settled:
            return False
        if variable.producer is None:
            return True
        assert variable.producer.state is CompletionState.WAITING
        return any(self.lacks_producer(above) for above in variable.producer.inputs)


def reachable(starts: Iterable[Task], step: Callable[[Task], Iterable[Task]]) -> set[Task]:
    found = set(starts)
    stack = list(found)
    while stack:
        new = set(step(stack.pop())) - found
        found |= new
        stack += new
    return found


class SlicedGraphMachine(GraphMachine):
    """Walks take many turns with other operations between them. So the rules alone do not tell
    which tasks allow background work when a walk reaches them."""

    is_at_once = False

    @precondition(lambda self: self.is_busy())
    @rule()
    def turn(self) -> None:
        self.backlog.turn()

    @precondition(lambda self: self.is_busy())
    @rule()
    def turns(self) -> None:
        self.backlog.finish()


TestSlicedGraphMachine = SlicedGraphMachine.TestCase
TestSlicedGraphMachine.settings = settings(max_examples=examples(40), stateful_step_count=40)
TestGraphMachine = GraphMachine.TestCase
TestGraphMachine.settings = settings(max_examples=examples(90), stateful_step_count=40)
