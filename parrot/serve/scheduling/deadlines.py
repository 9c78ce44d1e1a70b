"""Which queued calls have right of way because of their deadlines."""

from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

_MARGIN = 2.0  # a deadline is at risk when less than so many times the predicted seconds are left,
_MARGIN_S = 1.0  # and so much;
_HOPELESS = 0.5  # with less than this of them, the call has no right of way any more
_AFTER_S = 1e-6  # so much after a change it has happened, however times are rounded


class Deadlines:
    """Which calls have right of way: those that can still meet a deadline, but not by much.

    promote                      demote                   deadline
      |--------- urgent ----------|------- hopeless --------|
                  latest start ->|---- remaining path ------|"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._changes: LazyHeap[CompletionTask, float] = LazyHeap()  # each task's next one

    def is_urgent(self, task: CompletionTask) -> bool:
        if task.deadline is None:
            return False
        left_s, path_s = task.deadline - self._clock.now(), task.remaining_path_s
        return _HOPELESS * path_s < left_s <= _MARGIN * path_s + _MARGIN_S

    def watch(self, task: CompletionTask) -> None:
        """Take in a task, or that its deadline or path has changed."""
        self._changes.discard(task)
        if task.deadline is None:
            return
        path_s, now = task.remaining_path_s, self._clock.now()
        for left_s in (_MARGIN * path_s + _MARGIN_S, _HOPELESS * path_s):
            if (when := task.deadline - left_s + _AFTER_S) > now:
                self._changes.set(task, when)
                return

    def due(self) -> list[CompletionTask]:
        """The tasks that have become urgent or hopeless since the last call."""
        tasks = list(self._changes.pop_until(self._clock.now()))
        for task in tasks:
            self.watch(task)
        return tasks

    def next_change(self) -> float | None:
        """When the next task will become urgent or hopeless; None if none will."""
        top = self._changes.top()
        return None if top is None else top[0]

    def forget(self, task: CompletionTask) -> None:
        self._changes.discard(task)


def latest_start(task: CompletionTask) -> float:
    assert task.deadline is not None, task
    return task.deadline - task.remaining_path_s
