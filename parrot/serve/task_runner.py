"""The graph's runner: each task goes to the dispatcher or to the sandbox, and is counted."""

from collections.abc import Callable

from parrot.protocol.errors import ParrotError
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.graph.nodes import Completion, CompletionState, NativeCall, Task
from parrot.serve.graph.variable import VariableState
from parrot.serve.metrics import CoreMetrics
from parrot.serve.native import NativeRunner
from parrot.serve.quotas import Usage, num_bytes
from parrot.serve.sessions import SessionRegistry
from parrot.utils.clock import Clock


class TaskRunner:
    """Implements `graph.links.Runner`. A task that ends is activity of its session."""

    def __init__(
        self,
        clock: Clock,
        sessions: SessionRegistry,
        dispatcher: Dispatcher,
        native: NativeRunner,
        metrics: CoreMetrics,
    ) -> None:
        self._clock = clock
        self._sessions = sessions
        self._dispatcher = dispatcher
        self._native = native
        self._metrics = metrics

    def start(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._dispatcher.submit(task)
        else:
            self._native.start(task)

    def expect(self, completion: Completion, forecast: Callable[[], float]) -> None:
        self._dispatcher.expect(completion, forecast)

    def unexpect(self, completion: Completion) -> None:
        self._dispatcher.unexpect(completion)

    def withdraw(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._dispatcher.withdraw(task)
        else:
            self._native.stop(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        if isinstance(task, Completion):
            self._dispatcher.cancel(task, error)
        else:
            self._cancel_native(task, error)

    def reprioritise(self, completion: Completion) -> None:
        self._dispatcher.reprioritise(completion)

    def finished(self, task: Task) -> None:
        session = self._sessions.find(task.session_id)
        if session is not None:
            session.last_active = self._clock.now()
            texts = [v.text for v in task.outputs() if v.state is VariableState.READY]
            session.account.add(Usage(text_bytes=num_bytes(texts)))
            self._metrics.task_finished(task, session.tenant)

    def progressed(self, session_id: int, remaining_s: float) -> None:
        self._dispatcher.progressed(session_id, remaining_s)

    def _cancel_native(self, task: NativeCall, error: ParrotError) -> None:
        self._native.stop(task)
        task.state = CompletionState.CANCELLED
        for variable in task.outputs():
            if not variable.is_settled:
                variable.fail(error)
