"""The interfaces of the layers below the graph, which run tasks and predict them."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.nodes import Completion, Task


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
        """The objective of a started completion became stricter, or a reader wants its tokens."""
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
