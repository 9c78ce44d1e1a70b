"""A session's graph with a runner that holds started tasks until the test finishes them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from parrot.protocol.errors import ParrotError
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.graph import GraphServices, SessionGraph, SessionIds, Shared
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    Piece,
    Predictor,
    Reader,
    SemanticVariable,
    Task,
    VariablePiece,
)
from parrot.serve.scheduling.load import LoadIndex
from parrot.serve.scheduling.task import Estimates
from parrot.utils.ids import IdCounter
from parrot.utils.tasks import Backlog
from tests.support.manual_clock import ManualClock
from tests.support.requests import made, semantic, taken, var_ids


@dataclass
class HeldRunner:
    """Holds started tasks until the test calls `finish` or `fail`."""

    started: list[Task] = field(default_factory=list)
    withdrawn: list[Task] = field(default_factory=list)
    cancelled: list[Task] = field(default_factory=list)
    reprioritised: list[Completion] = field(default_factory=list)
    expected: list[Completion] = field(default_factory=list)  # Completions that wait for inputs.
    on_start: Callable[[Task], None] | None = None
    remaining_s: dict[int, float] = field(default_factory=dict)  # By session.

    def start(self, task: Task) -> None:
        assert task.state is CompletionState.QUEUED
        assert task.objective is not None
        assert all(variable.is_settled and not variable.error for variable in task.inputs)
        if task in self.expected:
            self.expected.remove(task)
        self.started.append(task)
        if self.on_start is not None:
            self.on_start(task)

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        assert forecast() >= 0
        assert completion.state is CompletionState.WAITING
        if completion not in self.expected:
            self.expected.append(completion)

    def stop_expecting(self, completion: Completion) -> None:
        assert completion.state is not CompletionState.QUEUED
        if completion in self.expected:
            self.expected.remove(completion)

    def withdraw(self, task: Task) -> None:
        self.started.remove(task)
        self.withdrawn.append(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        self.fail(task, error, CompletionState.CANCELLED)
        self.cancelled.append(task)

    def reprioritise(self, completion: Completion) -> None:
        assert completion in self.started
        self.reprioritised.append(completion)

    def finished(self, task: Task) -> None:
        assert task.is_finished

    def update_remaining_work(self, session_id: int, remaining_s: float) -> None:
        self.remaining_s[session_id] = remaining_s

    # Called by tests

    def finish(self, task: Task, text: str | None = None) -> None:
        self.started.remove(task)
        task.state = CompletionState.DONE
        for variable in task.outputs:
            variable.set(f"<{variable.name}>" if text is None else text)

    def fail(
        self, task: Task, error: ParrotError, state: CompletionState = CompletionState.FAILED
    ) -> None:
        self.started.remove(task)
        task.state = state
        for variable in task.outputs:
            variable.fail(error)

    def names(self) -> list[str]:
        return [name_of(task) for task in self.started]


def name_of(task: Task) -> str:
    return ",".join(variable.name for variable in task.outputs)


def make_graph(
    runner: HeldRunner | None = None,
    clock: ManualClock | None = None,
    predictor: Predictor | None = None,
    *,
    on_demand: bool = False,
    backlog: Backlog | None = None,
) -> SessionGraph:
    return SessionGraph(
        7,
        "tenant",
        SessionIds(Shared(IdCounter(100), IdCounter(1)), "secret"),
        GraphServices(
            runner or HeldRunner(),
            predictor or Estimates(LoadIndex().pace),
            clock or ManualClock(),
            backlog or Backlog(per_slice=10**9),  # All in one slice.
        ),
        cache_salt="tenant",
        on_demand=on_demand,
    )


def add_reader(
    graph: SessionGraph,
    variable: SemanticVariable,
    criteria: PerformanceCriteria,
    *,
    deadline: float | None = None,
    wants_stream: bool = False,
    is_racing: bool = False,
) -> Reader:
    """Add a reader of an unsettled variable. `graph.activation.remove_reader` removes it."""
    reader = Reader(variable, criteria, deadline, wants_stream, is_racing)
    graph.activation.add_reader(reader)
    return reader


def prompt_of(completion: Completion) -> list[Piece]:
    """All pieces of the completion's prompt, with those of the previous completions."""
    before = completion.previous
    start = [] if before is None else [*prompt_of(before), VariablePiece(before.output)]
    return [*start, *completion.fill]


def link_call(graph: SessionGraph, output: str, inputs: Sequence[str], **fields: Any) -> str:
    """Submit a call that makes a variable named `output` from the variables with these ids.
    Returns the id of the output."""
    template = (
        "f " + " ".join(f"{{{{i{n}}}}}" for n in range(len(inputs))) + f" -> {{{{{output}}}}}"
    )
    parameters = [taken(f"i{n}", var_id) for n, var_id in enumerate(inputs)]
    response = graph.submit(
        semantic(template, *parameters, made(output, max_gen_length=10), **fields)
    )
    return var_ids(response)[output]
