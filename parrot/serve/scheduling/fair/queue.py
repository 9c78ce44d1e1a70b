"""The queued tasks of all tenants: a heap of tenants, each with its own queue."""

from collections.abc import Hashable

from parrot.serve.scheduling.fair.counters import Counters
from parrot.serve.scheduling.load_index import Models
from parrot.serve.scheduling.order import OrderPolicy
from parrot.serve.scheduling.queue import MAX_PASSED, TaskQueue
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap

FairKey = tuple[float, float, float]
"""The tenant's counter, and the keys of group and task in its queue."""

_MAX_ASIDE = 8  # tenants of which nothing fits that are passed over in a round


class FairQueue:
    """The queued tasks that may run on the same models: those of the tenant with the least counter
    come first, in the order of its `TaskQueue`. If none of these fits, the next tenant's do.

    What is set aside in a round of scheduling does not come to the top again before `end_round`;
    `is_over`: nothing does. Every operation costs O(log n) amortised."""

    def __init__(self, models: Models, order: OrderPolicy, counters: Counters) -> None:
        self.models = models
        self.is_over = False
        self.num_groups = 0  # with queued tasks
        self._order = order
        self._counters = counters
        self._queues: dict[str, TaskQueue] = {}
        self._tenants: LazyHeap[str, float] = LazyHeap()  # all but those set aside
        self._aside: list[str] = []
        self._touched: dict[str, None] = {}  # those of which something was set aside
        self._sizes: LazyHeap[CompletionTask, float] = LazyHeap()  # the largest first
        self.num_tokens = 0  # of all tasks, with the room for their outputs

    def __len__(self) -> int:
        return len(self._sizes)

    @property
    def largest(self) -> int:
        """The tokens of the largest task, with the room for its output; 0: there is none."""
        top = self._sizes.top()
        return 0 if top is None else -int(top[0])

    def __contains__(self, task: CompletionTask) -> bool:
        queue = self._queues.get(task.tenant)
        return queue is not None and task in queue

    def tasks(self) -> list[CompletionTask]:
        return [task for queue in self._queues.values() for task in queue.tasks()]

    def push(self, task: CompletionTask) -> None:
        tenant = task.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TaskQueue(self._order)
            self._tenants.set(tenant, self._counters.counter(tenant))
        self._sizes.set(task, -task.wanted_len)
        self.num_tokens += task.wanted_len
        self.num_groups += queue.push(task)

    def remove(self, task: CompletionTask) -> None:
        tenant = task.tenant
        queue = self._queues[tenant]
        self.num_tokens += int(self._sizes.key(task))
        self._sizes.discard(task)
        self.num_groups -= queue.remove(task)
        if queue.is_empty:
            del self._queues[tenant]
            self._tenants.discard(tenant)
            self._touched.pop(tenant, None)

    def touch(self, tenant: str | None, group: Hashable) -> None:
        """Note that the key of a group of the tenant may have shrunk. None: it has no task yet."""
        if tenant is not None and (queue := self._queues.get(tenant)) is not None:
            queue.touch(group)

    def settled(self, tenant: str) -> None:
        """Note that the tenant's counter has shrunk."""
        if tenant in self._tenants:
            counter = self._counters.counter(tenant)
            if counter < self._tenants.key(tenant):
                self._tenants.set(tenant, counter)

    def top(self) -> tuple[FairKey, CompletionTask] | None:
        """The first task and its sort key; None if there is none, or the round is over."""
        while not self.is_over and (first := self._tenants.top()) is not None:
            known, tenant = first
            counter = self._counters.counter(tenant)
            if counter > known and len(self._tenants) > 1:
                self._tenants.set(tenant, counter)
                continue
            if (top := self._queues[tenant].top()) is not None:
                return (counter, *top[0]), top[1]
            self._tenants.discard(tenant)
            self._aside.append(tenant)
            self.is_over = len(self._aside) >= _MAX_ASIDE
        return None

    def firsts(self) -> list[CompletionTask]:
        """The first tasks of the small tenants among those that come first. Only between rounds."""
        small = filter(self._counters.is_small, self._tenants.smallest(_MAX_ASIDE))
        tops = [self._queues[name].top() for name in small]
        return [top[1] for top in tops if top is not None]

    def pass_over(self, task: CompletionTask) -> None:
        """Set aside a task for which there is no room. In the end those of other tenants wait for
        it, too: else their small ones would take the room of a large one for ever."""
        self.num_groups -= self._set_aside(task).pass_over(task)
        self.is_over = task.num_passed >= MAX_PASSED

    def hold(self, task: CompletionTask) -> None:
        """Set aside all of the task's group."""
        self._set_aside(task).hold(task)

    def end_round(self) -> list[CompletionTask]:
        """Take back what was set aside. Returns the tasks that were passed over."""
        passed: list[CompletionTask] = []
        for tenant in self._touched:
            queue = self._queues[tenant]
            self.num_groups -= queue.num_groups
            passed += queue.end_round()
            self.num_groups += queue.num_groups
        self._touched.clear()
        for tenant in self._aside:
            self._tenants.set(tenant, self._counters.counter(tenant))
        self._aside.clear()
        self.is_over = False
        return passed

    def check_integrity(self) -> None:
        """Recount the sizes. Raises AssertionError with what differs."""
        sizes = {task: task.wanted_len for task in self.tasks()}
        assert len(self) == len(sizes), (len(self), len(sizes))
        assert self.num_tokens == sum(sizes.values()), (self.num_tokens, sum(sizes.values()))
        assert self.largest == max(sizes.values(), default=0), self.largest

    def _set_aside(self, task: CompletionTask) -> TaskQueue:
        """The queue of the task's tenant, of which something is set aside."""
        tenant = task.tenant
        self._touched[tenant] = None
        return self._queues[tenant]
