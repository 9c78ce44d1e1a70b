"""All engines' loads, and for each model its engines in order of load."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import floor, log2

from parrot.protocol.engine_api import ServerLoad, StepCosts
from parrot.serve.scheduling.engine_load import IDLE, EngineLoad
from parrot.serve.scheduling.predictor import Pace
from parrot.serve.scheduling.task import CompletionTask
from parrot.utils.heaps import LazyHeap

Models = tuple[str, ...]
"""The models of which a task may run on any; empty: on all."""

Features = frozenset[str] | None
"""The abilities of an engine, see `Capabilities`; None if that is not known."""

_ANY_MODEL = ""
_USUAL_COSTS = StepCosts()
_GRADES = 4  # of idle engines' speeds up to twice the speed: no two measure quite the same
_MAX_ALIKE = 63  # engines among whose costs the one in the middle is looked for


@dataclass(slots=True)
class _Pool:
    """The engines of one model. `open` has those with a free slot, the least loaded first, and
    `full` the others. Idle ones about as fast take turns: who thinks there makes no load, and the
    same few would get everybody. `max_lens` has the longest sequence that one with these features
    takes, and `num_alike` how many members have the same features and take the same."""

    members: dict[int, EngineLoad] = field(default_factory=dict)
    open: LazyHeap[int, float] = field(default_factory=LazyHeap)
    full: LazyHeap[int, float] = field(default_factory=LazyHeap)
    max_lens: dict[Features, int] = field(default_factory=dict)
    num_alike: Counter[tuple[Features, int]] = field(default_factory=Counter)
    step_s: float = 0.0  # of all members, summed up

    def count(self, load: EngineLoad, sign: int) -> None:
        """A member comes, or goes. It takes no longer where there are thousands."""
        key = load.features, load.max_len
        self.num_alike[key] += sign
        if not self.num_alike[key]:
            del self.num_alike[key]
        self.max_lens.clear()
        for features, max_len in self.num_alike:
            self.max_lens[features] = max(self.max_lens.get(features, 0), max_len)


class LoadIndex:
    """Finds engines by id, by model, and by load. Owns the loads, and what steps cost. An engine
    that drains is found by its id alone."""

    def __init__(self) -> None:
        self._loads: dict[int, EngineLoad] = {}
        self._pools: dict[str, _Pool] = {}
        self._step_s: dict[int, float] = {}  # of each engine, as it was counted
        self._costs: dict[str, StepCosts] = {}  # by model, as an engine of it reported last
        self._measured: dict[tuple[str, str], dict[int, StepCosts]] = {}  # by model and device

    def __iter__(self) -> Iterator[EngineLoad]:
        return iter(self._loads.values())

    def add(
        self,
        engine_id: int,
        model: str,
        max_tasks: int,
        max_tokens: int,
        max_len: int | None = None,
        costs: StepCosts | None = None,
    ) -> None:
        """`max_len`: tokens of the longest sequence that it takes; None: as many as it holds. An
        engine that does not say what its steps cost is taken to be like others of its model, of
        the same device if there are some, until it does."""
        longest = max_tokens if max_len is None else min(max_len, max_tokens)
        load = EngineLoad(engine_id, model, max_tasks, max_tokens, longest, _USUAL_COSTS)
        load.costs = self._take_costs(load, costs)
        self._loads[load.id] = load
        self._enter_pools(load)

    def reported(
        self,
        engine_id: int,
        costs: StepCosts | None = None,
        features: Features = None,
        server: ServerLoad | None = None,
        device: str = "",
    ) -> None:
        """Take over what an engine says that its steps cost, that it can do, that the server
        behind it does, and what runs its model."""
        load = self._loads[engine_id]
        if load.device != device:
            known = self._forget_costs(load)
            load.device, costs = device, costs or known
        if features is not None and load.features != features:
            for pool in self._pools_of(load):
                pool.count(load, -1)
            load.features = features
            for pool in self._pools_of(load):
                pool.count(load, 1)
        costs, server = self._take_costs(load, costs), server or IDLE
        if (load.costs, load.server) != (costs, server):
            load.reported(costs, server)
            self.changed(load)

    def remove(self, engine_id: int) -> None:
        """Its tasks must have been ended or requeued."""
        load = self._loads.pop(engine_id)
        assert not load.tasks, load
        self._forget_costs(load)
        if not load.is_draining:
            self._leave_pools(load)

    def set_draining(self, load: EngineLoad, is_draining: bool) -> None:
        """Give it no more tasks; those that it has go on. Or give it tasks again."""
        if is_draining and not load.is_draining:
            self._leave_pools(load)
        was_draining, load.is_draining = load.is_draining, is_draining
        if was_draining and not is_draining:
            self._enter_pools(load)

    def _take_costs(self, load: EngineLoad, costs: StepCosts | None) -> StepCosts:
        """Note what the engine measured, if it has; returns what its steps are taken to cost."""
        own = self._measured.get((load.model, load.device), {})
        if costs is None:
            return own.get(load.id) or self._costs_of_alike(load, own)
        if own.get(load.id) != costs:
            self._measured.setdefault((load.model, load.device), own)[load.id] = costs
            self._costs[load.model] = costs
        return costs

    def _costs_of_alike(self, load: EngineLoad, alike: dict[int, StepCosts]) -> StepCosts:
        """Those of the engine in the middle: a mean would be of numbers that never were together,
        and follow one that is out of order."""
        if not alike:
            return self._costs.get(load.model, _USUAL_COSTS)
        costs = sorted(islice(alike.values(), _MAX_ALIKE), key=lambda c: c.decode_step_s(1, 0))
        return costs[(len(costs) - 1) // 2]

    def _forget_costs(self, load: EngineLoad) -> StepCosts | None:
        """Returns what the engine had measured."""
        key = load.model, load.device
        own = self._measured.get(key, {})
        costs = own.pop(load.id, None)
        if not own:
            self._measured.pop(key, None)
        return costs

    def _enter_pools(self, load: EngineLoad) -> None:
        self._step_s[load.id] = 0.0
        for name in (_ANY_MODEL, load.model):
            pool = self._pools.setdefault(name, _Pool())
            pool.members[load.id] = load
            pool.count(load, 1)
        self.changed(load)

    def _leave_pools(self, load: EngineLoad) -> None:
        step_s = self._step_s.pop(load.id)
        for name in (_ANY_MODEL, load.model):
            pool = self._pools[name]
            del pool.members[load.id]
            pool.open.discard(load.id)
            pool.full.discard(load.id)
            pool.count(load, -1)
            pool.step_s -= step_s
            if not pool.members:
                del self._pools[name]

    def _pools_of(self, load: EngineLoad) -> list[_Pool]:
        return [] if load.is_draining else [self._pools[name] for name in (_ANY_MODEL, load.model)]

    def changed(self, load: EngineLoad) -> None:
        """Note that an engine's load or costs have changed."""
        if load.is_draining:
            return
        step_s, is_open = load.step_s, load.is_open
        key = load.rank(step_s) if load.num_tasks else _grade(step_s)
        added_s, self._step_s[load.id] = step_s - self._step_s[load.id], step_s
        for pool in (self._pools[_ANY_MODEL], self._pools[load.model]):
            pool.step_s += added_s
            here, elsewhere = (pool.open, pool.full) if is_open else (pool.full, pool.open)
            here.set(load.id, key)
            elsewhere.discard(load.id)

    # One engine

    def get(self, engine_id: int) -> EngineLoad | None:
        return self._loads.get(engine_id)

    def num_placed(self, engine_id: int) -> int:
        load = self._loads.get(engine_id)
        return 0 if load is None else load.num_tasks

    # Those with one of some models

    def members(self, models: Models) -> Iterator[EngineLoad]:
        """Yield the engines in the order in which they came."""
        for pool in self._of(models):
            yield from pool.members.values()

    def num_members(self, models: Models) -> int:
        return sum([len(pool.members) for pool in self._of(models)])

    def num_open(self, models: Models) -> int:
        """Number of engines that have a free slot."""
        return sum([len(pool.open) for pool in self._of(models)])

    def pace(self, models: Models) -> Pace:
        """Average speed of the engines as they are loaded now."""
        known = [self._costs[model] for model in models or self._costs if model in self._costs]
        costs = known[0] if known else _USUAL_COSTS
        alone_s = costs.decode_step_s(1, 0)
        num_members = self.num_members(models)
        steps_s = sum([pool.step_s for pool in self._of(models)])
        return Pace(costs.prefill_s, steps_s / num_members if num_members else alone_s, alone_s)

    def lacking(self, task: CompletionTask) -> frozenset[str]:
        """The needs of the task that the engine which meets most of them does not. Empty if some
        engine may meet all, or there is none."""
        known = [features for pool in self._of(task.models) for features in pool.max_lens]
        lacking = [frozenset() if f is None else task.needs - f for f in known]
        return min(lacking, key=len, default=frozenset())

    def takes_longest(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether none of the engines that can do what the task needs takes longer sequences than
        this one."""
        return load.max_len >= max(self._able(task).values(), default=0)

    def takes(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether it may get the task as soon as it has room: it has one of the task's models and
        does not drain; and it can do what the task needs, and takes sequences as long as its prompt
        and output, or no other can and does so."""
        if load.is_draining or (task.models and load.model not in task.models):
            return False
        features = load.features
        if features is not None and task.needs <= features and load.max_len >= task.wanted_len:
            return True  # as nearly always
        able = self._able(task)
        longest = max(able.values(), default=0)
        return features in able and load.max_len >= min(task.wanted_len, longest)

    def _able(self, task: CompletionTask) -> dict[Features, int]:
        """The longest sequences that are taken with each of the features that the task needs: known
        ones, else unknown ones, else any."""
        grades: list[dict[Features, int]] = [{}, {}, {}]
        for pool in self._of(task.models):
            for features, max_len in pool.max_lens.items():
                grade = 1 if features is None else 0 if task.needs <= features else 2
                grades[grade][features] = max(grades[grade].get(features, 0), max_len)
        return grades[0] or grades[1] or grades[2]

    def least_loaded(
        self, task: CompletionTask, count: int, *, full: bool = False
    ) -> list[EngineLoad]:
        """Up to `count` open engines, or `full` ones, for each of the task's models that take it,
        the least loaded, in no particular order."""
        found: list[EngineLoad] = []
        for pool in self._of(task.models):
            engines = pool.full if full else pool.open
            wanted, num_all = count, len(engines)
            while True:
                ids = list(engines) if num_all <= wanted else engines.smallest(wanted)
                fitting = [i for i in ids if self.takes(pool.members[i], task)]
                if len(fitting) >= count or num_all <= wanted:
                    break
                wanted *= 2
            found += [pool.members[i] for i in fitting[:count]]
        return found

    def _of(self, models: Models) -> list[_Pool]:
        if not models:
            pool = self._pools.get(_ANY_MODEL)
            return [] if pool is None else [pool]
        return [self._pools[name] for name in models if name in self._pools]


def _grade(step_s: float) -> float:
    """The least that an idle engine's step may take of those in the same grade."""
    return float(2.0 ** (floor(_GRADES * log2(step_s)) / _GRADES))
