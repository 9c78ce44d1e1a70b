"""The consequences of a settled variable: its consumers become ready, or fail with it."""

from collections import deque

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.activation import Activation
from parrot.serve.graph.links import Runner, TaskNode, VariableNode
from parrot.serve.graph.nodes import CompletionState
from parrot.serve.graph.variable import VariableState
from parrot.utils.clock import Clock


class Flow:
    """Handles settled variables one after the other, in a loop and not by recursion: settling one
    may settle thousands that depend on it."""

    def __init__(self, clock: Clock, runner: Runner, activation: Activation) -> None:
        self.num_settled = dict.fromkeys(VariableState, 0)
        self._clock = clock
        self._runner = runner
        self._activation = activation
        self._waiting: deque[VariableNode] = deque()
        self._is_draining = False

    def settled(self, node: VariableNode) -> None:
        """Handle a variable that was set or has failed just now."""
        self._waiting.append(node)
        if self._is_draining:
            return
        self._is_draining = True
        try:
            while self._waiting:
                self._handle(self._waiting.popleft())
        finally:
            self._is_draining = False

    def enter(self, task: TaskNode) -> None:
        """A task was linked: it fails at once with a failed input, or may be wanted already."""
        failed = next((node for node in task.inputs if node.variable.error is not None), None)
        if failed is not None:
            self._fail(task, failed)
        elif not task.is_finished:
            self._activation.add_producer(task)

    def cancel(self, task: TaskNode, error: ParrotError) -> None:
        """Stop the task wherever it is, and fail its outputs that are not settled."""
        if task.is_started:
            self._runner.cancel(task.task, error)
        self._fail_outputs(task, CompletionState.CANCELLED, error)

    def _handle(self, node: VariableNode) -> None:
        self.num_settled[node.variable.state] += 1
        node.readers.clear()
        if node.producer is not None:
            self._finish(node.producer, node)
        has_failed = node.variable.error is not None
        for consumer in node.consumers:
            self._activation.input_settled(consumer)
            if has_failed:
                self._fail(consumer, node)

    def _finish(self, task: TaskNode, output: VariableNode) -> None:
        """`output`, one of the task's, is settled. The task is finished with the last one."""
        if task.is_ended or not all(node.is_settled for node in task.outputs):
            return
        task.is_ended = True
        if not task.is_finished:
            has_failed = output.variable.error is not None
            task.task.state = CompletionState.FAILED if has_failed else CompletionState.DONE
        if task.task.times.finished is None:
            task.task.times.finished = self._clock.now()
        self._activation.finished(task)
        self._runner.finished(task.task)

    def _fail(self, task: TaskNode, cause: VariableNode) -> None:
        """An input failed. The error keeps the type (so the status) of the first failure."""
        if task.is_finished:
            return
        assert cause.variable.error is not None
        origin = cause.origin or cause.variable.error
        error = type(origin)(
            f"`{task.task.func_name}` needs `{cause.variable.name}`, which failed: "
            f"{origin.message}",
            param=origin.param,
        )
        error.__cause__ = cause.variable.error
        for node in task.outputs:
            node.origin = origin
        self._fail_outputs(task, CompletionState.FAILED, error)

    def _fail_outputs(self, task: TaskNode, state: CompletionState, error: ParrotError) -> None:
        if not task.is_finished:
            task.task.state = state
        for node in task.outputs:
            if not node.is_settled:
                node.variable.fail(error)

    def check_integrity(self) -> None:
        assert not self._waiting, self._waiting
