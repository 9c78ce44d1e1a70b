"""Whether a call should wait although there is a place for it."""

from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from parrot.serve.scheduling.task import CompletionTask


def should_wait(num_ahead: int, num_apps: float, added_s: float, step_s: float) -> bool:
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
    change when `changed` says so, and at any time if the task has a deadline."""

    def __init__(self, key: Callable[[CompletionTask], float]) -> None:
        self._key = key
        self._engines: defaultdict[int, _Engine] = defaultdict(_Engine)
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

    def changed(self, session_id: int) -> None:
        for engine_id in self._engines_of.get(session_id, ()):
            self._engines[engine_id].stale.add(session_id)

    def ahead(self, task: CompletionTask, engine_id: int) -> tuple[int, int]:
        """The number of other applications on the engine that go before the task's, and of all
        others there."""
        engine = self._engines.get(engine_id)
        if engine is None:
            return 0, 0
        engine.refresh(self._key)
        key = self._key(task)
        own = engine.keys.get(task.completion.session_id)
        num_before = bisect_right(engine.ordered, key) - (own is not None and own <= key)
        return num_before, len(engine.keys) - (own is not None)


@dataclass(slots=True)
class _Engine:
    """`tasks`: by session, the last placed last. `keys`: by session, and `ordered`, as they were
    when they were last looked at. `stale`: sessions whose key may be another now."""

    tasks: dict[int, dict[CompletionTask, None]] = field(default_factory=dict)
    keys: dict[int, float] = field(default_factory=dict)
    ordered: list[float] = field(default_factory=list)
    stale: set[int] = field(default_factory=set)

    def refresh(self, key: Callable[[CompletionTask], float]) -> None:
        timed = set()
        for session_id in self.stale:
            self._drop_key(session_id)
            task = next(reversed(self.tasks[session_id]))
            insort(self.ordered, self.keys.setdefault(session_id, key(task)))
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
            del self.ordered[bisect_left(self.ordered, key)]
