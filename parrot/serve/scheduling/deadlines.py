"""Which queued calls have right of way because of their deadlines."""

import heapq
from itertools import count

from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock

_MARGIN = 2.0  # a deadline is at risk when less than so many times the predicted seconds are left,
_MARGIN_S = 1.0  # and so much;
_HOPELESS = 0.5  # with less than this of them, the call has no right of way any more
_MIN_GARBAGE = 64


class Deadlines:
    """Which calls have right of way: those that can still meet a deadline, but not by much.

    promote                      demote                   deadline
      |--------- urgent ----------|------- hopeless --------|
                  latest start ->|---- remaining path ------|"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: set[CompletionTask] = set()
        self._changes: list[tuple[float, int, CompletionTask]] = []
        self._numbers = count()

    def is_urgent(self, task: CompletionTask) -> bool:
        if task.deadline is None:
            return False
        left_s, path_s = task.deadline - self._clock.now(), task.remaining_path_s
        return _HOPELESS * path_s < left_s <= _MARGIN * path_s + _MARGIN_S

    def watch(self, task: CompletionTask) -> None:
        """Its deadline or path is new, or it has come."""
        if task.deadline is None:
            return
        self._watched.add(task)
        now = self._clock.now()
        for left_s in (
            _MARGIN * task.remaining_path_s + _MARGIN_S,
            _HOPELESS * task.remaining_path_s,
        ):
            if (when := task.deadline - left_s) >= now:
                heapq.heappush(self._changes, (when, next(self._numbers), task))

    def due(self) -> list[CompletionTask]:
        now = self._clock.now()
        tasks: list[CompletionTask] = []
        while self._changes and self._changes[0][0] <= now:
            task = heapq.heappop(self._changes)[2]
            if task in self._watched:
                tasks.append(task)
        return tasks

    def next_change(self) -> float | None:
        """When `due` will name the next task; None if it will name none."""
        while self._changes and self._changes[0][2] not in self._watched:
            heapq.heappop(self._changes)
        return self._changes[0][0] if self._changes else None

    def forget(self, task: CompletionTask) -> None:
        self._watched.discard(task)
        if len(self._changes) > _MIN_GARBAGE + 4 * len(self._watched):
            self._changes = [change for change in self._changes if change[2] in self._watched]
            heapq.heapify(self._changes)


def latest_start(task: CompletionTask) -> float:
    assert task.deadline is not None, task
    return task.deadline - task.remaining_path_s
