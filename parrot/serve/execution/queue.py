"""The tasks that wait for an engine."""

from collections.abc import Callable

from parrot.serve.contexts.ledger import ContextLedger
from parrot.serve.execution.grace import Grace
from parrot.serve.graph.nodes import Completion, CompletionState
from parrot.serve.quotas import QueuedByTenant
from parrot.serve.scheduling.scheduler import Models, Scheduler
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.timers import TimerQueue


class Queue:
    """What the scheduler has queued, by completion. The ledger hears of each task that its prompt's
    contexts will be of use. `on_unserved` takes those that no engine came for in `grace_s` seconds;
    `wake` has the scheduler called soon."""

    def __init__(
        self,
        clock: Clock,
        ledger: ContextLedger,
        scheduler: Scheduler,
        timers: TimerQueue,
        grace_s: float,
        on_unserved: Callable[[CompletionTask], None],
        wake: Callable[[], None],
    ) -> None:
        self._clock = clock
        self._ledger = ledger
        self._scheduler = scheduler
        self._grace = Grace(timers, grace_s, self._end_grace)
        self._on_unserved = on_unserved
        self._wake = wake
        self._tasks: dict[int, CompletionTask] = {}  # by completion id
        self.by_tenant = QueuedByTenant()

    def __len__(self) -> int:
        return len(self._tasks)

    def tasks(self) -> list[CompletionTask]:
        return list(self._tasks.values())

    def find(self, completion: Completion) -> CompletionTask | None:
        return self._tasks.get(completion.id)

    def enter(self, task: CompletionTask) -> None:
        """The scheduler has it in its queue already."""
        task.completion.state = CompletionState.QUEUED
        self._tasks[task.completion.id] = task
        self.by_tenant.enter(task.completion.options.tenant)
        self._ledger.expect(task.keys)
        if not self._scheduler.is_served(task.models):
            self._grace.give(task.models, self._clock.now())
        self._wake()

    def leave(self, task: CompletionTask) -> None:
        """The scheduler has placed it."""
        del self._tasks[task.completion.id]
        self.by_tenant.leave(task.completion.options.tenant)
        self._ledger.unexpect(task.keys)

    def remove(self, task: CompletionTask) -> None:
        """It will not run."""
        self._scheduler.remove(task)
        self.leave(task)

    def hand_over(self, task: CompletionTask, heir: Completion) -> None:
        """It waits for another completion now."""
        self._scheduler.remove(task)
        self._tasks[heir.id] = self._tasks.pop(task.completion.id)
        task.completion = heir
        task.refresh()
        self._scheduler.add(task)

    def engine_joined(self) -> None:
        self._grace.end(self._scheduler.is_served)
        self._wake()

    def engine_lost(self, last_seen: float) -> None:
        for models in self._scheduler.unserved():
            self._grace.give(models, last_seen)

    def _end_grace(self, models: Models, since: float) -> float | None:
        """Nobody came to serve them since then. Returns when the next such task was queued."""
        later: list[float] = []
        for task in self._scheduler.queued(models):
            if self._tasks.get(task.completion.id) is not task:
                continue  # withdrawn when one before it failed
            if task.arrived > since:
                later.append(task.arrived)
            else:
                self.remove(task)
                self._on_unserved(task)
        return min(later, default=None)
