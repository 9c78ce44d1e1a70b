"""Links tasks to their variables, unless that would close a cycle."""

from collections.abc import Iterable, Iterator, Sequence, Set
from graphlib import CycleError, TopologicalSorter

from parrot.protocol.errors import CyclicGraph
from parrot.serve.graph.nodes import Task
from parrot.serve.graph.variable import SemanticVariable

_MAX_NAMED = 16  # of each end of a cycle


def link(tasks: Sequence[Task]) -> None:
    """Link the tasks of one call, or none of them and raise `CyclicGraph`."""
    for count, task in enumerate(tasks, start=1):
        _link(task)
        if _is_cyclic(task):
            error = _cyclic(_cycle(task))
            for linked in tasks[:count]:
                _unlink(linked)
            raise error


def link_all(tasks: Sequence[Task]) -> list[Task]:
    """Link the tasks of many calls, or none of them and raise `CyclicGraph`. Returns them with
    producers before consumers. Where a path leads from one of them to another through tasks that
    were there, looks once at each task below them."""
    for task in tasks:
        _link(task)
    below: TopologicalSorter[Task] = TopologicalSorter()
    new = set(tasks)
    through_others = _are_connected(new)
    reached = dict.fromkeys(tasks)
    stack = list(tasks)
    for task in stack:
        below.add(task)
        for consumer in _neighbours(task, down=True):
            if not through_others and consumer not in new:
                continue
            below.add(consumer, task)
            if consumer not in reached:
                reached[consumer] = None
                stack.append(consumer)
    try:
        return [task for task in below.static_order() if task in new]
    except CycleError as found:
        error = _cyclic(_cycle(found.args[1][0]))
    for task in tasks:
        _unlink(task)
    raise error


def _link(task: Task) -> None:
    for variable in task.inputs:
        variable.consumers.append(task)
        task.missing += not variable.is_settled
    for variable in task.outputs:
        variable.producer = task


def _cyclic(path: Sequence[SemanticVariable]) -> CyclicGraph:
    found = [f"`{variable.name}`" for variable in [*path, path[0]]]
    if len(found) > 2 * _MAX_NAMED:
        found[_MAX_NAMED:-_MAX_NAMED] = [f"... ({len(found) - 2 * _MAX_NAMED} more)"]
    names = " -> ".join(found)
    return CyclicGraph(f"the call would close a cycle: {names}")


def _unlink(task: Task) -> None:
    for variable in task.inputs:
        variable.consumers.remove(task)
    for variable in task.outputs:
        variable.producer = None


def _is_cyclic(task: Task) -> bool:
    """Whether a task that is already linked closes a cycle.

    Everything but `task` is acyclic, so either search alone would find a cycle: downwards from its
    outputs and upwards from its inputs. Whichever ends first without meeting `task` proves that
    there is none, so the cost is that of the smaller side. A task whose outputs nobody consumes,
    the usual case, costs nothing."""
    if not any(output.consumers for output in task.outputs):
        return False
    return _either_finds(_search([task], {task}, down=True), _search([task], {task}, down=False))


def _are_connected(new: Set[Task]) -> bool:
    """Whether a path leads from one of the tasks, which are linked, to one of them, through others
    alone. All others are acyclic, so again the cost is that of the smaller side."""
    sides = []
    for down in (True, False):
        nearest = {other for task in new for other in _neighbours(task, down=down)}
        sides.append(_search(nearest - new, new, down=down))
    return _either_finds(*sides)


def _either_finds(*searches: Iterator[bool]) -> bool:
    """Whether the first search that ends, of all that go on in turns, has found something."""
    while True:
        for search in searches:
            is_found = next(search, None)
            if is_found is not False:
                return is_found is True


def _search(starts: Iterable[Task], goals: Set[Task], *, down: bool) -> Iterator[bool]:
    """One step a task: True when it has come to one of `goals`."""
    seen: set[Task] = set()
    stack = list(starts)
    while stack:
        for other in _neighbours(stack.pop(), down=down):
            if other in goals:
                yield True
            elif other not in seen:
                seen.add(other)
                stack.append(other)
        yield False


def _neighbours(task: Task, *, down: bool) -> Iterator[Task]:
    if down:
        for output in task.outputs:
            yield from output.consumers
    else:
        for variable in task.inputs:
            if variable.producer is not None:
                yield variable.producer


def _cycle(start: Task) -> list[SemanticVariable]:
    """The variables along a shortest cycle through `start`, which has one."""
    came_by: dict[Task, SemanticVariable] = {}
    queue = [start]
    for task in queue:
        for output in task.outputs:
            for consumer in output.consumers:
                if consumer not in came_by:
                    came_by[consumer] = output
                    queue.append(consumer)
        if start in came_by:
            break
    path = [came_by[start]]
    while (producer := path[-1].producer) is not start:
        assert producer is not None, path
        path.append(came_by[producer])
    path.reverse()
    return path
