"""Activation: start what somebody wants, and what that needs; stop what nobody wants any more."""

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice
from math import inf, isclose
from operator import attrgetter

from parrot.serve.graph.nodes import Completion, CompletionState, Reader, Task
from parrot.serve.graph.objective import (
    deduce,
    earliest_deadline,
    objective_of,
    predict,
    predict_again,
    relax_deadlines,
    tighten,
)
from parrot.serve.graph.runner import Predictor, Runner
from parrot.serve.graph.variable import SemanticVariable
from parrot.utils.clock import Clock

_MAX_DEPTH = 4  # tasks above that are asked in turn; beyond, the prediction of activation holds
_MAX_LOOK = 64  # inputs looked at for the first that is missing
_MAX_WOKEN = 512  # tasks that are woken in one turn of the event loop


class Activation:
    """Counts who wants each task, starts wanted tasks whose inputs are ready, and stops tasks that
    nobody wants any more. `num_started`: tasks that are with the runner now.

    `wake` lets the program itself want the tasks that it holds: in the background, behind what is
    read. A task stops to be held when a reader leaves it, when the program `release`s it, or when
    the last task that was read and needed it is cancelled or left.

    Walks are loops, not recursion: a session may be one chain of 10,000 calls. What answers teach
    reaches a task's objective when its inputs are complete, and all objectives after the session's
    1st, 2nd, 4th, 8th ... finished task: O(log n) predictions for each of n tasks."""

    def __init__(self, clock: Clock, runner: Runner, predictor: Predictor) -> None:
        self._clock = clock
        self._runner = runner
        self._predictor = predictor
        self.num_started = 0
        self._asleep: deque[Task] = deque()  # held, but not woken yet, the oldest first
        self._wanted: dict[Task, float] = {}  # with the work in the sum below
        self._remaining_s = 0.0
        self._num_finished = 0
        self._next_prediction = 1

    def add_reader(self, reader: Reader) -> None:
        """Want an unsettled variable, whether or not it has a producer yet."""
        reader.variable.readers.append(reader)
        producer = reader.variable.producer
        if producer is None or producer.is_finished:
            return
        changed = self._update_delivery(producer)
        producer.demand += 1
        producer.asked += 1
        if producer.demand == 1:
            self._activate([producer])
        else:
            if producer.asked == 1:
                changed |= self._ask_above([producer])
            self._update(changed | tighten(producer, reader.criteria, reader.deadline))

    def remove_reader(self, reader: Reader) -> None:
        """The reader has its value or has gone. Work that nobody else asks for is withdrawn, and
        what was to be made of it in the background."""
        if reader not in reader.variable.readers:
            return
        reader.variable.readers.remove(reader)
        producer = reader.variable.producer
        if producer is None or producer.is_finished:
            return
        self._update(self._update_delivery(producer))
        if producer.asked == 1:
            self._release_consumers(producer)
        self._lower([producer], was_asked=True)

    def wake(self, until: float = inf) -> bool:
        """Run in the background what the program holds and has submitted `until` then: every call
        that is not on demand, until its outputs are cancelled or released, or a reader leaves one
        of them. At most 512 calls; False if nothing is left to be woken later."""
        woken: list[Task] = []
        while (
            len(woken) < _MAX_WOKEN
            and self._asleep
            and (self._asleep[0].times.submitted or 0.0) <= until
        ):
            task = self._asleep.popleft()
            if task.is_held and not task.is_finished:
                task.is_woken = True
                task.demand += 1
                woken.append(task)
        self._activate([task for task in woken if task.demand == 1])
        return bool(self._asleep)

    def release(self, variable: SemanticVariable) -> None:
        """The program has decided against the variable: its producer is held no more. Nothing
        happens to that while somebody asks for it."""
        task = variable.producer
        if task is None or task.asked or task.is_finished:
            return
        self._release_consumers(task)
        was_woken = task.is_woken
        task.is_held = task.is_woken = False
        if was_woken:
            self._lower([task], was_asked=False)

    def add_producer(self, task: Task) -> None:
        """A task was linked; its outputs may have been wanted before it came."""
        task.demand, task.asked = self._count_demand(task)
        if task.is_held:
            self._asleep.append(task)
        if task.demand:
            self._activate([task])

    def input_settled(self, task: Task) -> None:
        """One of its inputs got its value (or failed: then the caller fails the task)."""
        task.missing -= 1
        if not task.is_wanted:
            return
        if task.missing:
            self._expect(task)
        elif all(variable.error is None for variable in task.inputs):
            predict(task, self._predictor)
            self._count(task)
            task.objective = objective_of(task)
            self._start(task)

    def finished(self, task: Task) -> None:
        """Handle a task that came to a final state. What was to be made for it alone is
        withdrawn."""
        if task.is_started:
            task.is_started = False
            self.num_started -= 1
        else:
            self._unexpect(task)
        if task.missing and task.demand:
            self._lower(list(task.producers()), was_asked=task.asked > 0)
        if task in self._wanted:
            self._discount(task)
            self._learn()
            self._report(task)

    def check_integrity(self, tasks: Iterable[Task]) -> None:
        """Recount demand; `tasks` are all of the graph's."""
        num_started = 0
        for task in tasks:
            num_started += task.is_started
            if task.is_finished:
                assert not task.is_started, task
                continue
            demand = self._count_demand(task)
            assert (task.demand, task.asked) == demand, (task, task.demand, task.asked, demand)
            assert task.is_wanted == (task.objective is not None), task
            assert task.is_wanted == (task in self._wanted), task
            assert task.is_started == (task.is_wanted and not task.missing), task
            if task.is_wanted:
                assert task.deadline == earliest_deadline(task), (task, task.deadline)
        assert self.num_started == num_started, (self.num_started, num_started)
        remaining_s = sum(self._wanted.values())
        assert isclose(self._remaining_s, remaining_s, abs_tol=1e-6), self._remaining_s
        assert not any(task.is_finished for task in self._wanted), self._wanted

    def _count_demand(self, task: Task) -> tuple[int, int]:
        """Number of those who want the task, and of those who ask for it."""
        num_readers = sum(1 for _ in task.readers())
        consumers = list(task.wanted_consumers())
        num_asking = num_readers + sum(consumer.asked > 0 for consumer in consumers)
        return num_readers + len(consumers) + task.is_woken, num_asking

    def _activate(self, roots: Sequence[Task]) -> None:
        """The roots have just become wanted, and so has all that they need. Either all of them are
        asked for or none is."""
        if not roots:
            return
        now = self._clock.now()
        is_asked = roots[0].asked > 0
        activated = list(roots)
        risen: list[Task] = []
        for task in activated:
            task.state = CompletionState.WAITING
            task.times.activated = now
            task.num_awaited = task.missing
            for producer in task.producers():
                if producer.is_finished:
                    continue
                producer.demand += 1
                producer.asked += is_asked
                if producer.demand == 1:
                    activated.append(producer)
                elif is_asked and producer.asked == 1:
                    risen.append(producer)
        changed = self._ask_above(risen) | deduce(activated, self._predictor)
        for task in activated:
            self._count(task)
            task.objective = objective_of(task)
        self._report(roots[0])
        self._update(changed)
        for task in sorted(activated, key=attrgetter("id")) if len(activated) > 1 else activated:
            if task.state is not CompletionState.WAITING:
                continue
            if task.missing:
                self._expect(task)
            else:
                self._start(task)

    def _ask_above(self, risen: Iterable[Task]) -> set[Task]:
        """These tasks were wanted in the background and are asked for now, and so is all that they
        need. Returns every task that rose so."""
        stack = list(risen)
        found = set(stack)
        while stack:
            for producer in stack.pop().producers():
                producer.asked += 1
                if producer.asked == 1:
                    found.add(producer)
                    stack.append(producer)
        return found

    def _update(self, changed: Iterable[Task]) -> None:
        for task in sorted(changed, key=attrgetter("id")):
            task.objective = objective_of(task)
            if task.is_started and isinstance(task, Completion):
                self._runner.reprioritise(task)

    def _start(self, task: Task) -> None:
        task.state = CompletionState.QUEUED
        task.times.ready = self._clock.now()
        task.is_started = True
        self.num_started += 1
        self._runner.start(task)

    def _expect(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._runner.expect(task, lambda: _ready_at(task, self._clock.now()))

    def _unexpect(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._runner.unexpect(task)

    def _lower(self, tasks: Sequence[Task], *, was_asked: bool) -> None:
        """Each of `tasks` lost one who wanted it, or asked for it. Those without any other stop.
        What nobody asks for any more is not held on its own account either."""
        if not tasks:
            return
        unasked: set[Task] = set()
        stack = list(tasks) if was_asked else []
        while stack:
            task = stack.pop()
            task.asked -= 1
            if not task.asked and not task.is_finished:
                unasked.add(task)
                stack.extend(task.producers())
        kept: set[Task] = set()
        stack = list(tasks)
        while stack:
            task = stack.pop()
            task.demand -= 1
            if task.is_finished:
                continue
            if task in unasked and task.demand == task.is_woken:
                task.is_held = task.is_woken = False
                task.demand = 0
            if task.demand:
                kept.add(task)
            else:
                self._stop(task)
                stack.extend(task.producers())
        relaxed = relax_deadlines(t for t in kept if t.is_wanted and t.deadline is not None)
        self._update(relaxed | {task for task in unasked if task.is_wanted})
        self._report(tasks[0])

    def _release_consumers(self, task: Task) -> None:
        """Make nothing of the task, directly or not, in the background: now, and after the next
        `wake`, which would want what is asleep."""
        below: dict[Task, None] = {}
        stack = [task]
        for other in stack:
            for consumer in other.open_consumers():
                if consumer.asked or consumer in below:
                    continue
                if self._asleep or consumer.is_wanted:
                    below[consumer] = None
                    stack.append(consumer)
        stopped = [consumer for consumer in below if consumer.is_wanted]
        for consumer in below:
            consumer.is_held = consumer.is_woken = False
        for consumer in stopped:
            consumer.demand = 0
            self._stop(consumer)
        lost = [p for consumer in stopped for p in consumer.producers() if p not in below]
        self._lower(lost, was_asked=False)

    def _stop(self, task: Task) -> None:
        """Nobody wants it any more."""
        self._discount(task)
        if task.is_started:
            task.is_started = False
            self.num_started -= 1
            self._runner.withdraw(task)
            for output in task.outputs:
                if not output.is_settled:
                    output.restart()
        task.state = CompletionState.IDLE
        task.objective = None
        self._unexpect(task)

    def _update_delivery(self, task: Task) -> set[Task]:
        """A reader of the task has come or gone. Returns the task if that changed whether its
        tokens are to be delivered as they come."""
        if not isinstance(task, Completion):
            return set()
        before = task.wants_stream, task.may_lose
        task.wants_stream = any(reader.wants_stream for reader in task.readers())
        task.may_lose = any(reader.may_lose for reader in task.readers())
        return set() if before == (task.wants_stream, task.may_lose) else {task}

    # Predictions

    def _count(self, task: Task) -> None:
        """A wanted task's work is part of what remains."""
        self._remaining_s += task.work_s - self._wanted.get(task, 0.0)
        self._wanted[task] = task.work_s

    def _discount(self, task: Task) -> None:
        self._remaining_s -= self._wanted.pop(task)
        if not self._wanted:
            self._remaining_s = 0.0  # no rounding errors are left over

    def _learn(self) -> None:
        """Another task has finished. Answers of the same functions change most after the first."""
        self._num_finished += 1
        if self._num_finished < self._next_prediction:
            return
        self._next_prediction *= 2
        changed = predict_again(self._wanted, self._predictor)
        for task in self._wanted:
            self._count(task)
        self._update(changed)

    def _report(self, task: Task) -> None:
        self._runner.progressed(task.session_id, self._remaining_s)


def _ready_at(task: Task, now: float, depth: int = _MAX_DEPTH) -> float:
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
    missing = next((v for v in islice(task.inputs, _MAX_LOOK) if not v.is_settled), None)
    if missing is None:
        return when
    above = missing.producer
    if above is None:
        return inf
    if depth and above.missing:
        when = max(when, _ready_at(above, now, depth - 1) + above.duration_s)
    return when
