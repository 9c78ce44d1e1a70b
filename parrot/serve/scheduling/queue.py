"""The order of a tenant's queued tasks: a heap of groups, each with a heap of its tasks."""

from collections.abc import Hashable

from parrot.serve.scheduling.order import OrderPolicy
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap

SortKey = tuple[float, float]

_LOOK_AHEAD = 4  # tasks that do not fit, or groups held, that are passed over in a round
MAX_PASSED = 64  # times that a task may be passed over before the others wait for it


class TaskQueue:
    """The queued tasks of a tenant that may run on the same models.

    A group's key is looked at again when the group comes to the top, since it may have grown, and
    when `touch` says that it has shrunk. What is set aside in a round of scheduling does not come
    to the top again before `end_round`; `is_over`: nothing does. Every operation costs O(log n)
    amortised."""

    def __init__(self, order: OrderPolicy) -> None:
        self.is_over = False
        self._order = order
        self._group_of: dict[CompletionTask, Hashable] = {}
        self._tasks: dict[Hashable, LazyHeap[CompletionTask, float]] = {}  # by group
        self._groups: LazyHeap[Hashable, float] = LazyHeap()  # all but those held
        self._held: dict[Hashable, None] = {}
        self._passed: list[CompletionTask] = []

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, task: CompletionTask) -> bool:
        return task in self._group_of

    def tasks(self) -> list[CompletionTask]:
        return list(self._group_of)

    @property
    def is_empty(self) -> bool:
        """Whether there is no task, not even one that was passed over."""
        return not self._group_of and not self._passed

    @property
    def num_groups(self) -> int:
        """Number of groups with queued tasks."""
        return len(self._tasks)

    def push(self, task: CompletionTask) -> int:
        """Returns how many groups more there are."""
        name = self._group_of[task] = self._order.group(task)
        tasks, num_new = self._tasks.get(name), 0
        if tasks is None:
            tasks, num_new = LazyHeap(), 1
            self._tasks[name] = tasks
            self._groups.set(name, self._order.group_key(name))
        tasks.set(task, self._order.task_key(task))
        return num_new

    def remove(self, task: CompletionTask) -> int:
        """Returns how many groups less there are."""
        name = self._group_of.pop(task)
        tasks = self._tasks[name]
        tasks.discard(task)
        if tasks:
            return 0
        del self._tasks[name]
        self._groups.discard(name)
        self._held.pop(name, None)
        return 1

    def touch(self, name: Hashable) -> None:
        """Note that the group's key may have shrunk."""
        if name in self._groups and (key := self._order.group_key(name)) < self._groups.key(name):
            self._groups.set(name, key)

    def top(self) -> tuple[SortKey, CompletionTask] | None:
        """The first task and its sort key; None if there is none, or the round is over."""
        while not self.is_over and (first := self._groups.top()) is not None:
            known_key, name = first
            key = self._order.group_key(name)
            if key > known_key:
                self._groups.set(name, key)
                continue
            top = self._tasks[name].top()
            assert top is not None, name
            return (known_key, top[0]), top[1]
        return None

    def pass_over(self, task: CompletionTask) -> int:
        """Set aside a task for which there is no room. Returns how many groups less there are."""
        num_gone = self.remove(task)
        self._passed.append(task)
        self.is_over = task.num_passed >= MAX_PASSED or len(self._passed) >= _LOOK_AHEAD
        return num_gone

    def hold(self, task: CompletionTask) -> None:
        """Set aside all of the task's group."""
        name = self._group_of[task]
        self._groups.discard(name)
        self._held[name] = None
        self.is_over = len(self._held) >= _LOOK_AHEAD

    def end_round(self) -> list[CompletionTask]:
        """Take back what was set aside. Returns the tasks that were passed over."""
        for name in self._held:
            self._groups.set(name, self._order.group_key(name))
        self._held.clear()
        passed, self._passed = self._passed, []
        for task in passed:
            task.num_passed += 1
            self.push(task)
        self.is_over = False
        return passed
