"""Activation: starts the tasks that a reader or the program demands, and stops all other tasks.

`demand` counts the readers and the wanted consumers of a task, plus 1 for background work. Example:
the calls a and b make the inputs of call c, and a client reads the output of c.

    event                  demand a, b, c   effect
    calls are submitted        0  0  0      none: all calls are IDLE
    c gets a reader            1  1  1      a and b start, c is WAITING for 2 inputs
    a finishes                 -  1  1      c is WAITING for 1 input
    the reader leaves          -  0  0      b is withdrawn, b and c are IDLE
    c gets a reader            -  1  1      b starts again
    b finishes                 -  -  1      c starts

With `start_background` before the reader, the demand is 2, 2, 1 and `reader_demand` is 0, 0, 0: all
three calls are background work. When the reader comes, the demand is 2, 2, 2 and `reader_demand` is
1, 1, 1.

Reads of variables call `add_reader` and `remove_reader` (serve/readers.py). A read that blocks its
program calls `start_background`. `Propagation` reports new tasks, settled inputs, finished tasks.
"""

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator
from math import inf, isclose
from operator import attrgetter

from parrot.protocol.errors import ParrotError
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.graph.nodes import (
    Completion,
    CompletionState,
    Executor,
    Predictor,
    Reader,
    SemanticVariable,
    Task,
    VariableState,
)
from parrot.serve.graph.objective import (
    deduce,
    drop_stale_deadline,
    earliest_deadline,
    objective_of,
    predict,
    predict_again,
    push,
    ready_at,
    tighten,
)
from parrot.utils.clock import Clock
from parrot.utils.tasks import Backlog


class RemainingWork:
    """The predicted work of a session's wanted and unfinished tasks. All of them are predicted
    again after the session's 1st, 2nd, 4th, 8th, ... finished task. So each of n tasks is predicted
    O(log n) times."""

    def __init__(self, runner: Executor, predictor: Predictor) -> None:
        self._runner = runner
        self._predictor = predictor
        self._wanted: dict[Task, float] = {}  # The work of each task in `_sum_s`.
        self._sum_s = 0.0
        self._num_done = 0
        self._next_prediction = 1
        self._is_repredicting = False

    def __contains__(self, task: Task) -> bool:
        return task in self._wanted

    def add(self, task: Task) -> None:
        """Add a wanted task, or update its work."""
        self._sum_s += task.work_s - self._wanted.get(task, 0.0)
        self._wanted[task] = task.work_s

    def remove(self, task: Task) -> None:
        self._sum_s -= self._wanted.pop(task, 0.0)
        if not self._wanted:
            self._sum_s = 0.0  # Remove rounding errors.

    def should_repredict(self) -> bool:
        """Count a finished task. Returns whether the caller must run `repredict` now."""
        # The first outputs of a function change its predictions most.
        self._num_done += 1
        if self._num_done < self._next_prediction or self._is_repredicting:
            return False
        self._next_prediction *= 2
        self._is_repredicting = True
        return True

    def repredict(self, per_slice: int, update: Callable[[Iterable[Task]], None]) -> Iterator[int]:
        """Predict all wanted tasks again, `per_slice` tasks per step. `update` receives the tasks
        whose paths have changed by more than 10%."""
        wanted = sorted(self._wanted, key=attrgetter("depth"))  # Consumers before producers.
        for start in range(0, len(wanted), per_slice):
            tasks = [task for task in wanted[start : start + per_slice] if task in self._wanted]
            changed = predict_again(tasks, self._predictor)
            for task in tasks:
                self.add(task)
            update(changed)
            for task in tasks[:1]:
                self.report(task)
            yield len(tasks)
        self._is_repredicting = False

    def report(self, task: Task) -> None:
        """Report the remaining work of the task's session to the runner."""
        self._runner.update_remaining_work(task.session_id, self._sum_s)

    def check_integrity(self) -> None:
        assert isclose(self._sum_s, sum(self._wanted.values()), abs_tol=1e-6), self._sum_s
        assert not any(task.is_finished for task in self._wanted), self._wanted


# Background tasks that one turn of the event loop starts. A larger value makes turns longer.
_MAX_BACKGROUND_STARTS = 512


class Activation:
    """Counts the demand for each task, starts wanted tasks whose inputs are ready, and withdraws
    tasks without demand. A change of demand is propagated to producers in slices of the backlog,
    without recursion, because a session may be one chain of 65,536 calls."""

    def __init__(
        self, clock: Clock, runner: Executor, predictor: Predictor, backlog: Backlog
    ) -> None:
        self._clock = clock
        self._runner = runner
        self._predictor = predictor
        self._backlog = backlog
        self.num_started = 0  # Tasks that the runner has now.
        self._is_closed = False
        # Tasks that may run in the background and were not started there, oldest first.
        self._background: deque[Task] = deque()
        self._dirty: deque[Task] = deque()  # Tasks whose demand may have changed.
        # Tasks whose deduced values have changed and must be pushed to their producers.
        self._to_push: OrderedDict[Task, None] = OrderedDict()
        self._is_walking = False
        # The criteria of the last read. The journal does not have them, so after a takeover this
        # value is used until the next read.
        self._last_read_criteria = PerformanceCriteria.THROUGHPUT
        self._remaining = RemainingWork(runner, predictor)

    @property
    def has_background(self) -> bool:
        """Whether `start_background` may start a task, now or later."""
        return bool(self._background)

    def add_reader(self, reader: Reader) -> None:
        """Add a reader of an unsettled variable. The variable may have no producer yet."""
        reader.variable.readers.append(reader)
        self._last_read_criteria = reader.criteria
        producer = reader.variable.producer
        if producer is None or producer.is_finished:
            return
        changed = self._update_delivery(producer)
        producer.demand += 1
        producer.reader_demand += 1
        if producer.is_wanted and tighten(producer, reader.criteria, reader.deadline):
            changed.add(producer)
            self._to_push[producer] = None
        self._refresh(changed)
        self._walk(producer)

    def remove_reader(self, reader: Reader) -> None:
        """Remove a reader that has its value or has left. Tasks that lose their last demand are
        withdrawn. If the producer has no reader demand left, background work on it and on its
        consumers stops."""
        if reader not in reader.variable.readers:
            return
        reader.variable.readers.remove(reader)
        producer = reader.variable.producer
        if producer is None or producer.is_finished:
            return
        self._refresh(self._update_delivery(producer))
        producer.demand -= 1
        producer.reader_demand -= 1
        if not producer.reader_demand:
            self._release_consumers(producer)
        if reader.deadline is not None:
            self._to_push[producer] = None
        self._walk(producer)

    def start_background(self, until: float = inf) -> bool:
        """Start background work: up to 512 unread tasks that were submitted by `until`, oldest
        first. Returns whether later calls may start more tasks."""
        started: list[Task] = []
        while (
            len(started) < _MAX_BACKGROUND_STARTS
            and self._background
            and (self._background[0].times.submitted or 0.0) <= until
        ):
            task = self._background.popleft()
            if task.allows_background and not task.is_finished:
                task.in_background = True
                task.demand += 1
                started.append(task)
        self._walk(*started)
        return bool(self._background)

    def release(self, variable: SemanticVariable) -> None:
        """The program no longer needs the variable. Background work on its producer and on the
        consumers stops. Does nothing while the producer has reader demand."""
        task = variable.producer
        if task is None or task.reader_demand or task.is_finished:
            return
        self._release_consumers(task)
        self._clear_background(task)
        self._walk(task)

    def refuse_readers(self, task: Task, error: ParrotError) -> None:
        """No engine can run the started task now. Clients that wait for it, or for a wanted
        consumer, receive `error`, except patient ones. Demand without a client ends. A task that
        no reader demands then is idle, and starts again with its next reader."""
        if not self._is_closed:
            self._backlog.add(self, self._refusing(task, error))

    def add_producer(self, task: Task) -> None:
        """Add a linked task. Its outputs may already have readers and wanted consumers."""
        task.demand, task.reader_demand = self._count_demand(task)
        if task.allows_background:
            self._background.append(task)
        if task.demand:
            self._walk(task)

    def input_set(self, task: Task) -> None:
        """The program has set an input of the task."""
        # A program sets an input because it will read the result. So background work that misses no
        # other input gets the criteria of the last read. A task of a stage does not, because no
        # reader waits for one task of a stage alone.
        if task.missing == 1 and task.is_wanted and not task.reader_demand and task.group is None:
            tighten(task, self._last_read_criteria, None)
        self.input_settled(task)

    def input_settled(self, task: Task) -> None:
        """An input of the task was set or has failed. After a failure the caller fails the task."""
        task.missing -= 1
        if not task.is_wanted:
            return
        if task.missing:
            self._expect(task)
        elif all(variable.error is None for variable in task.inputs):
            predict(task, self._predictor)
            self._remaining.add(task)
            task.objective = objective_of(task)
            self._start(task)

    def finished(self, task: Task) -> None:
        """Remove a task that has reached a final state. Producers without other demand are
        withdrawn."""
        if task.is_started:
            task.is_started = False
            self.num_started -= 1
        else:
            self._stop_expecting(task)
        self._propagate_demand(task, has_demand=False, has_reader_demand=False)
        if task in self._remaining:
            self._remaining.remove(task)
            if task.state is CompletionState.DONE and self._remaining.should_repredict():
                per_slice = self._backlog.per_slice
                self._backlog.add(self, self._remaining.repredict(per_slice, self._refresh))
            self._remaining.report(task)
        self._walk()

    def close(self) -> None:
        """Stop activation: no task starts from now on."""
        self._is_closed = True
        self._background.clear()
        self._dirty.clear()
        self._to_push.clear()

    def check_integrity(self, tasks: Iterable[Task]) -> None:
        """Recount the demand. `tasks`: all tasks of the graph."""
        num_started = 0
        is_walking = self in self._backlog
        for task in tasks:
            num_started += task.is_started
            if task.is_finished:
                assert not task.is_started, task
                continue
            demand = self._count_demand(task)
            # A crash may have settled some outputs. The task runs again for the others.
            is_partial = any(output.is_settled for output in task.outputs)
            counted = task.demand, task.reader_demand
            assert is_partial or counted == demand, (task, counted, demand)
            assert task.is_wanted == (task.objective is not None), task
            assert task.is_wanted == (task in self._remaining), task
            assert task.is_started == (task.is_wanted and not task.missing), task
            if not is_walking:
                marks = task.is_counted, task.is_counted_as_read
                assert marks == (task.demand > 0, task.reader_demand > 0), task
            if task.is_wanted and not is_walking:
                assert task.deadline == earliest_deadline(task), (task, task.deadline)
        assert self.num_started == num_started, (self.num_started, num_started)
        self._remaining.check_integrity()

    def _count_demand(self, task: Task) -> tuple[int, int]:
        """Count `demand` and `reader_demand` from the readers and consumers."""
        num_readers = sum([len(output.readers) for output in task.outputs])
        consumers = task.wanted_consumers()
        reader_demand = num_readers + sum([consumer.is_counted_as_read for consumer in consumers])
        return num_readers + len(consumers) + task.in_background, reader_demand

    def _walk(self, *tasks: Task) -> None:
        """Check the demand of these tasks, then of all tasks whose demand changes as a result."""
        if self._is_closed:
            return
        self._dirty.extend(tasks)
        if (self._dirty or self._to_push) and not self._is_walking:
            self._is_walking = True
            self._backlog.add(self, self._walking())

    def _walking(self) -> Iterator[int]:
        try:
            while self._dirty or self._to_push:
                yield self._step()
        finally:
            self._is_walking = False

    def _step(self) -> int:
        """Apply and propagate the demand of a slice of tasks. Start the newly wanted tasks whose
        inputs are ready. Returns the number of tasks that were checked."""
        activated: dict[Task, None] = {}
        changed: set[Task] = set()
        task, count = None, 0
        while self._dirty and count < self._backlog.per_slice:
            task = self._dirty.popleft()
            count += 1
            if not task.is_finished:
                self._apply_demand(task, activated, changed)
        if activated:
            longer = deduce(list(activated), self._predictor)
            changed |= longer
            self._to_push.update(dict.fromkeys(longer))
            for new in activated:
                self._remaining.add(new)
                new.objective = objective_of(new)
        if task is not None:
            self._remaining.report(task)
        while self._to_push and count < self._backlog.per_slice:
            changed |= self._push_next()
            count += 1
        self._refresh(changed - activated.keys())
        for task in sorted(activated, key=attrgetter("id")) if len(activated) > 1 else activated:
            if task.state is not CompletionState.WAITING:
                continue
            if task.missing:
                self._expect(task)
            else:
                self._start(task)
        return count

    def _apply_demand(self, task: Task, activated: dict[Task, None], changed: set[Task]) -> None:
        """Activate or stop the task according to its demand, and propagate the demand."""
        # The last reader demand has gone, so background work on the task stops as well.
        if task.is_counted_as_read and not task.reader_demand and task.demand == task.in_background:
            self._clear_background(task)
        is_wanted, is_read = task.demand > 0, task.reader_demand > 0
        if is_wanted and not task.is_counted:
            task.state = CompletionState.WAITING
            task.times.activated = self._clock.now()
            task.num_awaited = task.missing
            activated[task] = None
        elif task.is_counted and not is_wanted:
            activated.pop(task, None)
            self._stop(task)
        elif task.objective is not None and task.objective.is_background == is_read:
            changed.add(task)
        self._propagate_demand(task, has_demand=is_wanted, has_reader_demand=is_read)

    def _propagate_demand(self, task: Task, *, has_demand: bool, has_reader_demand: bool) -> None:
        added = has_demand - task.is_counted
        added_reader = has_reader_demand - task.is_counted_as_read
        task.is_counted, task.is_counted_as_read = has_demand, has_reader_demand
        if not added and not added_reader:
            return
        for producer in task.producers():
            if producer.is_finished:
                continue
            producer.demand += added
            producer.reader_demand += added_reader
            has_changed = producer.is_counted != (producer.demand > 0)
            if has_changed or producer.is_counted_as_read != (producer.reader_demand > 0):
                self._dirty.append(producer)
            if producer.deadline is not None:  # The deadline may have come from this task.
                self._to_push[producer] = None

    def _push_next(self) -> set[Task]:
        """Push the deduced values of one task to its producers. Returns all tasks whose deduced
        values have changed."""
        task, _ = self._to_push.popitem(last=False)
        if not task.is_wanted:
            return set()
        changed = set(push(task))
        above = list(changed)
        if drop_stale_deadline(task):
            changed.add(task)
            above = [producer for producer in task.producers() if producer.is_wanted]
        self._to_push.update(dict.fromkeys(above))
        return changed

    def _refresh(self, changed: Iterable[Task]) -> None:
        for task in sorted(changed, key=attrgetter("id")):
            if not task.is_wanted:
                continue
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
            self._runner.expect(task, lambda: ready_at(task, self._clock.now()))

    def _stop_expecting(self, task: Task) -> None:
        if isinstance(task, Completion):
            self._runner.stop_expecting(task)

    def _release_consumers(self, task: Task) -> None:
        """Stop background work on all tasks downstream of the task, and keep `start_background`
        from starting them later."""
        if next(task.open_consumers(), None) is not None and not self._is_closed:
            self._backlog.add(self, self._releasing(task))

    def _releasing(self, task: Task) -> Iterator[int]:
        below, found = [task], {task}
        for other in below:
            for consumer in other.open_consumers():
                is_new = not consumer.reader_demand and consumer not in found
                if is_new and (self._background or consumer.demand):
                    found.add(consumer)
                    below.append(consumer)
                    self._clear_background(consumer)
                    self._dirty.append(consumer)
                yield 1
        self._walk()

    def _refusing(self, task: Task, error: ParrotError) -> Iterator[int]:
        below, found = [task], {task}
        for other in below:
            if other.is_finished:
                continue
            for output in other.outputs:
                if output.is_settled:
                    continue
                output.refuse(error)
                for reader in [one for one in output.readers if not one.has_client]:
                    self.remove_reader(reader)
            if other.in_background:
                self._clear_background(other)
                self._dirty.append(other)
            consumers = [one for one in other.wanted_consumers() if one not in found]
            found.update(consumers)
            below += dict.fromkeys(consumers)
            yield 1
        self._walk()

    def _clear_background(self, task: Task) -> None:
        """The task may no longer run in the background."""
        task.demand -= task.in_background
        task.allows_background = task.in_background = False

    def _stop(self, task: Task) -> None:
        """Withdraw a task whose demand is 0. It may become wanted again later."""
        self._remaining.remove(task)
        if task.is_started:
            task.is_started = False
            self.num_started -= 1
            self._runner.withdraw(task)
            for output in task.outputs:
                if not output.is_settled:
                    output.reset_partial_text()
        task.state = CompletionState.IDLE
        task.objective = None
        self._stop_expecting(task)

    def _update_delivery(self, task: Task) -> set[Task]:
        """Set the task's `wants_stream` and `is_racing` after a reader was added or removed.
        Returns the task if one of them has changed."""
        if not isinstance(task, Completion):
            return set()
        before = task.wants_stream, task.is_racing
        task.wants_stream = task.is_racing = False
        for reader in task.readers():
            task.wants_stream |= reader.wants_stream
            task.is_racing |= reader.is_racing
        return set() if before == (task.wants_stream, task.is_racing) else {task}


class Propagation:
    """Propagates settled variables. The producer is notified at once. Consumers are notified one by
    one from the backlog, because one failure may fail thousands of tasks. For a consumer that was
    not notified yet, the input still counts as missing."""

    def __init__(
        self,
        clock: Clock,
        runner: Executor,
        activation: Activation,
        backlog: Backlog,
    ) -> None:
        self.num_settled: defaultdict[VariableState, int] = defaultdict(int)
        # Is called with each settled variable, before its consumers are notified.
        self.on_settled: Callable[[SemanticVariable], None] | None = None
        self._clock = clock
        self._runner = runner
        self._activation = activation
        self._backlog = backlog
        self._is_closed = False
        self._unnotified: dict[SemanticVariable, deque[Task]] = {}

    def settled(self, variable: SemanticVariable) -> None:
        """Propagate a variable that was just set or has just failed."""
        self.num_settled[variable.state] += 1
        variable.readers.clear()
        if variable.producer is not None:
            self._finish(variable.producer, variable)
        if self.on_settled is not None:
            self.on_settled(variable)
        if variable.consumers and not self._is_closed:  # Later consumers find it settled.
            self._unnotified[variable] = deque(variable.consumers)
            self._backlog.add(self._activation, self._notify_consumers(variable))

    def add_task(self, task: Task) -> None:
        """Add a linked task. If an input has failed, the task fails at once."""
        failed = next((variable for variable in task.inputs if variable.error is not None), None)
        if failed is not None:
            self._fail(task, failed)
        elif not task.is_finished:
            self._activation.add_producer(task)

    def cancel(self, task: Task, error: ParrotError) -> None:
        """Cancel the task in any state, and fail its unsettled outputs with `error`."""
        if task.is_started:
            self._runner.cancel(task, error)
        self._fail_outputs(task, CompletionState.CANCELLED, error)

    def close(
        self, tasks: Iterable[Task], variables: Iterable[SemanticVariable], error: ParrotError
    ) -> Iterator[int]:
        """Close the graph: no task starts from now on. Each step of the result cancels one task or
        fails one unsettled variable."""
        self._is_closed = True
        self._activation.close()
        self._unnotified.clear()
        self._backlog.drop(self._activation)
        return self._closing(tasks, variables, error)

    def check_integrity(self, tasks: Iterable[Task]) -> None:
        """Recount the missing inputs of the tasks."""
        pending = Counter(consumer for waiting in self._unnotified.values() for consumer in waiting)
        for task in tasks:
            num_unsettled = sum(not variable.is_settled for variable in task.inputs)
            assert self._is_closed or task.missing == num_unsettled + pending[task], task
            assert task.is_finished == all(variable.is_settled for variable in task.outputs), task

    def _closing(
        self, tasks: Iterable[Task], variables: Iterable[SemanticVariable], error: ParrotError
    ) -> Iterator[int]:
        for task in tasks:
            self.cancel(task, error)
            yield 1
        for variable in variables:
            if not variable.is_settled:
                variable.fail(error)
            yield 1

    def _notify_consumers(self, variable: SemanticVariable) -> Iterator[int]:
        """Notify the variable's consumers, one per step."""
        while pending := self._unnotified.get(variable):
            consumer = pending.popleft()
            if variable.producer is None and variable.error is None:
                self._activation.input_set(consumer)
            else:
                self._activation.input_settled(consumer)
            if variable.error is not None:
                self._fail(consumer, variable)
            yield 1
        self._unnotified.pop(variable, None)

    def _finish(self, task: Task, output: SemanticVariable) -> None:
        """Finish the task if all its outputs are settled. `output`: the output settled last."""
        if task.is_end_handled or not all(variable.is_settled for variable in task.outputs):
            return
        task.is_end_handled = True
        if not task.is_finished:
            has_failed = output.error is not None
            task.state = CompletionState.FAILED if has_failed else CompletionState.DONE
        if task.times.finished is None:
            task.times.finished = self._clock.now()
        self._activation.finished(task)
        self._runner.finished(task)

    def _fail(self, task: Task, cause: SemanticVariable) -> None:
        """Fail a task whose input has failed. The error has the type of the first failure, so the
        HTTP status stays the same."""
        if task.is_finished:
            return
        assert cause.error is not None
        origin = cause.origin or cause.error
        error = type(origin)(
            f"`{task.func_name}` needs `{cause.name}`, which failed: {origin.message}",
            param=origin.param,
        )
        error.__cause__ = cause.error
        for variable in task.outputs:
            variable.origin = origin
        self._fail_outputs(task, CompletionState.FAILED, error)

    def _fail_outputs(self, task: Task, state: CompletionState, error: ParrotError) -> None:
        if not task.is_finished:
            task.state = state
        for variable in task.outputs:
            if not variable.is_settled:
                variable.fail(error)
