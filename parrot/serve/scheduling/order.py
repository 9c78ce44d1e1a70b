"""Which queued task comes first. Tasks belong to groups: the groups are ordered by their keys, and
the tasks within each by theirs, least first.

    CriticalPath    by application (a session): the least predicted work left first, aged; in it,
                    the longest path first; calls with a deadline that can still be met go before
    OrderPolicy     by arrival, whatever the application: `fcfs`"""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import inf

from parrot.serve.scheduling.hold_back import RunningApps
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

_WORK_WEIGHT = 2.0  # seconds of seniority that one second of remaining work costs
_SERVED_WEIGHT = 0.1  # and one of work done, so that an app without an end loses its place some day
_LATENCY_LEAD_S = 10.0  # a latency task goes before throughput tasks that came so much earlier
_PATH_WEIGHT = 5.0  # likewise within an app, per second of the remaining path
_BACKGROUND_LAG_S = 600.0  # what is read goes before background work that came so much earlier
_BURST_GAP_S = 10.0  # an app that wanted nothing for so long starts again as a new one

_MARGIN = 2.0  # a deadline is at risk when less than so many times the predicted seconds are left,
_MARGIN_S = 1.0  # and so much;
_HOPELESS = 0.5  # with less than this of them, the call has no right of way any more
_AFTER_S = 1e-6  # so much after a change it has happened, however times are rounded

_URGENT = (-1, True)  # the group of calls with right of way


class OrderPolicy:
    """Orders tasks by arrival, all in one group. A policy keeps up by itself what it overrides.

    A task's keys may change only by `update` of the scheduler, or when `due` names it. A group's
    key may grow at any time; when it may have shrunk, `progressed` names the group."""

    holds_back = False  # whether tasks should ever wait for the sake of those that run

    def group(self, task: CompletionTask) -> Hashable:
        return None

    def group_key(self, group: Hashable) -> float:
        return 0.0

    def task_key(self, task: CompletionTask) -> float:
        return task.arrived

    def priority_s(self, task: CompletionTask) -> float:
        """The task's place in an engine's queue, least first."""
        return task.arrived

    def due(self) -> Iterable[CompletionTask]:
        """Queued tasks whose group or key has changed with time since the last call."""
        return ()

    def next_change(self) -> float | None:
        """When `due` will name the next task; None if no key depends on time."""
        return None

    def arrived(self, task: CompletionTask) -> None: ...

    def updated(self, task: CompletionTask) -> None:
        """Note that a task's objective was read anew; it will be in the queue again."""

    def placed(self, task: CompletionTask, engine_id: int, work_s: float) -> None: ...

    def unplaced(self, task: CompletionTask, engine_id: int) -> None:
        """Note that a placed task is not on this engine any more. `ended` or `updated` follows."""

    def ended(self, task: CompletionTask) -> None: ...

    def ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """The number of other applications on the engine for whose sake the task should wait, since
        they go before it, and of all others there. Called only if the policy `holds_back`."""
        raise NotImplementedError

    def progressed(self, session_id: int, remaining_s: float) -> Iterable[Hashable]:
        """Take in the work of all that the session wants and has not got, in seconds of an engine
        that does nothing else. Returns the groups whose keys may have shrunk."""
        return ()

    def forget(self, session_id: int) -> None: ...


@dataclass(slots=True)
class Account:
    """An application's account. `num_tasks` are queued or placed, `served_s` the predicted
    seconds of what it was given so far."""

    start: float
    served_s: float = 0.0
    remaining_s: float = 0.0
    num_tasks: int = 0
    last_active: float = 0.0
    is_forgotten: bool = False

    @property
    def is_active(self) -> bool:
        return self.num_tasks > 0 or self.remaining_s > 0.0


class ByApplication(OrderPolicy):
    """Keeps an account for each session. Subclasses say what makes a session come first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[int, Account] = {}

    def group(self, task: CompletionTask) -> Hashable:
        return task.completion.session_id

    def arrived(self, task: CompletionTask) -> None:
        self._account(task.completion.session_id).num_tasks += 1

    def ended(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        account = self._accounts[session_id]
        account.num_tasks -= 1
        account.last_active = self._clock.now()
        if account.is_forgotten and not account.num_tasks:
            del self._accounts[session_id]

    def forget(self, session_id: int) -> None:
        """The session has ended: its account goes with its last task."""
        account = self._accounts.get(session_id)
        if account is not None:
            account.is_forgotten = True
            if not account.num_tasks:
                del self._accounts[session_id]

    def _account(self, session_id: int) -> Account:
        """The account of a session that wants something now."""
        account = self._accounts.get(session_id)
        if account is None:
            account = self._accounts[session_id] = Account(self._clock.now())
        return account


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


class CriticalPath(ByApplication):
    """The shortest remaining work first, so that the mean time to completion is small. The key of
    an application is the time when it came, plus a multiple of its remaining work: so one that is
    far from its end waits longer, but only in proportion, and nobody starves.

    Latency and throughput tasks of an application are two groups, the first with a lead."""

    holds_back = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._began = clock.now()
        self._deadlines = Deadlines(clock)
        self._running = RunningApps(lambda task: self.group_key(self.group(task)))
        self._placed_s: dict[CompletionTask, float] = {}

    def group(self, task: CompletionTask) -> tuple[int, bool]:
        if self._deadlines.is_urgent(task):
            return _URGENT
        return (task.completion.session_id, task.is_latency)

    def group_key(self, group: Hashable) -> float:
        assert isinstance(group, tuple)
        if group == _URGENT:
            return -inf
        session_id, is_latency = group
        account = self._accounts[session_id]
        work_s = _WORK_WEIGHT * account.remaining_s + _SERVED_WEIGHT * account.served_s
        return account.start + work_s - (_LATENCY_LEAD_S if is_latency else 0.0)

    def task_key(self, task: CompletionTask) -> float:
        if self._deadlines.is_urgent(task):
            assert task.deadline is not None, task
            return task.deadline - task.remaining_path_s  # the latest start
        lag_s = _BACKGROUND_LAG_S if task.is_background else 0.0
        return task.arrived + lag_s - _PATH_WEIGHT * task.remaining_path_s

    def arrived(self, task: CompletionTask) -> None:
        super().arrived(task)
        self._deadlines.watch(task)

    def updated(self, task: CompletionTask) -> None:
        self._deadlines.watch(task)

    def priority_s(self, task: CompletionTask) -> float:
        """Urgency alone counts, the same in all ServeCores that share an engine. Which application
        is first is decided before its calls are placed: prompts in that order would wait beside
        each call that generates, and batches be small."""
        if self._deadlines.is_urgent(task):
            return -inf
        return self._began if task.is_latency else self._began + _LATENCY_LEAD_S

    def ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        return self._running.ahead(task, engine_id)

    def placed(self, task: CompletionTask, engine_id: int, work_s: float) -> None:
        self._placed_s[task] = work_s
        self._running.add(task, engine_id)
        self._deadlines.forget(task)

    def unplaced(self, task: CompletionTask, engine_id: int) -> None:
        self._running.discard(task, engine_id)

    def ended(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        self._accounts[session_id].served_s += self._placed_s.pop(task, 0.0)
        self._running.changed(session_id)
        super().ended(task)
        self._deadlines.forget(task)

    def due(self) -> Iterable[CompletionTask]:
        return self._deadlines.due()

    def next_change(self) -> float | None:
        return self._deadlines.next_change()

    def progressed(self, session_id: int, remaining_s: float) -> Iterable[Hashable]:
        if not remaining_s and session_id not in self._accounts:
            return ()
        account = self._account(session_id)
        before_s, account.remaining_s = account.remaining_s, remaining_s
        account.last_active = self._clock.now()
        self._running.changed(session_id)
        return () if remaining_s >= before_s else ((session_id, True), (session_id, False))

    def _account(self, session_id: int) -> Account:
        account, now = super()._account(session_id), self._clock.now()
        if not account.is_active and now - account.last_active > _BURST_GAP_S:
            account.start, account.served_s = now, 0.0
        return account
