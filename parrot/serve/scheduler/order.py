"""Order policies: which queued task comes first. Each is a sum of times, so that whatever waits
long enough is overtaken by nothing: nobody starves."""

from collections.abc import Hashable
from dataclasses import dataclass

from parrot.serve.scheduler.task import CompletionTask
from parrot.utils.clock import Clock

_LATENCY_LEAD_S = 10.0  # a latency task goes before throughput tasks that came so much earlier
_MAX_PATH_LEAD_S = 60.0
_AGING = 0.1  # seconds of seniority that an app loses per predicted second of its work
_BURST_GAP_S = 10.0  # an app that wanted nothing for so long starts again as a new one


class Arrival:
    """Within an app: first come, first served, but latency before throughput."""

    def task_key(self, task: CompletionTask) -> float:
        return task.arrived - (_LATENCY_LEAD_S if task.is_latency else 0.0)


class CriticalPath(Arrival):
    """Within an app: besides, those with the longest remaining path below them first."""

    def task_key(self, task: CompletionTask) -> float:
        return super().task_key(task) - min(task.remaining_path_s, _MAX_PATH_LEAD_S)


class NoApps:
    """All tasks are one app's: only the order within an app matters."""

    def __init__(self, inner: Arrival) -> None:
        self.task_key = inner.task_key

    def app(self, task: CompletionTask) -> Hashable:
        return None

    def app_key(self, app: Hashable) -> float:
        return 0.0

    def priority_s(self, task: CompletionTask) -> float:
        """The task's place in an engine's queue."""
        return self.task_key(task)

    def arrived(self, task: CompletionTask) -> None: ...

    def placed(self, task: CompletionTask, work_s: float) -> None: ...

    def ended(self, task: CompletionTask) -> None: ...

    def forget(self, session_id: int) -> None: ...


@dataclass(slots=True)
class _App:
    start: float
    attained_s: float = 0.0
    num_tasks: int = 0
    last_active: float = 0.0
    is_forgotten: bool = False


class AppFifo(NoApps):
    """Older sessions first: many half-done applications help nobody. An app's seniority is when its
    present burst of demand began, and wears off with the work it got. Its latency tasks and its
    throughput tasks are ordered apart, the first with a lead, also over other apps."""

    def __init__(self, inner: Arrival, clock: Clock) -> None:
        super().__init__(inner)
        self._clock = clock
        self._apps: dict[int, _App] = {}

    def app(self, task: CompletionTask) -> Hashable:
        return (task.completion.session_id, task.is_latency)

    def app_key(self, app: Hashable) -> float:
        assert isinstance(app, tuple)
        session_id, is_latency = app
        account = self._apps[session_id]
        lead = _LATENCY_LEAD_S if is_latency else 0.0
        return account.start + _AGING * account.attained_s - lead

    def priority_s(self, task: CompletionTask) -> float:
        return self.app_key(self.app(task))

    def arrived(self, task: CompletionTask) -> None:
        now = self._clock.now()
        account = self._apps.get(task.completion.session_id)
        if account is None or (not account.num_tasks and now - account.last_active > _BURST_GAP_S):
            account = self._apps[task.completion.session_id] = _App(start=now)
        account.num_tasks += 1

    def placed(self, task: CompletionTask, work_s: float) -> None:
        self._apps[task.completion.session_id].attained_s += work_s

    def ended(self, task: CompletionTask) -> None:
        account = self._apps[task.completion.session_id]
        account.num_tasks -= 1
        account.last_active = self._clock.now()
        if account.is_forgotten and not account.num_tasks:
            del self._apps[task.completion.session_id]

    def forget(self, session_id: int) -> None:
        """The session has ended: its account goes with its last task."""
        account = self._apps.get(session_id)
        if account is not None:
            account.is_forgotten = True
            if not account.num_tasks:
                del self._apps[session_id]
