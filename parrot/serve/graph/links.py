"""The records that a session's graph links: tasks, variables and readers.

    producer ----> VariableNode ----> consumers
    TaskNode         readers          TaskNode, ...

Order inside one call is an ordinary edge: completion k+1 consumes the output of completion k.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.errors import ParrotError
from parrot.serve.graph.nodes import Completion, Task
from parrot.serve.graph.variable import SemanticVariable


@dataclass(slots=True, eq=False)
class VariableNode:
    """A variable's place in the graph. `origin`: if it failed because an input of its producer
    did, the failure where that began."""

    variable: SemanticVariable
    producer: "TaskNode | None" = None
    consumers: list["TaskNode"] = field(default_factory=list)
    readers: list["Reader"] = field(default_factory=list)
    origin: ParrotError | None = None

    @property
    def is_settled(self) -> bool:
        return self.variable.is_settled

    @property
    def is_idle(self) -> bool:
        """Wanting it would set work going."""
        return self.producer is not None and not self.producer.demand and not self.is_settled


@dataclass(slots=True, eq=False)
class Reader:
    """One who wants a variable from outside of the graph. `may_lose`: it is a race's candidate."""

    node: VariableNode
    criteria: PerformanceCriteria
    deadline: float | None = None  # on the clock's scale
    wants_stream: bool = False
    may_lose: bool = False


@dataclass(slots=True, eq=False)
class TaskNode:
    """A task's place in the graph.

    `missing` counts its unsettled inputs, `demand` the readers of its outputs plus its wanted
    consumers (one for each of their unsettled inputs that it produces), plus the program if that
    holds the task and that was woken. `asked` counts, of these, the readers and the consumers
    that are asked for themselves: a wanted task that nobody asks for is background work.
    `is_held`: it may run in the background; `is_woken`: the program wants it to. `is_started`: it
    is with the dispatcher or the sandbox now; `is_ended`: its end was handled. The last group of
    fields belongs to deduction and means something only while the task is wanted."""

    task: Task
    inputs: tuple[VariableNode, ...]  # distinct
    outputs: tuple[VariableNode, ...]
    missing: int = 0
    demand: int = 0
    asked: int = 0
    is_held: bool = True
    is_woken: bool = False
    is_started: bool = False
    is_ended: bool = False

    criteria: PerformanceCriteria = PerformanceCriteria.THROUGHPUT
    depth: int = 0
    duration_s: float = 0.0
    work_s: float = 0.0
    path_s: float = 0.0  # its duration and that of the longest path of wanted tasks below it
    num_awaited: int = 0  # inputs that were missing when it became wanted
    ready_in_s: float = 0.0  # the longest path of wanted tasks above it, when it became wanted
    group: int | None = None  # the task id of the consumer whose stage it belongs to
    deadline: float | None = None

    @property
    def is_finished(self) -> bool:
        return self.task.state.is_final

    @property
    def is_wanted(self) -> bool:
        return self.demand > 0 and not self.task.state.is_final

    def producers(self) -> Iterator["TaskNode"]:
        """Yield the tasks that make its unsettled inputs, once for each input."""
        for node in self.inputs:
            if node.producer is not None and not node.variable.is_settled:
                yield node.producer

    def open_consumers(self) -> Iterator["TaskNode"]:
        """Yield the unfinished tasks that wait for its unsettled outputs, once for each output."""
        for node in self.outputs:
            if not node.variable.is_settled:
                yield from (consumer for consumer in node.consumers if not consumer.is_finished)

    def wanted_consumers(self) -> Iterator["TaskNode"]:
        """Yield those of them that are wanted."""
        return (consumer for consumer in self.open_consumers() if consumer.demand > 0)

    def readers(self) -> Iterator[Reader]:
        for node in self.outputs:
            yield from node.readers


class Runner(Protocol):
    """The verbs that the graph asks of the layers that run tasks. Results come back through the
    variables, possibly before the call returns."""

    def start(self, task: Task) -> None:
        """Run `task`: its inputs are ready and it has an objective."""
        ...

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        """A wanted completion waits for inputs: called when it becomes wanted, and again whenever
        one of its inputs is settled while others are missing. It ends with `start`, `unexpect` or
        `finished`, whichever comes first. `forecast` may be called until then: when the last input
        is predicted to come, on the clock's scale; infinite if nobody knows."""
        ...

    def unexpect(self, completion: Completion) -> None:
        """Expect the completion no more, if it was expected: it is not wanted now, or has ended
        without having been started."""
        ...

    def withdraw(self, task: Task) -> None:
        """Stop a started task without settling its outputs; it may be started again later."""
        ...

    def cancel(self, task: Task, error: ParrotError) -> None:
        """Stop a started task and fail its unsettled outputs with `error`."""
        ...

    def reprioritise(self, completion: Completion) -> None:
        """The objective of a queued completion became stricter, or a reader wants its tokens."""
        ...

    def finished(self, task: Task) -> None:
        """A task ended in a final state (for counting; must not raise)."""
        ...

    def progressed(self, session_id: int, remaining_s: float) -> None:
        """The session's wanted tasks that are not finished, waiting ones included, are so many
        seconds of work in sum. Comes before `start` of those that just became wanted."""
        ...


class Prediction(NamedTuple):
    """`seconds`: how long one run takes. `work_s`: how long it would take if nothing else ran: how
    much work it is."""

    seconds: float
    work_s: float


class Predictor(Protocol):
    def predict(self, task: Task) -> Prediction:
        """Predict one run by what is known now."""
        ...


def link(task: TaskNode) -> None:
    for node in task.inputs:
        node.consumers.append(task)
        task.missing += not node.is_settled
    for node in task.outputs:
        node.producer = task


def unlink(task: TaskNode) -> None:
    """The inverse of `link`, for a task that was never wanted."""
    for node in task.inputs:
        node.consumers.remove(task)
    for node in task.outputs:
        node.producer = None
