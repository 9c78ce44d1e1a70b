"""All engines' loads, and for each model its engines in order of load."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot.serve.scheduling.engine_load import EngineLoad
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap

Models = tuple[str, ...]
"""The models of which a task may run on any; empty: on all."""

_ANY_MODEL = ""


@dataclass(slots=True)
class _Pool:
    """The engines of one model. `open` has those with a free slot, the least loaded first."""

    members: dict[int, EngineLoad] = field(default_factory=dict)
    open: LazyHeap[int, tuple[float, ...]] = field(default_factory=LazyHeap)
    max_len: int = 0
    step_s: float = 0.0  # of all members, summed up


class LoadIndex:
    """Finds engines by id, by model, and by load. Owns the loads."""

    def __init__(self) -> None:
        self._loads: dict[int, EngineLoad] = {}
        self._pools: dict[str, _Pool] = {}
        self._step_s: dict[int, float] = {}  # of each engine, as it was counted

    def __iter__(self) -> Iterator[EngineLoad]:
        return iter(self._loads.values())

    def get(self, engine_id: int) -> EngineLoad | None:
        return self._loads.get(engine_id)

    def add(self, load: EngineLoad) -> None:
        self._loads[load.id] = load
        self._step_s[load.id] = 0.0
        for name in (_ANY_MODEL, load.model):
            pool = self._pools.setdefault(name, _Pool())
            pool.members[load.id] = load
            pool.max_len = max(pool.max_len, load.max_len)
        self.changed(load)

    def remove(self, engine_id: int) -> EngineLoad:
        load = self._loads.pop(engine_id)
        del self._step_s[engine_id]
        for name in (_ANY_MODEL, load.model):
            pool = self._pools[name]
            del pool.members[engine_id]
            pool.open.discard(engine_id)
            pool.max_len = max([other.max_len for other in pool.members.values()], default=0)
            pool.step_s = sum([other.step_s for other in pool.members.values()])
            if not pool.members:
                del self._pools[name]
        return load

    def changed(self, load: EngineLoad) -> None:
        """Note that an engine's load or costs have changed."""
        key, step_s = (load.rank, load.id), load.step_s
        added_s, self._step_s[load.id] = step_s - self._step_s[load.id], step_s
        for name in (_ANY_MODEL, load.model):
            pool = self._pools[name]
            pool.step_s += added_s
            if load.is_open:
                pool.open.set(load.id, key)
            else:
                pool.open.discard(load.id)

    def members(self, models: Models) -> Iterator[EngineLoad]:
        """The engines with one of the models, in the order in which they came."""
        for pool in self._of(models):
            yield from pool.members.values()

    def is_served(self, models: Models) -> bool:
        return bool(self._of(models))

    def num_members(self, models: Models) -> int:
        return sum([len(pool.members) for pool in self._of(models)])

    def num_open(self, models: Models) -> int:
        """Number of engines with one of the models that have a free slot."""
        return sum([len(pool.open) for pool in self._of(models)])

    def max_len(self, models: Models) -> int:
        """Tokens of the longest sequence that an engine with one of the models takes."""
        return max([pool.max_len for pool in self._of(models)], default=0)

    def mean_step_s(self, models: Models) -> float:
        """Average seconds of a step of the engines with one of the models; zero without any."""
        pools = self._of(models)
        num_members = sum([len(pool.members) for pool in pools])
        return sum([pool.step_s for pool in pools]) / num_members if num_members else 0.0

    def takes(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether the task's prompt and output are within the engine's limit on sequences; if they
        are beyond all limits, whether no engine has a larger one."""
        return load.max_len >= task.wanted_len or load.max_len >= self.max_len(task.models)

    def least_loaded(self, task: CompletionTask, count: int) -> list[EngineLoad]:
        """Up to `count` open engines for each of the task's models that take sequences as long as
        it, the least loaded, in no particular order."""
        found: list[EngineLoad] = []
        for pool in self._of(task.models):
            wanted, num_open = count, len(pool.open)
            while True:
                ids = list(pool.open) if num_open <= wanted else pool.open.smallest(wanted)
                fitting = [i for i in ids if self.takes(pool.members[i], task)]
                if len(fitting) >= count or num_open <= wanted:
                    break
                wanted *= 2
            found += [pool.members[i] for i in fitting[:count]]
        return found

    def _of(self, models: Models) -> list[_Pool]:
        names = models or (_ANY_MODEL,)
        return [self._pools[name] for name in names if name in self._pools]
