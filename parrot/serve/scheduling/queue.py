"""The order of a tenant's queued tasks: a heap of groups, each with a heap of its tasks."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from math import inf

from parrot.serve.scheduling.load import Charge
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap

_WORK_WEIGHT = 2.0  # seconds of seniority that one second of remaining work costs
_SERVED_WEIGHT = 0.1  # and one of work done, so that an app without an end loses its place some day
_LATENCY_LEAD_S = 10.0  # a latency task goes before throughput tasks that came so much earlier
_PATH_WEIGHT = 5.0  # likewise within an app, per second of the remaining path
_BACKGROUND_LAG_S = 600.0  # what is read goes before background work that came so much earlier
_BURST_GAP_S = 10.0  # an app that wanted nothing for so long starts again as a new one

_URGENT_FACTOR = (
    2.0  # a deadline is at risk when less than so many times the predicted seconds are left,
)
_URGENT_SLACK_S = 1.0  # and so much;
_UNREACHABLE_FRACTION = 0.5  # with less than this of them, the call has no right of way any more
_TIMER_EPSILON_S = 1e-6  # so much after a change it has happened, however times are rounded

_URGENT = (-1, True)  # the group of calls with right of way


class OrderPolicy:
    """Orders tasks by arrival, all in one group. A policy keeps up by itself what it overrides.

    A task's keys may change only by `update` of the scheduler, or when `due` names it. A group's
    key may grow at any time; when it may have shrunk, `update_remaining_work` names the group."""

    limits_concurrency = False  # whether tasks should ever wait for the sake of those that run

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

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None: ...

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, taken_s: float
    ) -> None:
        """Note that a placed task is no longer on this engine. `ended` or `updated` follows."""

    def ended(self, task: CompletionTask) -> None: ...

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """Count the other applications on the engine that go before the task's, and all others
        there. Called only if the policy `limits_concurrency`."""
        raise NotImplementedError

    def update_remaining_work(self, session_id: int, remaining_s: float) -> Iterable[Hashable]:
        """Take in the work of all that the session wants and has not got, in seconds of an engine
        that does nothing else. Returns the groups whose keys may have shrunk."""
        return ()

    def forget(self, session_id: int) -> None: ...


@dataclass(slots=True)
class AppProgress:
    """An application's account. `num_tasks` are queued or placed, `served_s` the predicted
    seconds of what it was given so far."""

    start: float
    served_s: float = 0.0
    remaining_s: float = 0.0
    num_tasks: int = 0
    last_active: float = 0.0
    is_closed: bool = False

    @property
    def is_active(self) -> bool:
        return self.num_tasks > 0 or self.remaining_s > 0.0


class ByApplication(OrderPolicy):
    """Keeps an account for each session. Subclasses say what makes a session come first."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[int, AppProgress] = {}

    def group(self, task: CompletionTask) -> Hashable:
        return task.completion.session_id

    def arrived(self, task: CompletionTask) -> None:
        self._account(task.completion.session_id).num_tasks += 1

    def ended(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        account = self._accounts[session_id]
        account.num_tasks -= 1
        account.last_active = self._clock.now()
        if account.is_closed and not account.num_tasks:
            del self._accounts[session_id]

    def forget(self, session_id: int) -> None:
        """The session has ended: its account goes with its last task."""
        account = self._accounts.get(session_id)
        if account is not None:
            account.is_closed = True
            if not account.num_tasks:
                del self._accounts[session_id]

    def _account(self, session_id: int) -> AppProgress:
        """The account of a session that wants something now."""
        account = self._accounts.get(session_id)
        if account is None:
            account = self._accounts[session_id] = AppProgress(self._clock.now())
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
        return _UNREACHABLE_FRACTION * path_s < left_s <= _URGENT_FACTOR * path_s + _URGENT_SLACK_S

    def watch(self, task: CompletionTask) -> None:
        """Take in a task, or that its deadline or path has changed."""
        self._changes.discard(task)
        if task.deadline is None:
            return
        path_s, now = task.remaining_path_s, self._clock.now()
        for left_s in (_URGENT_FACTOR * path_s + _URGENT_SLACK_S, _UNREACHABLE_FRACTION * path_s):
            if (when := task.deadline - left_s + _TIMER_EPSILON_S) > now:
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

    def discard(self, task: CompletionTask) -> None:
        self._changes.discard(task)


class CriticalPath(ByApplication):
    """The shortest remaining work first, so that the mean time to completion is small. The key of
    an application is the time when it came, plus a multiple of its remaining work: so one that is
    far from its end waits longer, but only in proportion, and nobody starves.

    Latency and throughput tasks of an application are two groups, the first with a lead."""

    limits_concurrency = True

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock)
        self._started_at = clock.now()
        self._deadlines: Deadlines | None = None  # created for the first call with a deadline
        self._running = RunningApps(lambda task: self.group_key(self.group(task)))
        self._placed_s: dict[CompletionTask, float] = {}

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
            return task.deadline - task.remaining_path_s  # the latest start
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
        """Urgency alone counts. The order of applications is decided before their calls are placed:
        in an engine's queue, the same order would make batches small."""
        if task.deadline is not None and self._is_urgent(task):
            return -inf
        return self._started_at if task.is_latency else self._started_at + _LATENCY_LEAD_S

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        return self._running.count_ahead(task, engine_id)

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None:
        self._placed_s[task] = charge.duration_s
        self._running.add(task, engine_id)
        if self._deadlines is not None:
            self._deadlines.discard(task)

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, taken_s: float
    ) -> None:
        self._running.discard(task, engine_id)

    def ended(self, task: CompletionTask) -> None:
        session_id = task.completion.session_id
        self._accounts[session_id].served_s += self._placed_s.pop(task, 0.0)
        self._running.mark_stale(session_id)
        super().ended(task)
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

_LOOK_AHEAD = 4  # tasks that do not fit, or groups held, that are passed over in a round
MAX_SKIPS = 64  # times that a task may be passed over before the others wait for it


class TaskQueue:
    """The queued tasks of a tenant that may run on the same models.

    A group's key is looked at again when the group comes to the top, since it may have grown, and
    when `touch` says that it has shrunk. What is set aside in a round of scheduling does not come
    to the top again before `end_round`; `is_round_over`: nothing does. Every operation costs
    O(log n) amortised."""

    def __init__(self, order: OrderPolicy) -> None:
        self.is_round_over = False
        self._order = order
        self._group_of: dict[CompletionTask, Hashable] = {}
        self._tasks: dict[Hashable, LazyHeap[CompletionTask, float]] = {}  # by group
        self._groups: LazyHeap[Hashable, float] = LazyHeap()  # all but those held
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
        """Whether there is no task, not even one that was passed over."""
        return not self._group_of and not self._skipped

    @property
    def num_groups(self) -> int:
        """Number of groups with queued tasks."""
        return len(self._tasks)

    def check_integrity(self) -> None:
        """Recount the tasks. Raises AssertionError with what differs."""
        assert sum(map(len, self._tasks.values())) == len(self), len(self)

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
        while not self.is_round_over and (first := self._groups.top()) is not None:
            known_key, name = first
            key = self._order.group_key(name)
            if key > known_key:
                self._groups.set(name, key)
                continue
            top = self._tasks[name].top()
            assert top is not None, name
            return (known_key, top[0]), top[1]
        return None

    def skip(self, task: CompletionTask) -> int:
        """Set aside a task for which there is no room. Returns how many groups less there are."""
        num_gone = self.remove(task)
        self._skipped.append(task)
        self.is_round_over = task.num_skipped >= MAX_SKIPS or len(self._skipped) >= _LOOK_AHEAD
        return num_gone

    def hold(self, task: CompletionTask) -> None:
        """Set aside all of the task's group."""
        name = self._group_of[task]
        self._groups.discard(name)
        self._held[name] = None
        self.is_round_over = len(self._held) >= _LOOK_AHEAD

    def end_round(self) -> list[CompletionTask]:
        """Take back what was set aside. Returns the tasks that were passed over."""
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
    """`num_apps` applications run on an engine or wait for it, and `num_ahead` of those that run go
    before this one. While it runs it would add `added_s` to each step, beside the `step_s` that a
    step takes by itself.

    Let n alike applications, each of which adds w to steps that take s by themselves, all run at
    once, or first k and then the other m:

        | s + n w |
        | s + k w | s + m w |       k end m w earlier and m end s later, per step

    The mean is least with k = (n + s / w) / 2. It is worth while if what the k gain, less what the
    m lose, is more than n times what the last loses: m (k w - s) > n s. So the mean and the last
    count alike. With a = s / w that is (n - a)^2 > 4 n a, so n > 5.8 a: where steps are long for
    other reasons than the applications in them, they had better be shared by all."""
    steps = step_s / added_s if added_s > 0 else float("inf")
    if num_ahead < (num_apps + steps) / 2:
        return False
    return (num_apps - steps) ** 2 > 4 * num_apps * steps


class RunningApps:
    """The applications that run on each engine, in the order of their keys. One counts once, by its
    call that was placed there last. Keys are looked at when somebody asks: `key` of a task may
    change when `mark_stale` says so, and at any time if the task has a deadline."""

    def __init__(self, key: Callable[[CompletionTask], float]) -> None:
        self._key = key
        self._engines: defaultdict[int, _EngineApps] = defaultdict(_EngineApps)
        self._engines_of: defaultdict[int, set[int]] = defaultdict(set)  # by session

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
        for engine_id in self._engines_of.get(session_id, ()):
            self._engines[engine_id].stale.add(session_id)

    def count_ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """The number of other applications on the engine that go before the task's, and of all
        others there."""
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
    """`tasks`: by session, the last placed last. `keys`: by session, and `sorted_keys`, as they
    were when they were last looked at. `stale`: sessions whose key may be another now."""

    tasks: dict[int, dict[CompletionTask, None]] = field(default_factory=dict)
    keys: dict[int, float] = field(default_factory=dict)
    sorted_keys: list[float] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)

    def refresh(self, key: Callable[[CompletionTask], float]) -> None:
        timed = set()
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
