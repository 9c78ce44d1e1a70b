"""The order of a tenant's queued tasks: a heap of groups, each with a heap of its tasks.

`CriticalPath` is the default policy. A group is one session's latency or throughput tasks. The
group with the smallest key is next. Example at 100 s, with one group per session:

    session   start   remaining work   criteria       key = start + 2 x remaining (- 10 if latency)
    A          0 s         60 s        throughput     0 + 120      = 120
    B         90 s          5 s        latency       90 +  10 - 10 =  90
    C         70 s         20 s        throughput    70 +  40      = 110

The order is B, C, A. When 15 s of A's work have finished, A's key is 0 + 2 x 45 + 0.1 x 15 = 91.5.
A is then before C. Inside a group, the task with the longest remaining path is first. For two tasks
that arrived at 0 s, a path of 12 s gives the key 0 - 5 x 12 = -60, and a path of 3 s gives -15.
"""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from math import inf

from parrot.serve.scheduling.load import Charge
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

# Seconds that one second of remaining work adds to a session's key. A larger value favours short
# sessions more.
_WORK_WEIGHT = 2.0
# Seconds that one second of finished work adds to a session's key. With a larger value, new
# sessions pass a session that never ends sooner.
_SERVED_WEIGHT = 0.1
# Latency tasks are sorted as if their session had started this many seconds earlier.
_LATENCY_LEAD_S = 10.0
# Seconds that one second of remaining path subtracts from the key of a task within its session.
_PATH_WEIGHT = 5.0
# Background tasks are sorted as if they had arrived this many seconds later.
_BACKGROUND_LAG_S = 600.0
# A session without wanted work for more than this many seconds gets a new start time.
_BURST_GAP_S = 10.0

# A task is urgent when the seconds to its deadline are at most this multiple of its remaining path
# plus `_URGENT_SLACK_S`. A larger value makes tasks urgent earlier.
_URGENT_FACTOR = 2.0
# Seconds that are added to the limit of `_URGENT_FACTOR`. A larger value protects short paths.
_URGENT_SLACK_S = 1.0
# A deadline is unreachable when at most this fraction of the task's remaining path is left.
_UNREACHABLE_FRACTION = 0.5
# Timers fire this many seconds late, so that rounding cannot make them fire before a change.
_TIMER_EPSILON_S = 1e-6

_URGENT = (-1, True)  # The group of all urgent tasks. No session has the id -1.


class OrderPolicy:
    """Base class of policies. Orders tasks by arrival, all in one group.

    The key of a task may change only in `Scheduler.update` or when `due` returns the task. The key
    of a group may grow at any time. If it may shrink, `update_remaining_work` returns the group."""

    limits_concurrency = False  # Whether the scheduler may delay tasks although they fit.

    def group(self, task: CompletionTask) -> Hashable:
        return None

    def group_key(self, group: Hashable) -> float:
        """The group with the smallest key is next."""
        return 0.0

    def task_key(self, task: CompletionTask) -> float:
        """In its group, the task with the smallest key is next."""
        return task.arrived

    def priority_s(self, task: CompletionTask) -> float:
        """Seconds that order the engine's own waiting queue, smallest first."""
        return task.arrived

    def due(self) -> Iterable[CompletionTask]:
        """Return the queued tasks whose group or key has changed with time since the last call."""
        return ()

    def next_change(self) -> float | None:
        """The time at which `due` returns the next task. None: no key depends on time."""
        return None

    def arrived(self, task: CompletionTask) -> None: ...

    def updated(self, task: CompletionTask) -> None:
        """The task's objective has changed. The scheduler pushes the task again afterwards."""

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None: ...

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None:
        """A placed task has left this engine. `finished` or `updated` follows."""

    def finished(self, task: CompletionTask) -> None:
        """The task has finished, failed or been cancelled, queued or placed."""

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """Count the other applications on the engine that go before the task's, and all others
        there. Called only if the policy `limits_concurrency`."""
        raise NotImplementedError

    def update_remaining_work(self, session_id: int, remaining_s: float) -> Iterable[Hashable]:
        """Set the session's wanted and unfinished work, in seconds of an otherwise idle engine.
        Returns the groups whose keys may have shrunk."""
        return ()

    def forget(self, session_id: int) -> None:
        """The session has closed."""


@dataclass(slots=True)
class AppProgress:
    """The account of a session."""

    start: float  # Time at which the session's current burst of work began.
    served_s: float = 0.0  # Predicted seconds of its finished tasks.
    remaining_s: float = 0.0  # Seconds of its unfinished work on an idle engine.
    num_tasks: int = 0  # Queued and placed tasks.
    last_active: float = 0.0
    is_closed: bool = False  # The account is deleted with the last task.

    @property
    def is_active(self) -> bool:
        return self.num_tasks > 0 or self.remaining_s > 0.0


class ByApplication(OrderPolicy):
    """Base class of policies that group tasks by session. Keeps an account for each session."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[int, AppProgress] = {}

    def group(self, task: CompletionTask) -> Hashable:
        return task.completion.session_id

    def arrived(self, task: CompletionTask) -> None:
        self._account(task.completion.session_id).num_tasks += 1

    def finished(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        account = self._accounts[session_id]
        account.num_tasks -= 1
        account.last_active = self._clock.now()
        if account.is_closed and not account.num_tasks:
            del self._accounts[session_id]

    def forget(self, session_id: int) -> None:
        account = self._accounts.get(session_id)
        if account is not None:
            account.is_closed = True
            if not account.num_tasks:
                del self._accounts[session_id]

    def _account(self, session_id: int) -> AppProgress:
        """The account of a session with wanted work. Creates the account if it is missing."""
        account = self._accounts.get(session_id)
        if account is None:
            account = self._accounts[session_id] = AppProgress(self._clock.now())
        return account


class Deadlines:
    """Finds urgent tasks. A task is urgent while its deadline is at risk but still reachable.

    promote      latest start      demote         deadline
       |------------- urgent --------|-- unreachable --|
                       |------- remaining path --------|"""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        # The time at which each task becomes urgent or unreachable next.
        self._changes: LazyHeap[CompletionTask, float] = LazyHeap()

    def is_urgent(self, task: CompletionTask) -> bool:
        if task.deadline is None:
            return False
        left_s, path_s = task.deadline - self._clock.now(), task.remaining_path_s
        return _UNREACHABLE_FRACTION * path_s < left_s <= _URGENT_FACTOR * path_s + _URGENT_SLACK_S

    def watch(self, task: CompletionTask) -> None:
        """Add a task, or update it after its deadline or its path has changed."""
        self._changes.discard(task)
        if task.deadline is None:
            return
        path_s, now = task.remaining_path_s, self._clock.now()
        for left_s in (_URGENT_FACTOR * path_s + _URGENT_SLACK_S, _UNREACHABLE_FRACTION * path_s):
            if (when := task.deadline - left_s + _TIMER_EPSILON_S) > now:
                self._changes.set(task, when)
                return

    def due(self) -> list[CompletionTask]:
        """Return the tasks that became urgent or unreachable since the last call."""
        tasks = list(self._changes.pop_until(self._clock.now()))
        for task in tasks:
            self.watch(task)
        return tasks

    def next_change(self) -> float | None:
        """The time at which the next task becomes urgent or unreachable. None: no task will."""
        top = self._changes.top()
        return None if top is None else top[0]

    def discard(self, task: CompletionTask) -> None:
        self._changes.discard(task)


class CriticalPath(ByApplication):
    """Least remaining work first, with aging: the key of a session is its start time plus a
    multiple of its remaining work. So no session starves, and the mean completion time is small.
    Latency and throughput tasks of a session are two groups. Urgent tasks are before all others."""

    limits_concurrency = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._started_at = clock.now()
        self._deadlines: Deadlines | None = None  # Created for the first task with a deadline.
        self._running = RunningApps(lambda task: self.group_key(self.group(task)))
        self._predicted_s: dict[CompletionTask, float] = {}

    def group(self, task: CompletionTask) -> tuple[int, bool]:
        if task.deadline is not None and self._is_urgent(task):
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
        if task.deadline is not None and self._is_urgent(task):
            return task.deadline - task.remaining_path_s  # The latest start.
        lag_s = _BACKGROUND_LAG_S if task.is_background else 0.0
        return task.arrived + lag_s - _PATH_WEIGHT * task.remaining_path_s

    def arrived(self, task: CompletionTask) -> None:
        super().arrived(task)
        self.updated(task)

    def updated(self, task: CompletionTask) -> None:
        if self._deadlines is None and task.deadline is not None:
            self._deadlines = Deadlines(self._clock)
        if self._deadlines is not None:
            self._deadlines.watch(task)

    def priority_s(self, task: CompletionTask) -> float:
        # The order of sessions is not sent. An engine limits the prompt tokens of a step that also
        # decodes a higher priority, so a fine order would cut most prompts into chunks.
        if task.deadline is not None and self._is_urgent(task):
            return -inf
        return self._started_at if task.is_latency else self._started_at + _LATENCY_LEAD_S

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        return self._running.count_ahead(task, engine_id)

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        self._predicted_s[task] = charge.duration_s
        self._running.add(task, engine_id)
        if self._deadlines is not None:
            self._deadlines.discard(task)

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None:
        self._running.discard(task, engine_id)

    def finished(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        self._accounts[session_id].served_s += self._predicted_s.pop(task, 0.0)
        self._running.mark_stale(session_id)
        super().finished(task)
        if self._deadlines is not None:
            self._deadlines.discard(task)

    def due(self) -> Iterable[CompletionTask]:
        return () if self._deadlines is None else self._deadlines.due()

    def next_change(self) -> float | None:
        return None if self._deadlines is None else self._deadlines.next_change()

    def update_remaining_work(self, session_id: int, remaining_s: float) -> Iterable[Hashable]:
        if not remaining_s and session_id not in self._accounts:
            return ()
        account = self._account(session_id)
        before_s, account.remaining_s = account.remaining_s, remaining_s
        account.last_active = self._clock.now()
        self._running.mark_stale(session_id)
        return () if remaining_s >= before_s else ((session_id, True), (session_id, False))

    def _is_urgent(self, task: CompletionTask) -> bool:
        return self._deadlines is not None and self._deadlines.is_urgent(task)

    def _account(self, session_id: int) -> AppProgress:
        account, now = super()._account(session_id), self._clock.now()
        if not account.is_active and now - account.last_active > _BURST_GAP_S:
            account.start, account.served_s = now, 0.0
        return account


SortKey = tuple[float, float]

# A queue's round ends after this many skipped tasks, or this many held groups. A larger value finds
# more tasks that fit, and costs more CPU time per round.
_LOOK_AHEAD = 4
# After a task was skipped in this many rounds, all later tasks of its queue wait for it.
MAX_SKIPS = 64


class TaskQueue:
    """The queued tasks of one tenant that may run on the same models.

    `top` returns the next task of a round of scheduling. Skipped tasks and held groups return to
    the queue in `end_round`. Every operation costs O(log n), amortised."""

    def __init__(self, order: OrderPolicy) -> None:
        self.is_round_over = False  # `top` returns None until `end_round`.
        self._order = order
        self._group_of: dict[CompletionTask, Hashable] = {}
        self._tasks: dict[Hashable, LazyHeap[CompletionTask, float]] = {}  # By group.
        # All groups except held ones. A stored key may be smaller than the group's key: `top`
        # corrects keys that have grown, and `touch` those that have shrunk.
        self._groups: LazyHeap[Hashable, float] = LazyHeap()
        self._held: dict[Hashable, None] = {}
        self._skipped: list[CompletionTask] = []

    def __len__(self) -> int:
        return len(self._group_of)

    def __contains__(self, task: CompletionTask) -> bool:
        return task in self._group_of

    def tasks(self) -> list[CompletionTask]:
        return list(self._group_of)

    @property
    def is_empty(self) -> bool:
        """Whether the queue has no task, including skipped ones."""
        return not self._group_of and not self._skipped

    @property
    def num_groups(self) -> int:
        """Number of groups with queued tasks."""
        return len(self._tasks)

    def check_integrity(self) -> None:
        """Recount the tasks. Raises AssertionError with the number that differs."""
        assert sum(map(len, self._tasks.values())) == len(self), len(self)

    def push(self, task: CompletionTask) -> int:
        """Returns the number of groups that the task adds: 0 or 1."""
        name = self._group_of[task] = self._order.group(task)
        tasks, num_new = self._tasks.get(name), 0
        if tasks is None:
            tasks, num_new = LazyHeap(), 1
            self._tasks[name] = tasks
            self._groups.set(name, self._order.group_key(name))
        tasks.set(task, self._order.task_key(task))
        return num_new

    def remove(self, task: CompletionTask) -> int:
        """Returns the number of groups that disappear: 0 or 1."""
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
        """The group's key may have shrunk."""
        if name in self._groups and (key := self._order.group_key(name)) < self._groups.key(name):
            self._groups.set(name, key)

    def top(self) -> tuple[SortKey, CompletionTask] | None:
        """The next task and its sort key. None: the queue is empty or its round is over."""
        while not self.is_round_over and (first := self._groups.top()) is not None:
            known_key, name = first
            key = self._order.group_key(name)
            if key > known_key:  # The key has grown since the group was stored.
                self._groups.set(name, key)
                continue
            top = self._tasks[name].top()
            assert top is not None, name
            return (known_key, top[0]), top[1]
        return None

    def skip(self, task: CompletionTask) -> int:
        """Skip a task that fits on no engine. Returns the number of groups that disappear."""
        num_removed = self.remove(task)
        self._skipped.append(task)
        self.is_round_over = task.num_skipped >= MAX_SKIPS or len(self._skipped) >= _LOOK_AHEAD
        return num_removed

    def hold(self, task: CompletionTask) -> None:
        """Hold the task's group until the round ends."""
        name = self._group_of[task]
        self._groups.discard(name)
        self._held[name] = None
        self.is_round_over = len(self._held) >= _LOOK_AHEAD

    def end_round(self) -> list[CompletionTask]:
        """Return skipped tasks and held groups to the queue. Returns the skipped tasks."""
        for name in self._held:
            self._groups.set(name, self._order.group_key(name))
        self._held.clear()
        passed, self._skipped = self._skipped, []
        for task in passed:
            task.num_skipped += 1
            self.push(task)
        self.is_round_over = False
        return passed


def should_delay(num_ahead: int, num_apps: float, added_s: float, step_s: float) -> bool:
    """Whether an application should be delayed although an engine has room for it.

    `num_apps` applications run on the engine or wait for it. `num_ahead` running ones are before
    this application. It would add `added_s` to each step. An empty step takes `step_s`.

    Let n equal applications add w seconds each to a step of s seconds. They run all at once, or
    first k of them and then the other m = n - k:

        | s + n w |                 all at once
        | s + k w | s + m w |       two waves: per step, k finish m w earlier and m finish s later

    The mean time is least at k = (n + s / w) / 2. Two waves are better if the mean gains more than
    the last application loses: m (k w - s) / n > s. With a = s / w this is (n - a)^2 > 4 n a, or
    n > 5.8 a. So applications that add little to a step are not delayed."""
    steps = step_s / added_s if added_s > 0 else float("inf")
    if num_ahead < (num_apps + steps) / 2:
        return False
    return (num_apps - steps) ** 2 > 4 * num_apps * steps


class RunningApps:
    """The sessions that run on each engine, sorted by key. A session has the key of its task that
    was placed there last. `count_ahead` refreshes stale keys before it counts."""

    def __init__(self, key: Callable[[CompletionTask], float]) -> None:
        self._key = key
        self._engines: defaultdict[int, _EngineApps] = defaultdict(_EngineApps)
        self._engines_of: defaultdict[int, set[int]] = defaultdict(set)  # By session.

    def add(self, task: CompletionTask, engine_id: int) -> None:
        session_id, engine = task.completion.session_id, self._engines[engine_id]
        engine.tasks.setdefault(session_id, {})[task] = None
        engine.stale.add(session_id)
        self._engines_of[session_id].add(engine_id)

    def discard(self, task: CompletionTask, engine_id: int) -> None:
        session_id, engine = task.completion.session_id, self._engines[engine_id]
        del engine.tasks[session_id][task]
        if engine.tasks[session_id]:
            engine.stale.add(session_id)
            return
        engine.remove(session_id)
        if not engine.tasks:
            del self._engines[engine_id]
        self._engines_of[session_id].remove(engine_id)
        if not self._engines_of[session_id]:
            del self._engines_of[session_id]

    def mark_stale(self, session_id: int) -> None:
        """The key of the session's tasks may have changed."""
        for engine_id in self._engines_of.get(session_id, ()):
            self._engines[engine_id].stale.add(session_id)

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """See `OrderPolicy.count_ahead`."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return 0, 0
        engine.refresh(self._key)
        key = self._key(task)
        own = engine.keys.get(task.completion.session_id)
        num_before = bisect_right(engine.sorted_keys, key) - (own is not None and own <= key)
        return num_before, len(engine.keys) - (own is not None)


@dataclass(slots=True)
class _EngineApps:
    """The sessions that run on one engine."""

    # The placed tasks of each session, in the order of placement.
    tasks: dict[int, dict[CompletionTask, None]] = field(default_factory=dict)
    keys: dict[int, float] = field(default_factory=dict)  # By session, as of the last refresh.
    sorted_keys: list[float] = field(default_factory=list)  # The values of `keys`.
    stale: set[int] = field(default_factory=set)  # Sessions whose key may have changed.

    def refresh(self, key: Callable[[CompletionTask], float]) -> None:
        timed = set()  # Deadlines change keys with time, so these sessions stay stale.
        for session_id in self.stale:
            self._drop_key(session_id)
            task = next(reversed(self.tasks[session_id]))
            insort(self.sorted_keys, self.keys.setdefault(session_id, key(task)))
            if task.deadline is not None:
                timed.add(session_id)
        self.stale = timed

    def remove(self, session_id: int) -> None:
        del self.tasks[session_id]
        self.stale.discard(session_id)
        self._drop_key(session_id)

    def _drop_key(self, session_id: int) -> None:
        key = self.keys.pop(session_id, None)
        if key is not None:
            del self.sorted_keys[bisect_left(self.sorted_keys, key)]
