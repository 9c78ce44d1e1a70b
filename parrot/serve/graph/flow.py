"""The consequences of a settled variable: its consumers become ready, or fail with it."""

from collections import deque
from collections.abc import Callable

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.activation import Activation
from parrot.serve.graph.nodes import CompletionState, Task
from parrot.serve.graph.runner import Runner
from parrot.serve.graph.variable import SemanticVariable, VariableState
from parrot.utils.clock import Clock


class Flow:
    """Handles settled variables one after the other, in a loop and not by recursion: settling one
    may settle thousands that depend on it."""

    def __init__(
        self,
        clock: Clock,
        runner: Runner,
        activation: Activation,
        on_settled: Callable[[SemanticVariable], None],
    ) -> None:
        """`on_settled` hears of each variable before what follows from it."""
        self.num_settled = dict.fromkeys(VariableState, 0)
        self._on_settled = on_settled
        self._clock = clock
        self._runner = runner
        self._activation = activation
        self._waiting: deque[SemanticVariable] = deque()
        self._is_draining = False

    def settled(self, variable: SemanticVariable) -> None:
        """Handle a variable that was set or has failed just now."""
        self._waiting.append(variable)
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._waiting:
                self._handle(self._waiting.popleft())
        finally:
            self._is_draining = False

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

    def _handle(self, variable: SemanticVariable) -> None:
        self.num_settled[variable.state] += 1
        variable.readers.clear()
        if variable.producer is not None:
            self._finish(variable.producer, variable)
        self._on_settled(variable)
        for consumer in variable.consumers:
            self._activation.input_settled(consumer)
            if variable.error is not None:
                self._fail(consumer, variable)

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
