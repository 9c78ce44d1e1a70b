"""Placement policies: which engine a task runs on. Each is turned off by leaving it out."""

from collections.abc import Iterable

from parrot.serve.context_index import PrefixIndex
from parrot.serve.scheduler.cost import EngineLoad, RunningPrefixes
from parrot.serve.scheduler.task import CompletionTask

_MAX_HOLDERS = 8  # engines proposed per policy; a warm prefix may be on all of them
_GROUP_PULL = 0.25  # of the task's own decode time: what being with its group is worth
_HARM_WEIGHT = 10.0  # how much worse a second is for a waiting reader than for throughput work
_LATENCY_STEP_GROWTH = 2.0  # a decode step of an engine with latency tasks may grow so much


class PlacementPolicy:
    """What a policy may say about a task; by default nothing. The scheduler considers the
    candidates of all policies and the least loaded engines, leaves out those that one does not
    admit, and takes the least sum of predicted seconds: with the most tokens that any policy
    counts on reusing, plus every policy's extra."""

    def candidates(self, task: CompletionTask) -> Iterable[int]:
        """Engines worth considering, of any model."""
        return ()

    def reused_len(self, task: CompletionTask, engine: EngineLoad) -> int:
        """Prompt tokens that the engine would not have to compute."""
        return 0

    def admits(self, task: CompletionTask, engine: EngineLoad) -> bool:
        return True

    def extra_s(self, task: CompletionTask, engine: EngineLoad, output: int) -> float:
        """Predicted seconds on top of the task's own time; negative for an advantage."""
        return 0.0

    def placed(self, task: CompletionTask, engine_id: int) -> None: ...

    def ended(self, task: CompletionTask, engine_id: int) -> None: ...


class ContextAware(PlacementPolicy):
    """Prefixes that are in the ledger, whether or not a task uses them now."""

    def __init__(self, index: PrefixIndex) -> None:
        self._index = index

    def candidates(self, task: CompletionTask) -> Iterable[int]:
        return self._index.holders(task.keys, _MAX_HOLDERS)

    def reused_len(self, task: CompletionTask, engine: EngineLoad) -> int:
        match = self._index.match(engine.id, task.keys)
        return 0 if match is None else min(match.boundary.length, task.prompt_len)


class ContextGroup(PlacementPolicy):
    """Prefixes of tasks that were placed, even if no context of them exists yet."""

    def __init__(self, running: RunningPrefixes) -> None:
        self._running = running

    def candidates(self, task: CompletionTask) -> Iterable[int]:
        return self._running.holders(task.keys, _MAX_HOLDERS)

    def reused_len(self, task: CompletionTask, engine: EngineLoad) -> int:
        return self._running.shared_len(task, engine.id)


class GraphGroup(PlacementPolicy):
    """Task groups together: they share a batch, and leave the other engines to others. The pull is
    weaker than a real difference in load, so a group that does not fit is split."""

    def __init__(self) -> None:
        self._running: dict[tuple[int, str], dict[int, int]] = {}

    def candidates(self, task: CompletionTask) -> Iterable[int]:
        return () if task.group is None else tuple(self._running.get(task.group, ()))[:_MAX_HOLDERS]

    def extra_s(self, task: CompletionTask, engine: EngineLoad, output: int) -> float:
        if task.group is None or engine.id not in self._running.get(task.group, ()):
            return 0.0
        return -_GROUP_PULL * output * engine.cost.step_s

    def placed(self, task: CompletionTask, engine_id: int) -> None:
        if task.group is not None:
            engines = self._running.setdefault(task.group, {})
            engines[engine_id] = engines.get(engine_id, 0) + 1

    def ended(self, task: CompletionTask, engine_id: int) -> None:
        if task.group is not None:
            engines = self._running[task.group]
            engines[engine_id] -= 1
            if not engines[engine_id]:
                del engines[engine_id]
                if not engines:
                    del self._running[task.group]


class LatencyBound(PlacementPolicy):
    """Latency tasks bound the batch of the engine they sit on. What a newcomer takes from each of
    them counts as its own cost, and throughput work has to go far out of its way to avoid that."""

    def admits(self, task: CompletionTask, engine: EngineLoad) -> bool:
        if task.is_latency or not engine.num_latency:
            return True
        tokens = engine.num_tokens + task.prompt_len
        step_s = engine.cost.decode_step_s(engine.num_tasks + 1, tokens)
        return step_s <= _LATENCY_STEP_GROWTH * engine.cost.step_s

    def extra_s(self, task: CompletionTask, engine: EngineLoad, output: int) -> float:
        growth_s = engine.cost.decode_step_s(1, task.prompt_len) - engine.cost.step_s
        prefill_s = task.prompt_len * engine.cost.prefill_s
        weight = 1.0 if task.is_latency else _HARM_WEIGHT
        return weight * engine.num_latency * (output * growth_s + prefill_s)
