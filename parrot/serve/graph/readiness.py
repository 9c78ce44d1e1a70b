"""When a wanted task that waits will have its inputs, by what is known at the time of asking."""

from itertools import islice
from math import inf

from parrot.serve.graph.links import TaskNode

_MAX_DEPTH = (
    4  # tasks above that are asked in turn; beyond them, the prediction of activation holds
)
_MAX_LOOK = 64  # inputs looked at for the first that is missing


def ready_at(task: TaskNode, now: float, depth: int = _MAX_DEPTH) -> float:
    """On the clock's scale: the latest of
    - what was predicted when it became wanted, by the longest path above it;
    - when the rest of its inputs will be there, if they come as fast as those that have come;
    - when the task that makes its first missing input will be done, if that waits, too.
    Infinite if nothing but the program can give that input."""
    activated = task.task.times.activated
    assert activated is not None, task.task
    when = max(now, activated + task.ready_in_s)
    num_come = task.num_awaited - task.missing
    if num_come > 0:
        when = max(when, now + (now - activated) * task.missing / num_come)
    missing = next((n for n in islice(task.inputs, _MAX_LOOK) if not n.is_settled), None)
    if missing is None:
        return when
    above = missing.producer
    if above is None:
        return inf
    if depth and above.missing:
        when = max(when, ready_at(above, now, depth - 1) + above.duration_s)
    return when
