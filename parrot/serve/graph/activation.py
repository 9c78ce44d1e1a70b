"""Nothing runs until someone wants it: activation, deduction and withdrawal along the graph."""

from collections.abc import Iterable
from math import isclose

from parrot.protocol.criteria import PerformanceCriteria
from parrot.serve.graph.links import Predictor, Reader, Runner, TaskNode, VariableNode
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.graph.objective import (
    deduce,
    earliest_deadline,
    objective_of,
    predict,
    predict_again,
    relax_deadlines,
    tighten,
)
from parrot.serve.graph.readiness import ready_at
from parrot.utils.clock import Clock


class Demand:
    """Counts who wants each task, starts wanted tasks whose inputs are ready, and stops tasks that
    nobody wants any more. `num_started`: tasks that are with the runner now.

    Walks are loops, not recursion: a session may be one chain of 10,000 calls. What answers teach
    reaches a task's objective when its inputs are complete, and all objectives after the session's
    1st, 2nd, 4th, 8th ... finished task: O(log n) predictions for each of n tasks."""

    def __init__(self, clock: Clock, runner: Runner, predictor: Predictor) -> None:
        self._clock = clock
        self._runner = runner
        self._predictor = predictor
        self.num_started = 0
        self._wanted: dict[TaskNode, float] = {}  # with the work in the sum below
        self._remaining_s = 0.0
        self._num_finished = 0
        self._next_prediction = 1

    def add_reader(
        self,
        node: VariableNode,
        criteria: PerformanceCriteria,
        *,
        deadline: float | None = None,
        wants_stream: bool = False,
    ) -> Reader:
        """Want an unsettled variable, whether or not it has a producer yet."""
        reader = Reader(node, criteria, deadline)
        node.readers.append(reader)
        producer = node.producer
        if producer is None or producer.is_finished:
            return reader
        changed: set[TaskNode] = set()
        if (
            wants_stream
            and isinstance(producer.task, Completion)
            and not producer.task.wants_stream
        ):
            producer.task.wants_stream = True
            changed.add(producer)
        producer.demand += 1
        if producer.demand == 1:
            self._activate(producer)
        else:
            self._update(changed | tighten(producer, criteria, deadline))
        return reader

    def remove_reader(self, reader: Reader) -> None:
        """The reader has its value or has gone. Work that nobody else wants is withdrawn."""
        if reader not in reader.node.readers:
            return
        reader.node.readers.remove(reader)
        producer = reader.node.producer
        if producer is not None and not producer.is_finished and not reader.node.is_settled:
            self._lower([producer])

    def add_producer(self, task: TaskNode) -> None:
        """A task was linked; its outputs may have been wanted before it came."""
        task.demand = sum(1 for _ in task.readers()) + sum(1 for _ in task.wanted_consumers())
        if task.demand:
            self._activate(task)

    def input_settled(self, task: TaskNode) -> None:
        """One of its inputs got its value (or failed: then the caller fails the task)."""
        task.missing -= 1
        if not task.is_wanted:
            return
        if task.missing:
            self._expect(task)
        elif all(node.variable.error is None for node in task.inputs):
            predict(task, self._predictor)
            self._count(task)
            task.task.objective = objective_of(task)
            self._start(task)

    def finished(self, task: TaskNode) -> None:
        """It came to a final state; whatever was still to be made for it alone is withdrawn."""
        if task.is_started:
            task.is_started = False
            self.num_started -= 1
        else:
            self._unexpect(task)
        if task.missing and task.demand:
            self._lower(task.producers())
        if task in self._wanted:
            self._discount(task)
            self._learn()
            self._report(task)

    def check_integrity(self, tasks: Iterable[TaskNode]) -> None:
        """Recount demand; `tasks` are all of the graph's."""
        num_started = 0
        for task in tasks:
            num_started += task.is_started
            if task.is_finished:
                assert not task.is_started, task.task
                continue
            wanted = sum(1 for _ in task.wanted_consumers()) + sum(1 for _ in task.readers())
            assert task.demand == wanted, (task.task, task.demand, wanted)
            assert task.is_wanted == (task.task.objective is not None), task.task
            assert task.is_wanted == (task in self._wanted), task.task
            assert task.is_started == (task.is_wanted and not task.missing), task.task
            if task.is_wanted:
                assert task.deadline == earliest_deadline(task), (task.task, task.deadline)
        assert self.num_started == num_started, (self.num_started, num_started)
        remaining_s = sum(self._wanted.values())
        assert isclose(self._remaining_s, remaining_s, abs_tol=1e-6), self._remaining_s
        assert not any(task.is_finished for task in self._wanted), self._wanted

    def _activate(self, root: TaskNode) -> None:
        """`root` has just become wanted, and so has all that it needs."""
        now = self._clock.now()
        activated = [root]
        for task in activated:
            task.task.state = CompletionState.WAITING
            task.task.times.activated = now
            task.num_awaited = task.missing
            for producer in task.producers():
                if producer.is_finished:
                    continue
                producer.demand += 1
                if producer.demand == 1:
                    activated.append(producer)
        changed = deduce(activated, self._predictor)
        for task in activated:
            self._count(task)
            task.task.objective = objective_of(task)
        self._report(root)
        self._update(changed)
        for task in sorted(activated, key=_task_id) if len(activated) > 1 else activated:
            if task.task.state is not CompletionState.WAITING:
                continue
            if task.missing:
                self._expect(task)
            else:
                self._start(task)

    def _update(self, changed: Iterable[TaskNode]) -> None:
        for task in sorted(changed, key=_task_id):
            task.task.objective = objective_of(task)
            if task.task.state is CompletionState.QUEUED and isinstance(task.task, Completion):
                self._runner.reprioritise(task.task)

    def _start(self, task: TaskNode) -> None:
        task.task.state = CompletionState.QUEUED
        task.task.times.ready = self._clock.now()
        task.is_started = True
        self.num_started += 1
        self._runner.start(task.task)

    def _expect(self, task: TaskNode) -> None:
        if isinstance(task.task, Completion):
            self._runner.expect(task.task, lambda: ready_at(task, self._clock.now()))

    def _unexpect(self, task: TaskNode) -> None:
        if isinstance(task.task, Completion):
            self._runner.unexpect(task.task)

    def _lower(self, tasks: Iterable[TaskNode]) -> None:
        """Each of `tasks` lost one who wanted it. Those without any other stop."""
        stack = list(tasks)
        root = stack[0] if stack else None
        kept: set[TaskNode] = set()
        while stack:
            task = stack.pop()
            task.demand -= 1
            if task.demand or task.is_finished:
                kept.add(task)
                continue
            self._discount(task)
            if task.is_started:
                self._withdraw(task)
            task.task.state = CompletionState.IDLE
            task.task.objective = None
            self._unexpect(task)
            stack.extend(task.producers())
        self._update(relax_deadlines(t for t in kept if t.is_wanted and t.deadline is not None))
        if root is not None:
            self._report(root)

    def _withdraw(self, task: TaskNode) -> None:
        task.is_started = False
        self.num_started -= 1
        self._runner.withdraw(task.task)
        if isinstance(task.task, Completion):
            task.task.wants_stream = False
        for output in task.outputs:
            if not output.is_settled:
                output.variable.restart()

    # Predictions

    def _count(self, task: TaskNode) -> None:
        """A wanted task's work is part of what remains."""
        self._remaining_s += task.work_s - self._wanted.get(task, 0.0)
        self._wanted[task] = task.work_s

    def _discount(self, task: TaskNode) -> None:
        self._remaining_s -= self._wanted.pop(task)
        if not self._wanted:
            self._remaining_s = 0.0  # no rounding errors are left over

    def _learn(self) -> None:
        """Another task has finished. Answers of the same functions change most after the first."""
        self._num_finished += 1
        if self._num_finished < self._next_prediction:
            return
        self._next_prediction *= 2
        changed = predict_again(self._wanted, self._predictor)
        for task in self._wanted:
            self._count(task)
        self._update(changed)

    def _report(self, task: TaskNode) -> None:
        self._runner.progressed(task.task.session_id, self._remaining_s)


def _task_id(task: TaskNode) -> int:
    return task.task.id
