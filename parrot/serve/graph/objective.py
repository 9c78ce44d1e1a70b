"""Deduction: finds the objective of each wanted task, upstream from the outputs that have readers.

    reader (LATENCY) <- reduce    depth 0   LATENCY
                          ^ ^ ^
                        map map map   depth 1   THROUGHPUT, one task group: only the last one counts
                          ^
                        split         depth 2   THROUGHPUT

A task gets the strictest criteria of its readers and consumers:
- A direct reader gives its own criteria.
- A consumer with several producers at the same depth (a stage) gives THROUGHPUT and its task group.
- Background work, which no reader waits for, gives THROUGHPUT.
- Another consumer with LATENCY, TTFT or TPOT gives LATENCY, since the consumer cannot start before
  its input is complete. A THROUGHPUT consumer gives THROUGHPUT.

While a task stays wanted, its criteria, depth and path only become stricter or longer. A deadline
is dropped when its reader leaves. Otherwise the first of many reads with short timeouts would leave
its deadline behind. The functions change only the deduced fields of the nodes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf

from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import Objective, Predictor, Task

# A longer path or depth is pushed to a wanted task only if it has grown by more than this factor.
# So a growing chain of n tasks costs O(log n) updates per task. A larger value costs less CPU time.
_MIN_GROWTH = 1.1

# Number of waiting producers above a task that `ready_at` follows. Above them, it uses the
# prediction from the time of activation.
_MAX_DEPTH = 4
# Number of inputs in which `ready_at` searches for the first missing input.
_MAX_INPUTS_SCANNED = 64

_THROUGHPUT = PerformanceCriteria.THROUGHPUT
_LATENCY = PerformanceCriteria.LATENCY


def strictest(a: PerformanceCriteria, b: PerformanceCriteria) -> PerformanceCriteria:
    """The weakest criteria that satisfies both."""
    if a is b or b is _THROUGHPUT:
        return a
    return b if a is _THROUGHPUT else _LATENCY


def strictest_objective(a: Objective | None, b: Objective | None) -> Objective | None:
    """The weakest objective that satisfies both. The task group is the group of `a`."""
    if a is None or b is None:
        return a or b
    deadlines = [o.deadline for o in (a, b) if o.deadline is not None]
    return Objective(
        criteria=strictest(a.criteria, b.criteria),
        depth=max(a.depth, b.depth),
        remaining_path_s=max(a.remaining_path_s, b.remaining_path_s),
        task_group=a.task_group,
        deadline=min(deadlines, default=None),
        is_background=a.is_background and b.is_background,
    )


def objective_of(node: Task) -> Objective:
    return Objective(
        criteria=node.criteria,
        depth=node.depth,
        remaining_path_s=node.path_s,
        task_group=None if node.group is None else str(node.group),
        deadline=node.deadline,
        is_background=not node.reader_demand,
    )


def deduce(activated: Sequence[Task], predictor: Predictor) -> set[Task]:
    """Deduce the fields of tasks that have just become wanted. Returns the previously wanted tasks
    whose fields have changed. The caller must `push` these."""
    if len(activated) == 1 and not activated[0].missing:
        _reset_deduction(activated[0], predictor)
        activated[0].ready_in_s = 0.0
        _pull_objective(activated[0], set())
        return set()
    new = set(activated)
    order = _consumers_first(new)
    for node in order:
        _reset_deduction(node, predictor)
    for node in reversed(order):
        above = (p.ready_in_s + p.duration_s for p in _wanted_producers(node))
        node.ready_in_s = max(above, default=0.0)
    changed = _lengthened(order, new)  # Before `push`, which compares depths to find stages.
    for node in order:
        _pull_objective(node, new)
        changed.update(p for p in push(node) if p not in new)
    return changed


def tighten(node: Task, criteria: PerformanceCriteria, deadline: float | None) -> bool:
    """Apply the criteria and the deadline of a new reader. Returns whether the task has changed.
    The caller must then `push` it."""
    return _apply(node, criteria, deadline)


def earliest_deadline(node: Task) -> float | None:
    """The earliest deadline of the task's readers and wanted consumers. None: no deadline."""
    asked = [reader.deadline for reader in node.readers()]
    asked += [consumer.deadline for consumer in node.wanted_consumers()]
    return min((when for when in asked if when is not None), default=None)


def drop_stale_deadline(node: Task) -> bool:
    """Drop a deadline whose reader or consumer has left. Returns whether the task's deadline has
    changed. The deadlines of its producers may change as a result."""
    deadline = earliest_deadline(node)
    if deadline != node.deadline:
        node.deadline = deadline
        return True
    return False


def ready_at(task: Task, now: float, depth: int = _MAX_DEPTH) -> float:
    """Predict when a waiting task will have all its inputs, on the clock's scale: the latest of
    - the prediction from when it became wanted: the longest path above it,
    - the time at which the missing inputs are complete at the rate of the inputs so far,
    - the time at which a waiting producer of the first missing input finishes.
    Infinite if only the program can set that input."""
    activated = task.times.activated
    assert activated is not None, task
    when = max(now, activated + task.ready_in_s)
    num_come = task.num_awaited - task.missing
    if num_come > 0:
        when = max(when, now + (now - activated) * task.missing / num_come)
    missing = next((v for v in islice(task.inputs, _MAX_INPUTS_SCANNED) if not v.is_settled), None)
    if missing is None:
        return when
    above = missing.producer
    if above is None:
        return inf
    if depth and above.missing and above.is_wanted:  # A producer may not be activated yet.
        when = max(when, ready_at(above, now, depth - 1) + above.duration_s)
    return when


def predict_again(wanted: Iterable[Task], predictor: Predictor) -> set[Task]:
    """Predict wanted tasks again with new statistics. Returns the tasks whose path has changed by
    more than the factor `_MIN_GROWTH`."""
    changed: set[Task] = set()
    for node in _consumers_first(set(wanted)):
        before_s = node.path_s
        predict(node, predictor)
        if not before_s / _MIN_GROWTH <= node.path_s <= before_s * _MIN_GROWTH:
            changed.add(node)
    return changed


def predict(node: Task, predictor: Predictor) -> None:
    """Predict the task's duration and work, and compute its path from the consumers' paths."""
    below_s = max([consumer.path_s for consumer in node.wanted_consumers()], default=0.0)
    node.duration_s, node.work_s = predictor.predict(node)
    node.path_s = node.duration_s + below_s


def _consumers_first(new: set[Task]) -> list[Task]:
    """Topological order of the new tasks: each task is after all its new consumers."""
    num_before = Counter(p for node in new for p in node.producers() if p in new)
    order = [node for node in new if node not in num_before]
    for node in order:
        for producer in node.producers():
            if producer in num_before:
                num_before[producer] -= 1
                if not num_before[producer]:
                    order.append(producer)
    assert len(order) == len(new), "the graph has a cycle"
    return order


def _reset_deduction(node: Task, predictor: Predictor) -> None:
    """Reset the deduced fields, and compute depth and path from the consumers. The consumers must
    have been computed before."""
    node.depth = max((c.depth + 1 for c in node.wanted_consumers()), default=0)
    predict(node, predictor)
    node.criteria = _THROUGHPUT
    node.group = None
    node.deadline = None


def _pull_objective(node: Task, new: set[Task]) -> None:
    """Apply the objectives of the readers and of consumers that were wanted before. New consumers
    `push` theirs."""
    for reader in node.readers():
        _apply(node, reader.criteria, reader.deadline)
    for consumer in node.wanted_consumers():
        if consumer not in new:
            others = (p for p in consumer.producers() if p is not node and p.is_wanted)
            in_stage = any(p.depth == node.depth for p in others)
            _push_to(consumer, node, in_stage)


def push(consumer: Task) -> list[Task]:
    """Push the consumer's objective and path to its wanted producers. Returns the producers that
    have changed. The caller must `push` these in turn."""
    producers = _wanted_producers(consumer)
    longer = [producer for producer in producers if _lengthen(producer, consumer)]
    stages = Counter(producer.depth for producer in producers)
    for producer in producers:
        if _push_to(consumer, producer, stages[producer.depth] > 1):
            longer.append(producer)
    return longer


def _lengthened(consumers: Iterable[Task], new: set[Task]) -> set[Task]:
    """Push the paths to producers that were wanted before. Returns the producers whose path has
    become longer."""
    longer: set[Task] = set()
    for consumer in consumers:
        producers = [p for p in _wanted_producers(consumer) if p not in new]
        longer.update(p for p in producers if _lengthen(p, consumer))
    return longer


def _lengthen(node: Task, consumer: Task) -> bool:
    path_s, depth = node.duration_s + consumer.path_s, consumer.depth + 1
    if path_s <= node.path_s * _MIN_GROWTH and depth <= node.depth * _MIN_GROWTH:
        return False
    node.path_s = max(node.path_s, path_s)
    node.depth = max(node.depth, depth)
    return True


def _wanted_producers(node: Task) -> list[Task]:
    """The wanted producers, without duplicates. Other producers are deduced when they become
    wanted."""
    return [producer for producer in dict.fromkeys(node.producers()) if producer.is_wanted]


def _push_to(consumer: Task, producer: Task, in_stage: bool) -> bool:
    # False if another consumer of the producer has a greater depth.
    is_next = producer.depth <= consumer.depth + 1
    if in_stage and is_next and producer.group is None:
        producer.group = consumer.id
        _apply(producer, _THROUGHPUT, consumer.deadline)
        return True
    is_relaxed = in_stage or consumer.criteria is _THROUGHPUT
    return _apply(producer, _THROUGHPUT if is_relaxed else _LATENCY, consumer.deadline)


def _apply(node: Task, criteria: PerformanceCriteria, deadline: float | None) -> bool:
    changed = False
    if (stricter := strictest(node.criteria, criteria)) is not node.criteria:
        node.criteria = stricter
        changed = True
    if deadline is not None and (node.deadline is None or deadline < node.deadline):
        node.deadline = deadline
        changed = True
    return changed
