"""How much work the wanted tasks of a session are, as predicted."""

from collections.abc import Callable, Iterable, Iterator
from math import isclose
from operator import attrgetter

from parrot.serve.graph.nodes import Task
from parrot.serve.graph.objective import predict_again
from parrot.serve.graph.runner import Predictor, Runner


class RemainingWork:
    """Sums what wanted tasks are predicted to take, and predicts it again with what answers teach:
    after the session's 1st, 2nd, 4th, 8th ... task that is done, so O(log n) predictions for each
    of n tasks."""

    def __init__(self, runner: Runner, predictor: Predictor) -> None:
        self._runner = runner
        self._predictor = predictor
        self._wanted: dict[Task, float] = {}  # with the work in the sum below
        self._sum_s = 0.0
        self._num_done = 0
        self._next_prediction = 1
        self._is_learning = False

    def __contains__(self, task: Task) -> bool:
        return task in self._wanted

    def count(self, task: Task) -> None:
        """A wanted task's work is part of what remains."""
        self._sum_s += task.work_s - self._wanted.get(task, 0.0)
        self._wanted[task] = task.work_s

    def discount(self, task: Task) -> None:
        self._sum_s -= self._wanted.pop(task, 0.0)
        if not self._wanted:
            self._sum_s = 0.0  # no rounding errors are left over

    def learns(self) -> bool:
        """Another task is done. Whether all others are to be predicted again by `learning`: answers
        of the same functions change most after the first."""
        self._num_done += 1
        if self._num_done < self._next_prediction or self._is_learning:
            return False
        self._next_prediction *= 2
        self._is_learning = True
        return True

    def learning(self, per_slice: int, update: Callable[[Iterable[Task]], None]) -> Iterator[int]:
        """Work for a backlog. `update` is given tasks whose paths have changed by much."""
        wanted = sorted(self._wanted, key=attrgetter("depth"))  # consumers before producers
        for start in range(0, len(wanted), per_slice):
            tasks = [task for task in wanted[start : start + per_slice] if task in self._wanted]
            changed = predict_again(tasks, self._predictor)
            for task in tasks:
                self.count(task)
            update(changed)
            for task in tasks[:1]:
                self.report(task)
            yield len(tasks)
        self._is_learning = False

    def report(self, task: Task) -> None:
        """Tell the runner what remains of the task's session."""
        self._runner.progressed(task.session_id, self._sum_s)

    def check_integrity(self) -> None:
        assert isclose(self._sum_s, sum(self._wanted.values()), abs_tol=1e-6), self._sum_s
        assert not any(task.is_finished for task in self._wanted), self._wanted
