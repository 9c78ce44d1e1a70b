"""Deduction: the objective of each wanted task, found by walking back from the wanted outputs.

    reader (LATENCY) <- reduce    depth 0   LATENCY
                          ^ ^ ^
                        map map map   depth 1   THROUGHPUT, one task group: only the last one counts
                          ^
                        split         depth 2   THROUGHPUT

A task takes the strictest of what its readers and consumers ask:
- of a direct reader: the reader's own criteria;
- of a consumer for which it is one of several tasks at the same depth (a stage): THROUGHPUT, and
  the task group of that consumer;
- of background work, for which no reader waits: THROUGHPUT;
- of any other consumer that is LATENCY, TTFT or TPOT work: LATENCY, since nothing of the consumer
  can appear before its input is complete; of a THROUGHPUT consumer: THROUGHPUT.

Everything only tightens while a task stays wanted, but deadlines go with those who set them: a
program that reads again and again with short timeouts must not leave the first of them behind. The
functions touch nothing but the deduced fields of the nodes.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf

from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import Objective, Predictor, Task

# A task that is already wanted hears of a longer path below it when that grew by this factor, so a
# chain that keeps growing while it waits costs O(log n) per task and not O(n).
_MIN_GROWTH = 1.1

_MAX_DEPTH = 4  # tasks above that are asked in turn; beyond, the prediction of activation holds
_MAX_INPUTS_SCANNED = 64  # inputs looked at for the first that is missing

_THROUGHPUT = PerformanceCriteria.THROUGHPUT
_LATENCY = PerformanceCriteria.LATENCY


def strictest(a: PerformanceCriteria, b: PerformanceCriteria) -> PerformanceCriteria:
    """The weakest criteria that satisfies both."""
    if a is b or b is _THROUGHPUT:
        return a
    return b if a is _THROUGHPUT else _LATENCY


def strictest_objective(a: Objective | None, b: Objective | None) -> Objective | None:
    """The weakest objective that satisfies both. The group is that of the first."""
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
    """Deduce tasks that have just become wanted. Returns those, among all that were wanted before,
    that this made stricter or longer, and which have yet to `push`."""
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
    changed = _lengthened(order, new)  # before any says which of its producers are a stage
    for node in order:
        _pull_objective(node, new)
        changed.update(p for p in push(node) if p not in new)
    return changed


def tighten(node: Task, criteria: PerformanceCriteria, deadline: float | None) -> bool:
    """A further reader of a wanted task. Returns whether that made it stricter, so that it has to
    `push`."""
    return _apply(node, criteria, deadline)


def earliest_deadline(node: Task) -> float | None:
    """The earliest deadline of those who want the task; None if none of them has one."""
    asked = [reader.deadline for reader in node.readers()]
    asked += [consumer.deadline for consumer in node.wanted_consumers()]
    return min((when for when in asked if when is not None), default=None)


def drop_stale_deadline(node: Task) -> bool:
    """Drop the deadline of those who wanted the task and have gone. Returns whether that changed
    its deadline, so that its producers' may change."""
    deadline = earliest_deadline(node)
    if deadline != node.deadline:
        node.deadline = deadline
        return True
    return False


def ready_at(task: Task, now: float, depth: int = _MAX_DEPTH) -> float:
    """When a wanted task that waits will have its inputs, on the clock's scale: the latest of
    - what was predicted when it became wanted, by the longest path above it;
    - when the rest of its inputs will be there, if they come as fast as those that have come;
    - when the task that makes its first missing input will be done, if that waits, too.
    Infinite if nothing but the program can give that input."""
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
    if depth and above.missing and above.is_wanted:  # else it is about to be
        when = max(when, ready_at(above, now, depth - 1) + above.duration_s)
    return when


def predict_again(wanted: Iterable[Task], predictor: Predictor) -> set[Task]:
    """Predict all tasks that are wanted with what has been learnt since. Returns those whose path
    has changed by much."""
    changed: set[Task] = set()
    for node in _consumers_first(set(wanted)):
        before_s = node.path_s
        predict(node, predictor)
        if not before_s / _MIN_GROWTH <= node.path_s <= before_s * _MIN_GROWTH:
            changed.add(node)
    return changed


def predict(node: Task, predictor: Predictor) -> None:
    """Predict its duration and its work, and so its path, from the paths of its consumers."""
    below_s = max([consumer.path_s for consumer in node.wanted_consumers()], default=0.0)
    node.duration_s, node.work_s = predictor.predict(node)
    node.path_s = node.duration_s + below_s


def _consumers_first(new: set[Task]) -> list[Task]:
    """Topological order of the new tasks, each after all its new consumers."""
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
    """Start its deduction afresh: depth and path from its consumers, which have theirs."""
    node.depth = max((c.depth + 1 for c in node.wanted_consumers()), default=0)
    predict(node, predictor)
    node.criteria = _THROUGHPUT
    node.group = None
    node.deadline = None


def _pull_objective(node: Task, new: set[Task]) -> None:
    """Apply what its readers ask, and the consumers that were wanted before (new ones push)."""
    for reader in node.readers():
        _apply(node, reader.criteria, reader.deadline)
    for consumer in node.wanted_consumers():
        if consumer not in new:
            others = (p for p in consumer.producers() if p is not node and p.is_wanted)
            in_stage = any(p.depth == node.depth for p in others)
            _push_to(consumer, node, in_stage)


def push(consumer: Task) -> list[Task]:
    """Tell its producers what it asks of them, and how long the path below them is. Returns those
    that this made stricter or longer, which have to `push` in turn."""
    producers = _wanted_producers(consumer)
    longer = [producer for producer in producers if _lengthen(producer, consumer)]
    stages = Counter(producer.depth for producer in producers)
    for producer in producers:
        if _push_to(consumer, producer, stages[producer.depth] > 1):
            longer.append(producer)
    return longer


def _lengthened(consumers: Iterable[Task], new: set[Task]) -> set[Task]:
    """Tell the producers that were wanted before how long the paths below them are. Returns those
    that this made longer."""
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
    """Those that are wanted, once each. Others hear of what is asked when they become so."""
    return [producer for producer in dict.fromkeys(node.producers()) if producer.is_wanted]


def _push_to(consumer: Task, producer: Task, in_stage: bool) -> bool:
    is_next = producer.depth <= consumer.depth + 1  # not a further consumer, later in the graph
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
