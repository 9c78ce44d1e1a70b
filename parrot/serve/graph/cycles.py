"""Would a new task close a cycle? Two searches in turn, so the cost is that of the smaller side."""

from collections.abc import Iterator

from parrot.serve.graph.links import TaskNode, VariableNode


def find_cycle(task: TaskNode) -> list[VariableNode] | None:
    """The variables of a cycle through `task`, which is already linked; None if there is none.

    Everything but `task` is acyclic, so either search alone would find a cycle: downwards from its
    outputs and upwards from its inputs. Whichever ends first without meeting `task` proves that
    there is none. A task whose outputs nobody consumes, the usual case, costs nothing."""
    if not any(output.consumers for output in task.outputs):
        return None
    downwards, upwards = _search(task, down=True), _search(task, down=False)
    while True:
        for search in (downwards, upwards):
            try:
                if next(search):
                    return _path(task)
            except StopIteration:
                return None


def _search(start: TaskNode, *, down: bool) -> Iterator[bool]:
    """One step a task: True when it has come back to `start`."""
    seen: set[TaskNode] = set()
    stack = [start]
    while stack:
        task = stack.pop()
        for other in _neighbours(task, down=down):
            if other is start:
                yield True
            if other not in seen:
                seen.add(other)
                stack.append(other)
        yield False


def _neighbours(task: TaskNode, *, down: bool) -> Iterator[TaskNode]:
    if down:
        for output in task.outputs:
            yield from output.consumers
    else:
        for node in task.inputs:
            if node.producer is not None:
                yield node.producer


def _path(start: TaskNode) -> list[VariableNode]:
    """The variables along a shortest cycle through `start`, which has one."""
    came_by: dict[TaskNode, VariableNode] = {}
    queue = [start]
    for task in queue:
        for output in task.outputs:
            for consumer in output.consumers:
                if consumer is start:
                    return _walk_back(start, output, came_by)
                if consumer not in came_by:
                    came_by[consumer] = output
                    queue.append(consumer)
    raise AssertionError("there is no cycle")


def _walk_back(
    start: TaskNode, last: VariableNode, came_by: dict[TaskNode, VariableNode]
) -> list[VariableNode]:
    path = [last]
    while (task := path[-1].producer) is not start:
        assert task is not None, path
        path.append(came_by[task])
    path.reverse()
    return path
