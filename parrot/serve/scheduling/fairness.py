"""The shares of tenants, from the second one on.

Whose turn it is says the virtual token counter ("Fairness in Serving Large Language Models",
OSDI'24): the service that each tenant has had, over its weight. Of those that wait, the one with
the least comes first.

Service is counted in seconds of an engine, by what engines report: each prompt token that is
computed, and each output token with what it reads and its part of a step. A beginning that is there
already, or that a running prompt has, is its first user's to pay."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from parrot.serve.scheduling.load import Charge, EngineLoad, LoadIndex, Models, Weigh
from parrot.serve.scheduling.placement import TenantLoad
from parrot.serve.scheduling.queue import MAX_SKIPS, OrderPolicy, TaskQueue
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap, LruDict

_LIGHT_FACTOR = 2  # as many tasks, by weight, are under way on average beside a small tenant
_MAX_IDLE_TENANTS = 4096  # tenants with nothing to do whose counters are remembered


@dataclass(slots=True)
class _Account:
    """`num_charged`: of its tasks, those that have not ended."""

    counter: float
    weight: float
    num_queued: int = 0
    num_charged: int = 0


class Counters:
    """The counters of all tenants, of the weights that `weigh` gives. A placed task is charged by
    prediction, and what it took in fact is settled when it ends. A tenant that begins to wait is
    lifted to the least of those that wait already, or, if none does, to whoever did last: time
    without work is no credit."""

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh
        self._accounts: dict[str, _Account] = {}  # of those with a task
        self._weight = 0.0  # of all these
        self._idle: LruDict[str, float] = LruDict(_MAX_IDLE_TENANTS)
        # By counters that may have grown since. Empty while there is one tenant.
        self._waiting: LazyHeap[str, float] = LazyHeap()
        self._floor = 0.0  # the counter of the last one that waited
        self._num_charged = 0  # of all

    @property
    def has_several_tenants(self) -> bool:
        """Whether more than one tenant has tasks."""
        return len(self._accounts) > 1

    def counter(self, tenant: str) -> float:
        """Seconds of service over its weight. It must have a task."""
        return self._accounts[tenant].counter

    def weight(self, tenant: str) -> float:
        """As long as it has tasks, the weight that it had when it got the first."""
        account = self._accounts.get(tenant)
        return self._weigh(tenant) if account is None else account.weight

    def num_queued(self) -> Counter[str]:
        """The number of queued tasks of each tenant that has some."""
        return +Counter({name: account.num_queued for name, account in self._accounts.items()})

    def is_light(self, tenant: str) -> bool:
        """Whether it has few tasks under way, by weight, beside the others."""
        own = self._accounts[tenant]
        return _LIGHT_FACTOR * own.num_charged * self._weight < self._num_charged * own.weight

    def queued(self, tenant: str) -> None:
        """One more task of the tenant waits."""
        account = self._accounts.get(tenant)
        if account is None:
            counter = self._idle.pop(tenant) or 0.0
            if len(self._accounts) == 1:
                self._start_sharing()
            account = self._accounts[tenant] = _Account(counter, self._weigh(tenant))
            self._weight += account.weight
        account.num_queued += 1
        if account.num_queued == 1:
            account.counter = max(account.counter, self._min_waiting_counter())
            if len(self._accounts) > 1:
                self._waiting.set(tenant, account.counter)

    def unqueued(self, tenant: str) -> None:
        """One task less waits: it will not run."""
        account = self._accounts[tenant]
        self._leave_queue(tenant, account)
        self._forget(tenant, account)

    def charge(self, tenant: str, service_s: float) -> None:
        """A queued task was placed, and is predicted to take so many seconds of service."""
        account = self._accounts[tenant]
        account.num_charged += 1
        self._num_charged += 1
        account.counter += service_s / account.weight
        self._leave_queue(tenant, account)

    def settle(self, tenant: str, more_s: float) -> None:
        """A placed task has ended, with so much more service than was predicted, or less."""
        account = self._accounts[tenant]
        account.num_charged -= 1
        self._num_charged -= 1
        account.counter += more_s / account.weight
        if account.num_queued:
            if len(self._accounts) > 1 and account.counter < self._waiting.key(tenant):
                self._waiting.set(tenant, account.counter)
        elif not account.num_charged:
            self._forget(tenant, account)

    def _start_sharing(self) -> None:
        ((tenant, account),) = self._accounts.items()
        if account.num_queued:
            self._waiting.set(tenant, account.counter)

    def _leave_queue(self, tenant: str, account: _Account) -> None:
        account.num_queued -= 1
        if not account.num_queued:
            self._waiting.discard(tenant)
            self._floor = account.counter

    def _min_waiting_counter(self) -> float:
        """The least counter of those that wait, or that of the last one that did."""
        while (first := self._waiting.top()) is not None:
            known, tenant = first
            counter = self._accounts[tenant].counter
            if counter <= known:
                return counter
            self._waiting.set(tenant, counter)
        return self._floor

    def _forget(self, tenant: str, account: _Account) -> None:
        if not account.num_queued and not account.num_charged:
            del self._accounts[tenant]
            self._weight = self._weight - account.weight if self._accounts else 0.0
            if len(self._accounts) < 2:
                self._waiting.clear()
            self._idle.put(tenant, account.counter)

    def check_integrity(self, num_queued: dict[str, int], num_placed: dict[str, int]) -> None:
        """Recount by the tenants' tasks. Raises AssertionError with what differs."""
        accounts = self._accounts
        queued = {name: a.num_queued for name, a in accounts.items() if a.num_queued}
        placed = {name: a.num_charged for name, a in accounts.items() if a.num_charged}
        assert queued == num_queued, (queued, num_queued)
        assert placed == num_placed, (placed, num_placed)
        assert self._num_charged == sum(placed.values()), self._num_charged
        assert set(self._waiting) == (set(queued) if self.has_several_tenants else set()), queued
        assert all(self._waiting.key(name) <= accounts[name].counter for name in self._waiting)


FairKey = tuple[float, float, float]
"""The tenant's counter, and the keys of group and task in its queue."""

_MAX_SKIPPED_TENANTS = 8  # tenants of which nothing fits that are passed over in a round


class FairQueue:
    """The queued tasks that may run on the same models: those of the tenant with the least counter
    come first, in the order of its `TaskQueue`. If none of these fits, the next tenant's do.

    What is set aside in a round of scheduling does not come to the top again before `end_round`;
    `is_round_over`: nothing does. Every operation costs O(log n) amortised."""

    def __init__(self, order: OrderPolicy, counters: Counters) -> None:
        self.is_round_over = False
        self.num_groups = 0  # with queued tasks
        self._order = order
        self._counters = counters
        self._queues: dict[str, TaskQueue] = {}
        self._tenants: LazyHeap[str, float] = LazyHeap()  # all but those set aside
        self._skipped_tenants: list[str] = []
        self._tenants_with_skips: dict[str, None] = {}  # those of which something was set aside
        self._num_tasks = 0

    def __len__(self) -> int:
        return self._num_tasks

    def __contains__(self, task: CompletionTask) -> bool:
        queue = self._queues.get(task.tenant)
        return queue is not None and task in queue

    def tasks(self) -> list[CompletionTask]:
        return [task for queue in self._queues.values() for task in queue.tasks()]

    def adopt(self, tenant: str, queue: TaskQueue) -> None:
        """Have all the tasks of a tenant, which is the first here. Only between rounds."""
        self._queues[tenant] = queue
        self._tenants.set(tenant, self._counters.counter(tenant))
        self._num_tasks += len(queue)
        self.num_groups += queue.num_groups

    def push(self, task: CompletionTask) -> None:
        tenant = task.tenant
        queue = self._queues.get(tenant)
        if queue is None:
            queue = self._queues[tenant] = TaskQueue(self._order)
            self._tenants.set(tenant, self._counters.counter(tenant))
        self._num_tasks += 1
        self.num_groups += queue.push(task)

    def remove(self, task: CompletionTask) -> None:
        tenant = task.tenant
        queue = self._queues[tenant]
        self._num_tasks -= 1
        self.num_groups -= queue.remove(task)
        if queue.is_empty:
            del self._queues[tenant]
            self._tenants.discard(tenant)
            self._tenants_with_skips.pop(tenant, None)

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
        while not self.is_round_over and (first := self._tenants.top()) is not None:
            known, tenant = first
            counter = self._counters.counter(tenant)
            if counter > known and len(self._tenants) > 1:
                self._tenants.set(tenant, counter)
                continue
            if (top := self._queues[tenant].top()) is not None:
                return (counter, *top[0]), top[1]
            self._tenants.discard(tenant)
            self._skipped_tenants.append(tenant)
            self.is_round_over = len(self._skipped_tenants) >= _MAX_SKIPPED_TENANTS
        return None

    def heads(self) -> list[CompletionTask]:
        """The first tasks of the small tenants among those that come first. Only between rounds."""
        small = filter(self._counters.is_light, self._tenants.smallest(_MAX_SKIPPED_TENANTS))
        tops = [self._queues[name].top() for name in small]
        return [top[1] for top in tops if top is not None]

    def skip(self, task: CompletionTask) -> None:
        """Set aside a task for which there is no room. In the end those of other tenants wait for
        it, too: else their small ones would take the room of a large one for ever."""
        self.num_groups -= self._set_aside(task).skip(task)
        self.is_round_over = task.num_skipped >= MAX_SKIPS

    def hold(self, task: CompletionTask) -> None:
        """Set aside all of the task's group."""
        self._set_aside(task).hold(task)

    def end_round(self) -> list[CompletionTask]:
        """Take back what was set aside. Returns the tasks that were passed over."""
        passed: list[CompletionTask] = []
        for tenant in self._tenants_with_skips:
            queue = self._queues[tenant]
            self.num_groups -= queue.num_groups
            passed += queue.end_round()
            self.num_groups += queue.num_groups
        self._tenants_with_skips.clear()
        for tenant in self._skipped_tenants:
            self._tenants.set(tenant, self._counters.counter(tenant))
        self._skipped_tenants.clear()
        self.is_round_over = False
        return passed

    def check_integrity(self) -> None:
        """Recount the tasks. Raises AssertionError with what differs."""
        assert len(self) == len(self.tasks()), (len(self), len(self.tasks()))

    def _set_aside(self, task: CompletionTask) -> TaskQueue:
        """The queue of the task's tenant, of which something is set aside."""
        tenant = task.tenant
        self._tenants_with_skips[tenant] = None
        return self._queues[tenant]


_MAX_OVERCOMMIT = 2  # times as many tasks on an engine as it has places


@dataclass(slots=True)
class _MutableLoad:
    weight: float
    num_tasks: int = 0
    num_tokens: int = 0


class TenantLoads:
    """Says of a task whether its tenant has less of an engine than others there, and whether it has
    room there in the tenant's share, though all places may be taken. `weight_of` knows the weights
    of tenants that have tasks."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._engines: defaultdict[int, dict[str, _MutableLoad]] = defaultdict(dict)

    def add(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        tenant, there = task.tenant, self._engines[engine_id]
        if (held := there.get(tenant)) is None:
            held = there[tenant] = _MutableLoad(self._weight_of(tenant))
        held.num_tasks += 1
        held.num_tokens += charge.num_tokens

    def remove(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        tenant, there = task.tenant, self._engines[engine_id]
        held = there[tenant]
        held.num_tasks -= 1
        held.num_tokens -= charge.num_tokens
        if not held.num_tasks:
            del there[tenant]
            if not there:
                del self._engines[engine_id]

    def is_underserved(self, task: CompletionTask, engine_id: int) -> bool:
        """Whether some other tenant has more tasks there, by weight, than the task's tenant would
        have with it."""
        there = self._engines.get(engine_id)
        tenant = task.tenant
        if there is None or not there.keys() - {tenant}:
            return False
        own, weight = there.get(tenant), self._weight_of(tenant)
        num_tasks = 1 + (0 if own is None else own.num_tasks)
        most = max(h.num_tasks / h.weight for name, h in there.items() if name != tenant)
        return most > num_tasks / weight

    def load_within_share(
        self, task: CompletionTask, load: EngineLoad, num_tokens: int
    ) -> TenantLoad | None:
        """The tasks that its tenant has there, if this one, with so many tokens, is within its part
        of the engine, by the weights of those who are there, and others have more."""
        if load.num_tasks >= _MAX_OVERCOMMIT * load.max_tasks or not self.is_underserved(
            task, load.id
        ):
            return None
        there, tenant = self._engines[load.id], task.tenant
        weight = self._weight_of(tenant)
        own = there.get(tenant) or _MutableLoad(weight)
        part = weight / (weight + sum(h.weight for name, h in there.items() if name != tenant))
        if own.num_tasks + 1 > part * load.max_tasks:
            return None
        if own.num_tokens + num_tokens > part * load.max_tokens:
            return None
        return TenantLoad(own.num_tasks, own.num_tokens)

    def check_integrity(self, loads: list[EngineLoad]) -> None:
        """Recount by the placed tasks. Raises AssertionError with what differs."""
        for load in loads:
            there = self._engines.get(load.id, {})
            assert sum(h.num_tasks for h in there.values()) == len(load.tasks), load.id
            total = sum(charge.num_tokens for charge in load.tasks.values())
            assert sum(h.num_tokens for h in there.values()) == total, load.id


class Fairness:
    """Keeps what the scheduler asks about tenants' shares. It is made when a second tenant comes,
    and takes over the work of the first."""

    def __init__(
        self,
        weigh: Weigh,
        order: OrderPolicy,
        engines: LoadIndex,
        queues: dict[Models, TaskQueue | FairQueue],
    ) -> None:
        """`queues` are the scheduler's, each of which becomes a `FairQueue`."""
        self.counters = Counters(weigh)
        self._order = order
        self._engines = engines
        self._held = TenantLoads(self.counters.weight)
        self._tenant_of: dict[int, str] = {}  # by session
        for load in engines:
            for task, charge in load.tasks.items():
                self.queued(task)
                self.placed(task, load.id, charge)
        self._queues = queues
        for models, queue in queues.items():
            if isinstance(queue, TaskQueue):
                queues[models] = self._adopted(queue) if queue else self.new_queue()
        engines.listeners.append(self)

    def _adopted(self, queue: TaskQueue) -> FairQueue:
        """A queue for all tenants, with the tasks of the only one so far, of which there are
        some."""
        for task in (tasks := queue.tasks()):
            self.queued(task)
        fair = self.new_queue()
        fair.adopt(tasks[0].tenant, queue)
        return fair

    def new_queue(self) -> FairQueue:
        return FairQueue(self._order, self.counters)

    def queued(self, task: CompletionTask) -> None:
        self._tenant_of[task.completion.session_id] = task.tenant
        self.counters.queued(task.tenant)

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        self._held.add(task, engine_id, charge)
        self.counters.charge(task.tenant, charge.service_s)

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None:
        self._held.remove(task, engine_id, charge)
        self.counters.settle(task.tenant, actual_s - charge.service_s)
        for queue in self._queues.values() if actual_s < charge.service_s else ():
            assert isinstance(queue, FairQueue), queue
            queue.settled(task.tenant)

    def tenant_of(self, session_id: int) -> str | None:
        """The tenant of a session that has had a task; None if it has had none."""
        return self._tenant_of.get(session_id)

    def forget_session(self, session_id: int) -> None:
        self._tenant_of.pop(session_id, None)

    def is_underserved(self, task: CompletionTask, engine_id: int) -> bool:
        """Whether the task's tenant has less of an engine than some other there."""
        return self.counters.has_several_tenants and self._held.is_underserved(task, engine_id)

    def load_within_share(
        self, task: CompletionTask, load: EngineLoad, num_tokens: int
    ) -> TenantLoad | None:
        """See `TenantLoads.load_within_share`."""
        return self._held.load_within_share(task, load, num_tokens)

    def check_integrity(self, queued: list[CompletionTask]) -> None:
        """Recount by the queued tasks and the loads. Raises AssertionError with what differs."""
        loads = list(self._engines)
        self._held.check_integrity(loads)
        placed = Counter(task.tenant for load in loads for task in load.tasks)
        self.counters.check_integrity(Counter(task.tenant for task in queued), placed)
