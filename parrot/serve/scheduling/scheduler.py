"""The global scheduler: decides which queued task runs next, and on which engine.

The dispatcher calls `Scheduler.schedule` and runs the placements that it returns. The order of
tasks and the choice of engines are policies that the scheduler receives."""

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from parrot.serve.config import GlobalSchedulerConfig
from parrot.serve.contexts.index import PrefixIndex
from parrot.serve.scheduling.load import EngineLoad, LoadIndex, Models, Weigh
from parrot.serve.scheduling.placement import Choice, LowestCostPlacer, Placer, delay_limit
from parrot.serve.scheduling.prefixes import QueuedBlocks
from parrot.serve.scheduling.queue import CriticalPath, OrderPolicy, TaskQueue, should_delay
from parrot.serve.scheduling.task import CompletionTask, Decision, EngineShare, Placement
from parrot.utils.clock import Clock

if TYPE_CHECKING:
    from parrot.serve.scheduling.fairness import Fairness, FairQueue

logger = logging.getLogger(__name__)

MakeOrder = Callable[[Clock], OrderPolicy]
MakePlacer = Callable[[LoadIndex], Placer]

# Largest absolute priority that is sent to an engine.
_MAX_PRIORITY = 2**31 - 1
# Number of recent decisions that are kept for the page.
_NUM_DECISIONS = 64
# Latency tasks of underserved tenants are sorted this many priorities earlier on an engine.
_UNDERSERVED_LEAD = 2**20
# Seconds of `OrderPolicy.priority_s` for one step of an engine's priority. Smaller steps give more
# tasks different priorities and so make an engine's batches smaller.
_PRIORITY_STEP_S = 2.0


class Scheduler:
    """Owns the queued tasks and the load of each engine.

    There is one queue for each set of models, with a queue per tenant from the second tenant on.
    Loads are estimates, because token counts are exact only for an engine's tokenizer."""

    def __init__(
        self,
        config: GlobalSchedulerConfig,
        clock: Clock,
        index: PrefixIndex,
        order: MakeOrder | None = None,
        placer: MakePlacer | None = None,
        weigh: Weigh = lambda tenant: 1.0,
    ) -> None:
        """`order` and `placer` replace the configured policies. `weigh`: see `Weigh`."""
        self.engines = LoadIndex()
        self.decisions: deque[Decision] = deque(maxlen=_NUM_DECISIONS)  # The most recent last.
        self.weigh = weigh
        self._clock = clock
        self._order = (order or order_maker(config))(clock)
        self._placer = (placer or placer_maker(config, index))(self.engines)
        self.engines.listeners += [self._placer, self._order]
        self._queues: dict[Models, TaskQueue | FairQueue] = {}
        self._fairness: Fairness | None = None  # Created for the second tenant.
        self._first_tenant: str | None = None
        # The earliest `delay_limit` of a skipped task. None: no skipped task has one.
        self._next_delay_limit: float | None = None
        self._failed: list[CompletionTask] = []
        self._step_growth = config.tenant_step_growth
        self._epoch = clock.now()

    # Tasks

    @property
    def num_queued(self) -> int:
        return sum(map(len, self._queues.values()))

    @property
    def queues(self) -> "Mapping[Models, TaskQueue | FairQueue]":
        """The queued tasks, by their models."""
        return {models: queue for models, queue in self._queues.items() if queue}

    def queued_by_tenant(self) -> Counter[str]:
        """The number of queued tasks of each tenant with queued tasks."""
        if self._fairness is not None:
            return self._fairness.counters.num_queued()
        return +Counter({self._first_tenant or "": self.num_queued})

    def queued(self, models: Models) -> list[CompletionTask]:
        queue = self._queues.get(models)
        return [] if queue is None else queue.tasks()

    def add(self, task: CompletionTask) -> None:
        if self._fairness is None and task.tenant != self._first_tenant:
            self._add_tenant(task.tenant)
        self._order.arrived(task)
        self._enqueue(task)

    def remove(self, task: CompletionTask) -> None:
        """Remove a queued task, which will not run."""
        self._pull(task)
        self._drop(task)

    def update(self, task: CompletionTask) -> None:
        """Sort a queued task again after its objective has changed."""
        self._pull(task)
        task.refresh()
        self._order.updated(task)
        self._push(task)

    def finished(self, task: CompletionTask, engine_id: int) -> None:
        """A placed task has finished, failed or been cancelled."""
        self._unload(task, engine_id)
        self._order.finished(task)

    def requeue(self, task: CompletionTask, engine_id: int) -> None:
        """Queue a placed task again. It keeps its arrival time."""
        self._unload(task, engine_id)
        task.refresh()
        self._order.updated(task)
        self._enqueue(task)

    def update_remaining_work(self, session_id: int, remaining_s: float) -> None:
        """See `OrderPolicy.update_remaining_work`."""
        for group in self._order.update_remaining_work(session_id, remaining_s):
            for queue in self._queues.values():
                if isinstance(queue, TaskQueue):
                    queue.touch(group)
                elif self._fairness is not None:
                    queue.touch(self._fairness.tenant_of(session_id), group)

    def forget_session(self, session_id: int) -> None:
        self._order.forget(session_id)
        if self._fairness is not None:
            self._fairness.forget_session(session_id)

    def weight(self, tenant: str) -> float:
        """The weight of a tenant. A new weight takes effect when the tenant has no tasks."""
        fairness = self._fairness
        return self.weigh(tenant) if fairness is None else fairness.counters.weight(tenant)

    # The loop

    def schedule(self) -> list[Placement]:
        """Place as many tasks as fit, in order. The caller runs each placement and fails the tasks
        that `take_failed` returns."""
        for task in self._order.due():
            if task in self._queues.get(task.models, ()):
                self._pull(task)
                self._push(task)
        if not self._queues:
            self._next_delay_limit = None
            return []
        queues = [queue for models, queue in self._queues.items() if self.engines.num_open(models)]
        self._placer.new_round()
        now = self._clock.now()
        placements: list[Placement] = []
        while (first := _next_task(queues)) is not None:
            queue, task = first
            try:
                choice = self._find_engine(queue, task, now)
            except Exception:
                logger.exception("no engine could be chosen for call %d", task.completion.id)
                queue.remove(task)
                self._placer.unqueued(task)
                self._drop(task)
                self._failed.append(task)
                continue
            if choice is not None:
                queue.remove(task)
                placements.append(self._run(task, choice, now))
                queue.is_round_over = not self.engines.num_open(task.models)
        waiting = [task for queue in queues for task in queue.end_round()]
        self._next_delay_limit = _earliest_delay_limit(waiting, now) if waiting else None
        if self._fairness is not None and self._fairness.counters.has_several_tenants:
            placements += self._overcommit(self._fairness, now)
        for models in [models for models, queue in self._queues.items() if not queue]:
            del self._queues[models]
        return placements

    def take_failed(self) -> list[CompletionTask]:
        """Remove and return the tasks for which choosing an engine raised an exception. These tasks
        are no longer queued, and other tasks are not affected."""
        failed, self._failed = self._failed, []
        return failed

    def next_change(self) -> float | None:
        """The time at which `schedule` must run again without another event, because a task may be
        placed or the order changes. None: no queued task depends on time."""
        patience, due = self._next_delay_limit, self._order.next_change()
        if patience is None or due is None:
            return due if patience is None else patience
        return min(patience, due)

    def preview(self, task: CompletionTask, preferred: Iterable[int] = ()) -> int | None:
        """The engine on which the task would be placed if its prompt was cached there: the first
        engine of `preferred` that accepts the task, else the placer's choice. None: the task would
        wait. Changes nothing."""
        loads = [self.engines.get(engine_id) for engine_id in preferred]
        able = [load for load in loads if load is not None and self.engines.accepts(load, task)]
        if able:
            choice = self._place_on(task, able[0])
        else:
            choice = self._placer.preview(task, self._clock.now())
        if choice is None or self._should_delay(task, choice._replace(to_compute=0)):
            return None
        return choice.load.id

    def check_integrity(self) -> None:
        """Recount the queues and loads. Raises AssertionError with the values that differ."""
        queued = [task for queue in self._queues.values() for task in queue.tasks()]
        for queue in self._queues.values():
            queue.check_integrity()
        self._placer.check_integrity(queued)
        if self._fairness is not None:
            self._fairness.check_integrity(queued)
        self.engines.check_integrity()

    def _find_engine(
        self, queue: "TaskQueue | FairQueue", task: CompletionTask, now: float
    ) -> Choice | None:
        """The engine for the queue's next task. None: the task was skipped or its group held."""
        choice = self._placer.choose(task, now)
        if choice is None:
            queue.skip(task)
            return None
        if self._should_delay(task, choice):
            queue.hold(task)
            return None
        return choice

    def _place_on(self, task: CompletionTask, load: EngineLoad) -> Choice | None:
        """This engine as the choice for the task. None: the engine is full."""
        new_prompt = task.prompt_len - self.engines.running.shared_len(task, load.id)
        has_room = load.is_open and load.fits(task, new_prompt)
        return Choice(load, new_prompt) if has_room else None

    def _should_delay(self, task: CompletionTask, choice: Choice) -> bool:
        """Whether to delay the task although it fits, because it would slow down the tasks on the
        engine. See `should_delay`."""
        load, to_compute = choice.load, choice.to_compute
        if not self._order.limits_concurrency or not load.num_tasks:
            return False
        if load.is_foreign and not (task.objective and task.objective.depth):
            # Estimated costs are inexact: delaying single requests would leave slots empty.
            return False
        if self._fairness is not None and self._fairness.is_underserved(task, load.id):
            return False
        queue = self._queues.get(task.models)
        num_groups = 0 if queue is None else queue.num_groups
        num_waiting = max(1.0, num_groups / self.engines.num_members(task.models))
        step_s, most_s = load.costs.step_s, _added_s(task, load, task.prompt_len, task.prompt_len)
        # A fast upper bound: all tasks are before this task, and its whole prompt is new.
        if not should_delay(load.num_tasks, load.num_tasks + num_waiting, most_s, step_s):
            return False
        num_ahead, num_others = self._order.count_ahead(task, load.id)
        new_prompt = task.prompt_len - self.engines.running.shared_len(task, load.id)
        added_s = _added_s(task, load, new_prompt, to_compute)
        return should_delay(num_ahead, num_others + num_waiting, added_s, step_s)

    def _overcommit(self, fairness: "Fairness", now: float) -> list[Placement]:
        """Place latency tasks of underserved tenants although the engine is full. On the engine
        such a task may preempt calls of the other tenants."""
        placements: list[Placement] = []
        for queue in self._queues.values():
            heads = () if isinstance(queue, TaskQueue) else queue.heads()
            for task in heads:
                may = partial(fairness.within_share, task)
                choice = self._placer.overcommit(task, now, may) if task.is_latency else None
                if choice is not None:
                    queue.remove(task)
                    placements.append(self._run(task, choice, now))
        return placements

    # Queues and loads

    def _add_tenant(self, tenant: str) -> None:
        """Start fair sharing when the second tenant submits a task."""
        if self._first_tenant is None:
            self._first_tenant = tenant
            return
        # Imported here, because most services have one tenant.
        from parrot.serve.scheduling.fairness import Fairness

        self._fairness = Fairness(self.weigh, self._order, self.engines, self._queues)

    def _enqueue(self, task: CompletionTask) -> None:
        if self._fairness is not None:
            self._fairness.queued(task)
        self._push(task)

    def _drop(self, task: CompletionTask) -> None:
        """Forget a task that was removed from its queue and will not run."""
        if self._fairness is not None:
            self._fairness.counters.unqueued(task.tenant)
        self._order.finished(task)

    def _push(self, task: CompletionTask) -> None:
        queue = self._queues.get(task.models)
        if queue is None:
            fairness = self._fairness
            queue = TaskQueue(self._order) if fairness is None else fairness.new_queue()
            self._queues[task.models] = queue
        queue.push(task)
        self._placer.queued(task)

    def _pull(self, task: CompletionTask) -> None:
        queue = self._queues[task.models]
        queue.remove(task)
        self._placer.unqueued(task)
        if not queue:
            del self._queues[task.models]

    def _run(self, task: CompletionTask, choice: Choice, now: float) -> Placement:
        load, fairness = choice.load, self._fairness
        # Before `load.place` counts the task itself.
        is_underserved = fairness is not None and fairness.is_underserved(task, load.id)
        load.place(task, choice.to_compute, now)
        self.decisions.append(_decision(task, choice, now))
        is_longest = self.engines.accepts_longest(load, task)
        priority = self._priority(task, is_underserved)
        step_growth = self._step_growth if task.is_latency else None
        share = EngineShare(self.weight(task.tenant), step_growth)
        return Placement(task, load.id, priority, is_longest, share)

    def _priority(self, task: CompletionTask, is_underserved: bool) -> int:
        steps = (self._order.priority_s(task) - self._epoch) / _PRIORITY_STEP_S
        if is_underserved and task.is_latency:
            steps -= _UNDERSERVED_LEAD
        return int(max(-_MAX_PRIORITY, min(_MAX_PRIORITY, steps)))

    def _unload(self, task: CompletionTask, engine_id: int) -> None:
        load = self.engines.get(engine_id)
        assert load is not None, engine_id
        load.release(task, self._clock.now())


def order_maker(config: GlobalSchedulerConfig) -> MakeOrder:
    """The configured order policy."""
    if config.app_fifo and config.policy == "critical_path":
        return CriticalPath
    return lambda clock: OrderPolicy()


def placer_maker(config: GlobalSchedulerConfig, index: PrefixIndex) -> MakePlacer:
    """The configured placer. `index`: the cached prefixes of all engines."""
    return lambda loads: LowestCostPlacer(
        loads,
        QueuedBlocks(by_prefix=config.ctx_group, by_group=config.graph_group),
        index=index if config.ctx_aware else None,
        with_running=config.ctx_group,
    )


def queued_by_model(scheduler: Scheduler) -> Counter[str]:
    """The number of queued tasks for each model. A task with several models counts for each of
    them, and a task that may run on all models counts for ""."""
    queued = Counter[str]()
    for models, queue in scheduler.queues.items():
        queued.update(dict.fromkeys(models or ("",), len(queue)))
    return queued


def _decision(task: CompletionTask, choice: Choice, now: float) -> Decision:
    completion = task.completion
    return Decision(
        now,
        completion.session_id,
        completion.request_id,
        completion.func_name,
        choice.load.id,
        task.prompt_len,
        choice.to_compute,
        now - task.arrived,
        choice.costs,
    )


def _next_task(
    queues: "Sequence[TaskQueue | FairQueue]",
) -> "tuple[TaskQueue | FairQueue, CompletionTask] | None":
    """The next task of all queues, and its queue."""
    best: tuple[tuple[float, ...], TaskQueue | FairQueue, CompletionTask] | None = None
    for queue in queues:
        top = queue.top()
        if top is not None and (best is None or top[0] < best[0]):
            best = (top[0], queue, top[1])
    return None if best is None else best[1:]


def _earliest_delay_limit(tasks: list[CompletionTask], now: float) -> float | None:
    """The earliest future `delay_limit` of a throughput task."""
    ends = [delay_limit(task) for task in tasks if not task.is_latency]
    return min([end for end in ends if end > now], default=None)


def _added_s(task: CompletionTask, load: EngineLoad, num_read: int, to_compute: int) -> float:
    """Seconds that the task adds to each of its steps: its prompt, spread over its output tokens,
    and its KV reads."""
    cost = load.costs
    prefill_s = to_compute * cost.prefill_s / task.expected_output
    return cost.sequence_s + num_read * cost.token_s + prefill_s
