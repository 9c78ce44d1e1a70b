"""The order of queued tasks: a heap of apps, each with a heap of its tasks."""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from parrot.serve.scheduler.task import CompletionTask

SortKey = tuple[float, float]


class OrderPolicy(Protocol):
    """Keys are on the clock's scale; least first. A task's key may change only by `update`; an
    app's may only grow while it has tasks."""

    def app(self, task: CompletionTask) -> Hashable: ...

    def app_key(self, app: Hashable) -> float: ...

    def task_key(self, task: CompletionTask) -> float: ...


@dataclass(slots=True, eq=False)
class _AppQueue:
    app: Hashable
    key: float
    heap: list[tuple[float, int, CompletionTask]] = field(default_factory=list)


class TaskQueue:
    """Removal is lazy: a heap entry counts only while the task is in `_entries` with its number.
    Every operation costs O(log n) amortised."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._numbers = count()
        self._entries: dict[CompletionTask, tuple[int, _AppQueue]] = {}
        self._apps: dict[Hashable, _AppQueue] = {}
        self._heap: list[tuple[float, int, _AppQueue]] = []

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task: CompletionTask) -> bool:
        return task in self._entries

    def tasks(self) -> list[CompletionTask]:
        return list(self._entries)

    def push(self, task: CompletionTask) -> None:
        app = self._order.app(task)
        queue = self._apps.get(app)
        if queue is None:
            queue = self._apps[app] = _AppQueue(app, self._order.app_key(app))
            heapq.heappush(self._heap, (queue.key, next(self._numbers), queue))
        number = next(self._numbers)
        self._entries[task] = (number, queue)
        heapq.heappush(queue.heap, (self._order.task_key(task), number, task))

    def remove(self, task: CompletionTask) -> None:
        del self._entries[task]

    def top(self) -> tuple[SortKey, CompletionTask] | None:
        """The first task and its sort key."""
        while self._heap:
            key, _, queue = self._heap[0]
            self._skip_removed(queue)
            if not queue.heap:
                heapq.heappop(self._heap)
                del self._apps[queue.app]
                continue
            now_key = self._order.app_key(queue.app)
            if now_key > key:
                queue.key = now_key
                heapq.heapreplace(self._heap, (now_key, next(self._numbers), queue))
                continue
            task_key, _, task = queue.heap[0]
            return (key, task_key), task
        return None

    def _skip_removed(self, queue: _AppQueue) -> None:
        while queue.heap:
            _, number, task = queue.heap[0]
            entry = self._entries.get(task)
            if entry is not None and entry[0] == number:
                return
            heapq.heappop(queue.heap)
