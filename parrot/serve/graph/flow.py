"""The consequences of a settled variable: its consumers become ready, or fail with it."""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.activation import Activation
from parrot.serve.graph.nodes import CompletionState, Task
from parrot.serve.graph.runner import Runner
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.utils.clock import Clock
from parrot.utils.tasks import Backlog


class Flow:
    """Handles settled variables: those who make them hear of it at once, those who take them one
    after the other, by way of the backlog, since settling one may settle thousands that depend on
    it. A consumer that has not heard yet is as if the value had not come; it may be cancelled,
    become wanted, or be given up meanwhile. `on_settled` hears of each variable before what follows
    from it."""

    def __init__(
        self,
        clock: Clock,
        runner: Runner,
        activation: Activation,
        backlog: Backlog,
    ) -> None:
        self.num_settled = dict.fromkeys(VariableState, 0)
        self.on_settled: Callable[[SemanticVariable], None] | None = None
        self._clock = clock
        self._runner = runner
        self._activation = activation
        self._backlog = backlog
        self._is_closed = False
        self._untold: dict[SemanticVariable, deque[Task]] = {}

    def settled(self, variable: SemanticVariable) -> None:
        """Handle a variable that was set or has failed just now."""
        self.num_settled[variable.state] += 1
        variable.readers.clear()
        if variable.producer is not None:
            self._finish(variable.producer, variable)
        if self.on_settled is not None:
            self.on_settled(variable)
        if variable.consumers and not self._is_closed:  # those that come later find it settled
            self._untold[variable] = deque(variable.consumers)
            self._backlog.add(self._activation, self._tell(variable))

    def enter(self, task: Task) -> None:
        """A task was linked: it fails at once with a failed input, or may be wanted already."""
        failed = next((variable for variable in task.inputs if variable.error is not None), None)
        if failed is not None:
            self._fail(task, failed)
        elif not task.is_finished:
            self._activation.add_producer(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        """Stop the task wherever it is, and fail its outputs that are not settled."""
        if task.is_started:
            self._runner.cancel(task, error)
        self._fail_outputs(task, CompletionState.CANCELLED, error)

    def close(
        self, tasks: Iterable[Task], variables: Iterable[SemanticVariable], error: ParrotError
    ) -> Iterator[int]:
        """The graph ends: nothing of it starts any more. A step cancels one of the tasks, or fails
        one of the variables, if it is not settled."""
        self._is_closed = True
        self._activation.close()
        self._untold.clear()
        self._backlog.drop(self._activation)
        return self._closing(tasks, variables, error)

    def check_integrity(self, tasks: Iterable[Task]) -> None:
        """Recount what the tasks wait for."""
        untold = Counter(consumer for waiting in self._untold.values() for consumer in waiting)
        for task in tasks:
            num_unsettled = sum(not variable.is_settled for variable in task.inputs)
            assert self._is_closed or task.missing == num_unsettled + untold[task], task
            assert task.is_finished == all(variable.is_settled for variable in task.outputs), task

    def _closing(
        self, tasks: Iterable[Task], variables: Iterable[SemanticVariable], error: ParrotError
    ) -> Iterator[int]:
        for task in tasks:
            self.cancel(task, error)
            yield 1
        for variable in variables:
            if not variable.is_settled:
                variable.fail(error)
            yield 1

    def _tell(self, variable: SemanticVariable) -> Iterator[int]:
        """Tell its consumers, one with each step."""
        while untold := self._untold.get(variable):
            consumer = untold.popleft()
            if variable.producer is None and variable.error is None:
                self._activation.input_given(consumer)
            else:
                self._activation.input_settled(consumer)
            if variable.error is not None:
                self._fail(consumer, variable)
            yield 1
        self._untold.pop(variable, None)

    def _finish(self, task: Task, output: SemanticVariable) -> None:
        """`output`, one of the task's, is settled. The task is finished with the last one."""
        if task.is_ended or not all(variable.is_settled for variable in task.outputs):
            return
        task.is_ended = True
        if not task.is_finished:
            has_failed = output.error is not None
            task.state = CompletionState.FAILED if has_failed else CompletionState.DONE
        if task.times.finished is None:
            task.times.finished = self._clock.now()
        self._activation.finished(task)
        self._runner.finished(task)

    def _fail(self, task: Task, cause: SemanticVariable) -> None:
        """An input failed. The error keeps the type (so the status) of the first failure."""
        if task.is_finished:
            return
        assert cause.error is not None
        origin = cause.origin or cause.error
        error = type(origin)(
            f"`{task.func_name}` needs `{cause.name}`, which failed: {origin.message}",
            param=origin.param,
        )
        error.__cause__ = cause.error
        for variable in task.outputs:
            variable.origin = origin
        self._fail_outputs(task, CompletionState.FAILED, error)

    def _fail_outputs(self, task: Task, state: CompletionState, error: ParrotError) -> None:
        if not task.is_finished:
            task.state = state
        for variable in task.outputs:
            if not variable.is_settled:
                variable.fail(error)
