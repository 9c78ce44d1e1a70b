"""Weighted fair sharing between tenants. A ServeCore with one tenant does not load this module.

Each tenant has a virtual token counter ("Fairness in Serving Large Language Models", OSDI'24): its
service divided by its weight. The waiting tenant with the smallest counter is next.

Service is measured in engine seconds, from the costs that engines report. It has each computed
prompt token, and each output token with the KV that it reads and its part of the step. The first
call that computes a prefix pays for it. Calls that reuse the prefix do not."""

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from parrot.serve.scheduling.load import Charge, EngineLoad, LoadIndex, Models, Weigh
from parrot.serve.scheduling.placement import InUse
from parrot.serve.scheduling.queue import MAX_SKIPS, OrderPolicy, TaskQueue
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap, LruDict

# A tenant is light when its placed tasks per weight are less than the average divided by this
# factor. A larger value makes fewer tenants light.
_LIGHT_FACTOR = 2
# Number of inactive tenants whose counters are kept. A forgotten tenant starts again at 0.
_MAX_IDLE_TENANTS = 4096


@dataclass(slots=True)
class _Account:
    """The account of a tenant with queued or placed tasks."""

    counter: float  # Service in engine seconds, divided by the weight.
    weight: float
    num_queued: int = 0
    num_charged: int = 0  # Placed tasks.


class Counters:
    """The virtual token counters of all tenants. A placed task is charged its predicted service,
    which is corrected to the actual service when the task leaves the engine. A tenant that starts
    to wait is raised to the smallest waiting counter, so inactivity earns no credit."""

    def __init__(self, weigh: Weigh) -> None:
        self._weigh = weigh
        self._accounts: dict[str, _Account] = {}
        self._weight = 0.0  # Sum of the accounts' weights.
        self._idle: LruDict[str, float] = LruDict(_MAX_IDLE_TENANTS)
        # Tenants with queued tasks. A stored counter may be smaller than the tenant's counter.
        # Empty while one tenant has tasks.
        self._waiting: LazyHeap[str, float] = LazyHeap()
        self._floor = 0.0  # The counter of the tenant that was the last to leave the queue.
        self._num_charged = 0  # Sum over all accounts.

    @property
    def has_several_tenants(self) -> bool:
        """Whether more than one tenant has tasks."""
        return len(self._accounts) > 1

    def counter(self, tenant: str) -> float:
        """The tenant's service divided by its weight, in seconds. The tenant must have a task."""
        return self._accounts[tenant].counter

    def weight(self, tenant: str) -> float:
        """The tenant's weight. A change of the weight has no effect while the tenant has tasks."""
        account = self._accounts.get(tenant)
        return self._weigh(tenant) if account is None else account.weight

    def num_queued(self) -> Counter[str]:
        """The number of queued tasks of each tenant with queued tasks."""
        return +Counter({name: account.num_queued for name, account in self._accounts.items()})

    def is_light(self, tenant: str) -> bool:
        """Whether the tenant's placed tasks per weight are less than half of the average."""
        own = self._accounts[tenant]
        return _LIGHT_FACTOR * own.num_charged * self._weight < self._num_charged * own.weight

    def queued(self, tenant: str) -> None:
        """A task of the tenant was queued."""
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
        """A queued task was removed and will not run."""
        account = self._accounts[tenant]
        self._leave_queue(tenant, account)
        self._remove_if_inactive(tenant, account)

    def charge(self, tenant: str, service_s: float) -> None:
        """A queued task was placed, with a predicted service of `service_s` engine seconds."""
        account = self._accounts[tenant]
        account.num_charged += 1
        self._num_charged += 1
        account.counter += service_s / account.weight
        self._leave_queue(tenant, account)

    def settle(self, tenant: str, more_s: float) -> None:
        """A placed task has left its engine. It used `more_s` engine seconds more than predicted,
        or less if `more_s` is negative."""
        account = self._accounts[tenant]
        account.num_charged -= 1
        self._num_charged -= 1
        account.counter += more_s / account.weight
        if account.num_queued:
            if len(self._accounts) > 1 and account.counter < self._waiting.key(tenant):
                self._waiting.set(tenant, account.counter)
        elif not account.num_charged:
            self._remove_if_inactive(tenant, account)

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
        """The smallest counter of a waiting tenant. If no tenant waits, `_floor`."""
        while (first := self._waiting.top()) is not None:
            known, tenant = first
            counter = self._accounts[tenant].counter
            if counter <= known:
                return counter
            self._waiting.set(tenant, counter)
        return self._floor

    def _remove_if_inactive(self, tenant: str, account: _Account) -> None:
        if not account.num_queued and not account.num_charged:
            del self._accounts[tenant]
            self._weight = self._weight - account.weight if self._accounts else 0.0
            if len(self._accounts) < 2:
                self._waiting.clear()
            self._idle.put(tenant, account.counter)

    def check_integrity(self, num_queued: dict[str, int], num_placed: dict[str, int]) -> None:
        """Recount the tenants' tasks. Raises AssertionError with the values that differ."""
        accounts = self._accounts
        queued = {name: a.num_queued for name, a in accounts.items() if a.num_queued}
        placed = {name: a.num_charged for name, a in accounts.items() if a.num_charged}
        assert queued == num_queued, (queued, num_queued)
        assert placed == num_placed, (placed, num_placed)
        assert self._num_charged == sum(placed.values()), self._num_charged
        assert set(self._waiting) == (set(queued) if self.has_several_tenants else set()), queued
        assert all(self._waiting.key(name) <= accounts[name].counter for name in self._waiting)


FairKey = tuple[float, float, float]
"""The tenant's counter, then the keys of the group and the task in the tenant's queue."""

# A round ends after this many tenants without a task that fits. A larger value finds more tasks
# that fit, and costs more CPU time per round.
_MAX_SKIPPED_TENANTS = 8


class FairQueue:
    """The queued tasks of all tenants that may run on the same models. The tenant with the smallest
    counter is first, with the tasks of its `TaskQueue` in order. If none of its tasks fits, the
    next tenant follows. Every operation costs O(log n), amortised."""

    def __init__(self, order: OrderPolicy, counters: Counters) -> None:
        self.is_round_over = False  # `top` returns None until `end_round`.
        self.num_groups = 0  # Groups with queued tasks.
        self._order = order
        self._counters = counters
        self._queues: dict[str, TaskQueue] = {}
        # All tenants except skipped ones. Stored counters may be smaller than the tenants' own.
        self._tenants: LazyHeap[str, float] = LazyHeap()
        self._skipped_tenants: list[str] = []
        self._tenants_with_skips: dict[str, None] = {}  # With skipped tasks or held groups.
        self._num_tasks = 0

    def __len__(self) -> int:
        return self._num_tasks

    def __contains__(self, task: CompletionTask) -> bool:
        queue = self._queues.get(task.tenant)
        return queue is not None and task in queue

    def tasks(self) -> list[CompletionTask]:
        return [task for queue in self._queues.values() for task in queue.tasks()]

    def adopt(self, tenant: str, queue: TaskQueue) -> None:
        """Add the queue of the first tenant, with all its tasks. Only between rounds."""
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
        """The key of a group of the tenant may have shrunk. None: the session has had no task."""
        if tenant is not None and (queue := self._queues.get(tenant)) is not None:
            queue.touch(group)

    def counter_shrank(self, tenant: str) -> None:
        """The tenant's counter has shrunk."""
        if tenant in self._tenants:
            counter = self._counters.counter(tenant)
            if counter < self._tenants.key(tenant):
                self._tenants.set(tenant, counter)

    def top(self) -> tuple[FairKey, CompletionTask] | None:
        """The next task and its sort key. None: the queue is empty or its round is over."""
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
        """The next tasks of light tenants among the 8 smallest counters. Only between rounds."""
        light = filter(self._counters.is_light, self._tenants.smallest(_MAX_SKIPPED_TENANTS))
        tops = [self._queues[name].top() for name in light]
        return [top[1] for top in tops if top is not None]

    def skip(self, task: CompletionTask) -> None:
        """Skip a task that fits on no engine."""
        self.num_groups -= self._queue_with_skips(task).skip(task)
        # All tenants wait for the task. Otherwise their small tasks could starve a large one.
        self.is_round_over = task.num_skipped >= MAX_SKIPS

    def hold(self, task: CompletionTask) -> None:
        """Hold the task's group until the round ends."""
        self._queue_with_skips(task).hold(task)

    def end_round(self) -> list[CompletionTask]:
        """Put skipped tasks, held groups and skipped tenants back. Returns the skipped tasks."""
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
        """Recount the tasks. Raises AssertionError with the numbers that differ."""
        assert len(self) == len(self.tasks()), (len(self), len(self.tasks()))

    def _queue_with_skips(self, task: CompletionTask) -> TaskQueue:
        """The queue of the task's tenant, to skip the task or hold its group."""
        tenant = task.tenant
        self._tenants_with_skips[tenant] = None
        return self._queues[tenant]


# Upper limit of the tasks on an engine, as a multiple of its slots. A larger value lets more calls
# of underserved tenants run at once.
_OVERCOMMIT = 2


@dataclass(slots=True)
class _TenantLoad:
    weight: float
    num_tasks: int = 0
    num_tokens: int = 0


class TenantLoads:
    """The tasks and tokens of each tenant on each engine. `weight_of` returns the weights of
    tenants with tasks."""

    def __init__(self, weight_of: Callable[[str], float]) -> None:
        self._weight_of = weight_of
        self._engines: defaultdict[int, dict[str, _TenantLoad]] = defaultdict(dict)

    def add(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        tenant, there = task.tenant, self._engines[engine_id]
        if (held := there.get(tenant)) is None:
            held = there[tenant] = _TenantLoad(self._weight_of(tenant))
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
        """Whether another tenant has more tasks per weight on the engine than the task's tenant
        would have with this task."""
        there = self._engines.get(engine_id)
        tenant = task.tenant
        if there is None or not there.keys() - {tenant}:
            return False
        own, weight = there.get(tenant), self._weight_of(tenant)
        num_tasks = 1 + (0 if own is None else own.num_tasks)
        most = max(h.num_tasks / h.weight for name, h in there.items() if name != tenant)
        return most > num_tasks / weight

    def within_share(self, task: CompletionTask, load: EngineLoad, num_tokens: int) -> InUse | None:
        """The tenant's present load on the engine, if the task may exceed the engine's slots. None:
        the task may not. `num_tokens`: the KV tokens that the task adds.

        The tenant must be underserved, and the task must fit into the tenant's weighted share."""
        if load.num_tasks >= _OVERCOMMIT * load.num_slots or not self.is_underserved(task, load.id):
            return None
        there, tenant = self._engines[load.id], task.tenant
        weight = self._weight_of(tenant)
        own = there.get(tenant) or _TenantLoad(weight)
        part = weight / (weight + sum(h.weight for name, h in there.items() if name != tenant))
        if own.num_tasks + 1 > part * load.num_slots:
            return None
        if own.num_tokens + num_tokens > part * load.max_tokens:
            return None
        return InUse(own.num_tasks, own.num_tokens)

    def check_integrity(self, loads: list[EngineLoad]) -> None:
        """Recount the placed tasks. Raises AssertionError with the engine that differs."""
        for load in loads:
            there = self._engines.get(load.id, {})
            assert sum(h.num_tasks for h in there.values()) == len(load.tasks), load.id
            total = sum(charge.num_tokens for charge in load.tasks.values())
            assert sum(h.num_tokens for h in there.values()) == total, load.id


class Fairness:
    """The state of fair sharing between tenants. The scheduler creates it when the second tenant
    submits a task. It takes over the queued and placed tasks of the first tenant."""

    def __init__(
        self,
        weigh: Weigh,
        order: OrderPolicy,
        engines: LoadIndex,
        queues: dict[Models, TaskQueue | FairQueue],
    ) -> None:
        """Replaces each `TaskQueue` in `queues` by a `FairQueue`."""
        self.counters = Counters(weigh)
        self._order = order
        self._engines = engines
        self._held = TenantLoads(self.counters.weight)
        self._tenant_of: dict[int, str] = {}  # By session.
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
        """A queue for all tenants, with the first tenant's tasks. `queue` must not be empty."""
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
            queue.counter_shrank(task.tenant)

    def tenant_of(self, session_id: int) -> str | None:
        """The tenant of a session. None: the session has had no task."""
        return self._tenant_of.get(session_id)

    def forget_session(self, session_id: int) -> None:
        self._tenant_of.pop(session_id, None)

    def is_underserved(self, task: CompletionTask, engine_id: int) -> bool:
        """See `TenantLoads.is_underserved`. False if only one tenant has tasks."""
        return self.counters.has_several_tenants and self._held.is_underserved(task, engine_id)

    def within_share(self, task: CompletionTask, load: EngineLoad, num_tokens: int) -> InUse | None:
        """See `TenantLoads.within_share`."""
        return self._held.within_share(task, load, num_tokens)

    def check_integrity(self, queued: list[CompletionTask]) -> None:
        """Recount all tasks. Raises AssertionError with the values that differ."""
        loads = list(self._engines)
        self._held.check_integrity(loads)
        placed = Counter(task.tenant for load in loads for task in load.tasks)
        self.counters.check_integrity(Counter(task.tenant for task in queued), placed)
