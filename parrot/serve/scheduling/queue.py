"""The order of queued tasks: a heap of groups, each with a heap of its tasks."""

import heapq
from collections.abc import Hashable
from dataclasses import dataclass, field
from itertools import count

from parrot.serve.scheduling.order import OrderPolicy
from parrot.serve.scheduling.task import CompletionTask

SortKey = tuple[float, float]

_MIN_GARBAGE = 64


@dataclass(slots=True, eq=False)
class _Group:
    """`number`: of its valid entry in the heap of groups. `size`: how many tasks it has, which its
    heap does not say."""

    name: Hashable
    key: float
    number: int
    heap: list[tuple[float, int, CompletionTask]] = field(default_factory=list)
    size: int = 0


class TaskQueue:
    """Nothing is ever taken out of the middle of a heap: an entry counts only while its number is
    that of its task or group. A group whose key has shrunk gets a new entry at once (`touch`), one
    whose key has grown when it comes to the top. Every operation costs O(log n) amortised."""

    def __init__(self, order: OrderPolicy) -> None:
        self._order = order
        self._numbers = count()
        self._entries: dict[CompletionTask, tuple[int, _Group]] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._heap: list[tuple[float, int, _Group]] = []
        self._held: list[_Group] = []
        self._num_groups = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, task: CompletionTask) -> bool:
        return task in self._entries

    def tasks(self) -> list[CompletionTask]:
        return list(self._entries)

    @property
    def num_groups(self) -> int:
        """That have tasks."""
        return self._num_groups

    def push(self, task: CompletionTask) -> None:
        name = self._order.group(task)
        group = self._groups.get(name)
        if group is None:
            group = self._groups[name] = _Group(name, self._order.group_key(name), 0)
            self._file(group)
        number = next(self._numbers)
        self._entries[task] = (number, group)
        heapq.heappush(group.heap, (self._order.task_key(task), number, task))
        group.size += 1
        self._num_groups += group.size == 1

    def remove(self, task: CompletionTask) -> None:
        group = self._entries.pop(task)[1]
        group.size -= 1
        self._num_groups -= not group.size

    def touch(self, name: Hashable) -> None:
        """The group's key may have shrunk."""
        group = self._groups.get(name)
        if group is not None and (key := self._order.group_key(name)) < group.key:
            group.key = key
            self._file(group)

    def hold(self, task: CompletionTask) -> None:
        """Pass over all of the task's group until `release`."""
        group = self._entries[task][1]
        group.number = next(self._numbers)
        self._held.append(group)

    def release(self) -> None:
        for group in self._held:
            self._file(group)
        self._held.clear()

    def top(self) -> tuple[SortKey, CompletionTask] | None:
        """The first task and its sort key."""
        while self._heap:
            key, number, group = self._heap[0]
            if group.number != number:
                heapq.heappop(self._heap)
                continue
            self._skip_removed(group)
            if not group.heap:
                heapq.heappop(self._heap)
                del self._groups[group.name]
                continue
            group.key = self._order.group_key(group.name)
            if group.key > key:
                heapq.heappop(self._heap)
                self._file(group)
                continue
            task_key, _, task = group.heap[0]
            return (key, task_key), task
        return None

    def _file(self, group: _Group) -> None:
        group.number = next(self._numbers)
        heapq.heappush(self._heap, (group.key, group.number, group))
        if len(self._heap) > _MIN_GARBAGE + 4 * len(self._groups):
            self._heap = [entry for entry in self._heap if entry[2].number == entry[1]]
            heapq.heapify(self._heap)

    def _skip_removed(self, group: _Group) -> None:
        while group.heap:
            _, number, task = group.heap[0]
            entry = self._entries.get(task)
            if entry is not None and entry[0] == number:
                return
            heapq.heappop(group.heap)
