"""Explains why a variable has no value yet, for the program that waits for it."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from parrot.protocol.errors import ParrotError
from parrot.serve.graph.nodes import Completion, CompletionState, SemanticVariable, Task

_MAX_TASKS = 1000  # Upstream tasks that are searched for the cause; it takes about 1 ms.

Unserved = Callable[[Sequence[str]], ParrotError | None]
"""Returns why no engine can run a call for these models; None if an engine can."""


def why_not_ready(variable: SemanticVariable, unserved: Unserved) -> str:
    """The most severe cause: a variable that is never set, then a model without an engine, then
    the queue, then a running call."""
    if variable.producer is None:
        return "nothing has set it, and it is not the output of a call"
    tasks = list(_upstream(variable))
    for task in tasks:
        for needed in task.inputs:
            if needed.producer is None and not needed.is_settled:
                return f"{_named(task)} needs `{needed.name}`, which was never set"
    ready = [task for task in tasks if task.missing == 0 and not task.is_finished]
    completions = [task for task in ready if isinstance(task, Completion)]
    queued = [one for one in completions if one.state is not CompletionState.RUNNING]
    for task in queued:
        if (error := unserved(task.options.models)) is not None:
            return error.message
    for task in queued:
        return f"{_named(task)} is in the queue for an engine"
    for task in completions:
        return f"{_named(task)} is running on engine {task.stats.engine_name}"
    for native in ready:
        return f"{_named(native)} is running"
    return "its call has not started"


def _upstream(variable: SemanticVariable) -> Iterator[Task]:
    """Yield the unfinished tasks that the variable depends on, nearest first, each once."""
    found: dict[Task, None] = {}
    left = deque([variable])
    while left and len(found) < _MAX_TASKS:
        task = left.popleft().producer
        if task is None or task in found:
            continue
        found[task] = None
        yield task
        left.extend(needed for needed in task.inputs if not needed.is_settled)


def _named(task: Task) -> str:
    return f"the call `{task.func_name}`"
