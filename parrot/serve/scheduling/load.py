"""The load of one engine, and what a newcomer would find there: now, and usually."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from math import exp, floor, isclose, log2
from typing import NamedTuple, Protocol

from parrot.protocol.engine_api import ServerLoad, StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.scheduling.prefixes import RunningPrefixes
from parrot.serve.scheduling.task import CompletionTask, Pace
from parrot.utils.heaps import LazyHeap

_LATENCY_WEIGHT = 10.0  # how much worse a second is for whoever waits than for throughput work;
_TYPICAL_OUTPUT = 300  # who reads along judges by the time per token: it is that for so many,
_MIN_OUTPUT, _MAX_OUTPUT = 150, 1024  # and more for fewer, within bounds
_TYPICAL_TOKENS = 500  # of a task's own, to compare what a newcomer costs on each engine
_LOAD_WINDOW_S = 10.0  # an engine's load counts for so long as usual there
_TYPICAL_BATCH = 64  # sequences of a step, among which what every step costs is divided
_MAX_PREFILL_SHARE = 0.8  # of the time: prompts that are given faster wait, and are not computed


def latency_weight(task: CompletionTask) -> float:
    """The weight of a second that the task loses; 1.0 for throughput work."""
    if not task.is_latency:
        return 1.0
    objective = task.objective
    paced = objective is not None and objective.criteria is PerformanceCriteria.TPOT
    if not (paced or task.wants_stream):
        return _LATENCY_WEIGHT
    output = min(max(task.expected_output, _MIN_OUTPUT), _MAX_OUTPUT)
    return _LATENCY_WEIGHT * _TYPICAL_OUTPUT / output


IDLE = ServerLoad()


class Outlook(NamedTuple):
    """A newcomer's view of an engine: the wait for the prompts there, the steps of the tasks there,
    which go on for `remaining_s` on average by weight, and the engine's usual steps after that."""

    wait_s: float
    step_s: float
    remaining_s: float
    weight: float
    usual_step_s: float
    usual_weight: float

    def steps_s(self, num_steps: float) -> float:
        """Predicted seconds for `num_steps` steps."""
        if num_steps * self.step_s <= self.remaining_s:
            return num_steps * self.step_s
        num_usual = num_steps - self.remaining_s / self.step_s
        return self.remaining_s + num_usual * self.usual_step_s

    def harm_s(self, prefill_s: float, num_steps: float, growth_s: float) -> float:
        """Weighted seconds that others lose to a newcomer: those who are there wait for its prompt,
        and the steps of whoever is there take `growth_s` longer while it lasts."""
        remaining_s = self.remaining_s
        steps = min(num_steps, remaining_s / self.step_s) if remaining_s else 0.0
        harm_s = self.weight * (min(prefill_s, remaining_s) + steps * growth_s)
        return harm_s + self.usual_weight * (num_steps - steps) * growth_s


def service_s(costs: StepCosts, num_computed: int, num_read: int, num_output: int) -> float:
    """Seconds of an engine that a call takes: `num_computed` tokens of its prompt, and `num_output`
    tokens, each of which reads `num_read` of the prompt's and the output before it."""
    read_s = (num_read + num_output / 2) * costs.token_s
    token_s = costs.step_s / _TYPICAL_BATCH + costs.sequence_s + read_s
    return num_computed * costs.prefill_s + num_output * token_s


class Charge(NamedTuple):
    """A placed task's part of its engine's load, and the service that it is predicted to take."""

    weight: float  # what a second is worth to it
    begin: float  # when it was placed,
    end: float  # and when it is predicted to end, behind the prompts there
    duration_s: float  # the predicted seconds without waiting
    num_tokens: int  # of its prompt, without what other running prompts have, and of its room
    num_read: int  # of these, the prompt's
    costs: StepCosts  # of the engine then
    service_s: float

    def actual_s(self, task: CompletionTask, now: float) -> float:
        """The service that the task has had, now that it ends: by the tokens that its engine
        counted, or, if it was stopped, the part of its prediction for which it ran."""
        if task.used is not None:
            num_computed, num_output = task.used
            return service_s(self.costs, num_computed, self.num_read, num_output)
        if now - self.begin < self.duration_s:
            return self.service_s * (now - self.begin) / self.duration_s
        return self.service_s


class PlacementListener(Protocol):
    """An index of the tasks that are placed on engines. See `LoadIndex.listeners`."""

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None: ...

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None:
        """The task is no longer on the engine. It took `actual_s` of service there."""


@dataclass(slots=True)
class EngineLoad:
    """The tasks that were placed on an engine and have not ended.

    `num_tokens` counts their prompts (shared beginnings once) and the room for their outputs, and
    `num_read` those that a decode step reads. `weight` sums what a second is worth to each task,
    `weighted_end` that times the predicted time of its end. `prefill_until` is the time at which
    the prompts will have been computed. What is usual are averages over time up to `since`, in
    which older values than `_LOAD_WINDOW_S` count little; `usual_prefill` is the share of the
    time that prompts take. `server`: what a server behind the engine does. Others of its clients
    lengthen its steps, and a newcomer comes behind all who wait there. `device`: what runs the
    model; empty: not known."""

    index: "LoadIndex" = field(repr=False, compare=False)
    id: int
    model: str
    max_tasks: int
    max_tokens: int
    max_len: int  # tokens of the longest sequence that the engine takes
    costs: StepCosts
    features: frozenset[str] | None = None  # what it can do; None: not known
    is_draining: bool = False  # it gets no more tasks
    server: ServerLoad = IDLE
    device: str = ""
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0
    num_read: int = 0
    weight: float = 0.0
    weighted_end: float = 0.0
    prefill_until: float = 0.0
    tasks: dict[CompletionTask, Charge] = field(default_factory=dict)
    since: float = 0.0
    usual_tasks: float = 0.0
    usual_read: float = 0.0
    usual_weight: float = 0.0
    usual_prefill: float = 0.0
    _outlook: Outlook | None = None  # cached while the time and the load are unchanged

    @property
    def is_open(self) -> bool:
        return self.num_tasks < self.max_tasks and not self.is_draining

    @property
    def step_s(self) -> float:
        server = self.server
        num_sequences = self.num_tasks + server.num_others
        return self.costs.decode_step_s(num_sequences, self.num_read + server.other_tokens)

    @property
    def _queue_s(self) -> float:
        """Seconds until all who wait at the server have begun, in the places of those who run."""
        server = self.server
        if not server.num_waiting:
            return 0.0
        num_turns = server.num_waiting / max(1, server.num_running)
        return num_turns * _TYPICAL_OUTPUT * self.step_s

    def rank(self, step_s: float) -> float:
        """Weighted seconds that a step, which takes `step_s`, costs a typical newcomer and the
        others there."""
        newcomer_s = self.costs.sequence_s + _TYPICAL_TOKENS * self.costs.token_s
        return step_s + self.weight * newcomer_s

    def runs_session(self, session_id: int) -> bool:
        """Whether the engine has a call of this session now."""
        return any(task.completion.session_id == session_id for task in self.tasks)

    def reported(self, costs: StepCosts, server: ServerLoad) -> None:
        self.costs, self.server = costs, server
        self._outlook = None

    def reserved_output(self, task: CompletionTask) -> int:
        """Tokens that are kept for the task's output."""
        return min(task.max_output, self.max_tokens)

    def fits(self, task: CompletionTask, new_prompt: int) -> bool:
        """Whether its memory holds the task, of whose prompt `new_prompt` tokens are in no running
        one. An idle engine accepts any task: no other engine has more room."""
        if not self.num_tasks:
            return True
        return self.num_tokens + new_prompt + self.reserved_output(task) <= self.max_tokens

    def outlook(self, now: float) -> Outlook:
        if self._outlook is None or self.since != now:
            self._advance(now)
            remaining_s = max(0.0, self.weighted_end / self.weight - now) if self.num_tasks else 0.0
            usual_step_s = self.costs.decode_step_s(self.usual_tasks, self.usual_read)
            # Prompts that are computed meanwhile lengthen steps.
            usual_step_s *= 1.0 / (1.0 - min(self.usual_prefill, _MAX_PREFILL_SHARE))
            self._outlook = Outlook(
                max(0.0, self.prefill_until - now) + self._queue_s,
                self.step_s,
                remaining_s,
                self.weight,
                usual_step_s,
                self.usual_weight,
            )
        return self._outlook

    def place(self, task: CompletionTask, to_compute: int, now: float) -> None:
        """Charge this engine for the task, of whose prompt `to_compute` tokens are in no cache, and
        update the indexes of placed tasks."""
        self._advance(now)
        new_prompt = self.index.running.add(task, self.id)
        self._book(task, new_prompt, 1)
        prefill_s = to_compute * self.costs.prefill_s
        self.prefill_until = max(self.prefill_until, now) + prefill_s
        decode_s = task.expected_output * self.step_s
        weight, end = latency_weight(task), self.prefill_until + decode_s
        self.weight += weight
        self.weighted_end += weight * end
        charge = self.tasks[task] = Charge(
            weight,
            begin=now,
            end=end,
            duration_s=prefill_s + decode_s,
            num_tokens=new_prompt + self.reserved_output(task),
            num_read=new_prompt,
            costs=self.costs,
            service_s=service_s(self.costs, to_compute, new_prompt, task.expected_output),
        )
        self.index.changed(self)
        for listener in self.index.listeners:
            listener.placed(task, self.id, charge)

    def release(self, task: CompletionTask, now: float) -> None:
        """Take back the task's charge, add the service that it took to the task, and update the
        indexes of placed tasks."""
        self._advance(now)
        self._book(task, self.index.running.remove(task, self.id), -1)
        charge = self.tasks.pop(task)
        self.weight -= charge.weight
        self.weighted_end -= charge.weight * charge.end
        if not self.tasks:
            self.weight = self.weighted_end = 0.0  # exactly, whatever was rounded
            self.prefill_until = 0.0
        actual_s = charge.actual_s(task, now)
        task.service_s += actual_s
        self.index.changed(self)
        for listener in self.index.listeners:
            listener.released(task, self.id, charge, actual_s)

    def check_integrity(self, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompts here, shared beginnings once."""
        tasks, charges = self.tasks, self.tasks.values()
        assert self.num_tasks == len(tasks), self.id
        assert self.num_latency == sum(task.is_latency for task in tasks), self.id
        assert self.num_tokens == num_prompt + sum(map(self.reserved_output, tasks)), self.id
        assert self.num_read == num_prompt + sum(t.expected_output // 2 for t in tasks), self.id
        assert isclose(self.weight, sum(c.weight for c in charges), abs_tol=1e-6), self.id
        weighted_end = sum(c.weight * c.end for c in charges)
        assert isclose(self.weighted_end, weighted_end, rel_tol=1e-6, abs_tol=1e-6), self.id

    def _book(self, task: CompletionTask, prompt: int, sign: int) -> None:
        self.num_tasks += sign
        self.num_latency += sign * task.is_latency
        self.num_tokens += sign * (prompt + self.reserved_output(task))
        self.num_read += sign * (prompt + task.expected_output // 2)

    def _advance(self, now: float) -> None:
        """Take in that the load was as it is since the last call. It will be another, or is looked
        at anew."""
        self._outlook = None
        if now == self.since:
            return
        old = exp((self.since - now) / _LOAD_WINDOW_S)
        new = 1.0 - old
        server = self.server
        self.usual_tasks = old * self.usual_tasks + new * (self.num_tasks + server.num_others)
        self.usual_read = old * self.usual_read + new * (self.num_read + server.other_tokens)
        self.usual_weight = old * self.usual_weight + new * self.weight
        self.usual_prefill *= old
        if self.prefill_until >= now:
            self.usual_prefill += new
        elif self.prefill_until > self.since:
            self.usual_prefill += exp((self.prefill_until - now) / _LOAD_WINDOW_S) - old
        self.since = now


Models = tuple[str, ...]
"""The models of which a task may run on any; empty: on all."""

Weigh = Callable[[str], float]
"""The weight of a tenant: of two that wait all the time, one with twice the weight gets twice as
much."""

Features = frozenset[str] | None
"""The abilities of an engine, see `Capabilities`; None if that is not known."""

_ANY_MODEL = ""
_USUAL_COSTS = StepCosts()
_CLASSES_PER_DOUBLING = (
    4  # of idle engines' speeds up to twice the speed: no two measure quite the same
)
_MAX_MEDIAN_ENGINES = 63  # engines among whose costs the one in the middle is looked for


@dataclass(slots=True)
class _Pool:
    """The engines of one model. `open` has those with a free slot, the least loaded first, and
    `full` the others. Idle ones about as fast take turns: who thinks there makes no load, and the
    same few would get everybody. `max_lens` has the longest sequence that one with these features
    takes, and `num_similar` how many members have the same features and take the same."""

    members: dict[int, EngineLoad] = field(default_factory=dict)
    open: LazyHeap[int, float] = field(default_factory=LazyHeap)
    full: LazyHeap[int, float] = field(default_factory=LazyHeap)
    max_lens: dict[Features, int] = field(default_factory=dict)
    num_similar: Counter[tuple[Features, int]] = field(default_factory=Counter)
    step_s: float = 0.0  # of all members, summed up

    def count(self, load: EngineLoad, sign: int) -> None:
        """A member comes, or goes. It takes no longer where there are thousands."""
        key = load.features, load.max_len
        self.num_similar[key] += sign
        if not self.num_similar[key]:
            del self.num_similar[key]
        self.max_lens.clear()
        for features, max_len in self.num_similar:
            self.max_lens[features] = max(self.max_lens.get(features, 0), max_len)


class LoadIndex:
    """Finds engines by id, by model, and by load. Owns the loads, and what steps cost. An engine
    that drains is found by its id alone. `running`: the prompts of placed tasks. `listeners`:
    other indexes of placed tasks, which every load updates."""

    def __init__(self) -> None:
        self.running = RunningPrefixes()
        self.listeners: list[PlacementListener] = []
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
        load = EngineLoad(self, engine_id, model, max_tasks, max_tokens, longest, _USUAL_COSTS)
        load.costs = self._record_costs(load, costs)
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
            known = self._drop_costs(load)
            load.device, costs = device, costs or known
        if features is not None and load.features != features:
            for pool in self._pools_of(load):
                pool.count(load, -1)
            load.features = features
            for pool in self._pools_of(load):
                pool.count(load, 1)
        costs, server = self._record_costs(load, costs), server or IDLE
        if (load.costs, load.server) != (costs, server):
            load.reported(costs, server)
            self.changed(load)

    def remove(self, engine_id: int) -> None:
        """Its tasks must have been ended or requeued."""
        load = self._loads.pop(engine_id)
        assert not load.tasks, load
        self._drop_costs(load)
        if not load.is_draining:
            self._leave_pools(load)

    def set_draining(self, load: EngineLoad, is_draining: bool) -> None:
        """Give it no more tasks; those that it has go on. Or give it tasks again."""
        if is_draining and not load.is_draining:
            self._leave_pools(load)
        was_draining, load.is_draining = load.is_draining, is_draining
        if was_draining and not is_draining:
            self._enter_pools(load)

    def _record_costs(self, load: EngineLoad, costs: StepCosts | None) -> StepCosts:
        """Note what the engine measured, if it has; returns what its steps are taken to cost."""
        own = self._measured.get((load.model, load.device), {})
        if costs is None:
            return own.get(load.id) or self._median_costs(load, own)
        if own.get(load.id) != costs:
            self._measured.setdefault((load.model, load.device), own)[load.id] = costs
            self._costs[load.model] = costs
        return costs

    def _median_costs(self, load: EngineLoad, alike: dict[int, StepCosts]) -> StepCosts:
        """Those of the engine in the middle: a mean would be of numbers that never were together,
        and follow one that is out of order."""
        if not alike:
            return self._costs.get(load.model, _USUAL_COSTS)
        costs = sorted(
            islice(alike.values(), _MAX_MEDIAN_ENGINES), key=lambda c: c.decode_step_s(1, 0)
        )
        return costs[(len(costs) - 1) // 2]

    def _drop_costs(self, load: EngineLoad) -> StepCosts | None:
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
        key = load.rank(step_s) if load.num_tasks else _speed_class(step_s)
        added_s, self._step_s[load.id] = step_s - self._step_s[load.id], step_s
        for pool in (self._pools[_ANY_MODEL], self._pools[load.model]):
            pool.step_s += added_s
            here, elsewhere = (pool.open, pool.full) if is_open else (pool.full, pool.open)
            here.set(load.id, key)
            elsewhere.discard(load.id)

    def check_integrity(self) -> None:
        """Recount the loads. Raises AssertionError with what differs."""
        num_prompt = self.running.check_integrity({load.id: load.tasks for load in self})
        for load in self:
            load.check_integrity(num_prompt[load.id])

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
        pools = self._of(models)
        num_members = sum([len(pool.members) for pool in pools])
        steps_s = sum([pool.step_s for pool in pools])
        return Pace(costs.prefill_s, steps_s / num_members if num_members else alone_s, alone_s)

    def lacking(self, task: CompletionTask) -> frozenset[str]:
        """The needs of the task that the engine which meets most of them does not. Empty if some
        engine may meet all, or there is none."""
        known = [features for pool in self._of(task.models) for features in pool.max_lens]
        lacking = [frozenset() if f is None else task.needs - f for f in known]
        return min(lacking, key=len, default=frozenset())

    def accepts_longest(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether none of the engines that can do what the task needs takes longer sequences than
        this one."""
        return load.max_len >= max(self._accepted_lens(task).values(), default=0)

    def accepts(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether it may get the task as soon as it has room: it has one of the task's models and
        does not drain; and it can do what the task needs, and takes sequences as long as its prompt
        and output, or no other can and does so."""
        if load.is_draining or (task.models and load.model not in task.models):
            return False
        features = load.features
        if features is not None and task.needs <= features and load.max_len >= task.max_total_len:
            return True  # as nearly always
        able = self._accepted_lens(task)
        longest = max(able.values(), default=0)
        return features in able and load.max_len >= min(task.max_total_len, longest)

    def _accepted_lens(self, task: CompletionTask) -> dict[Features, int]:
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
                fitting = [i for i in ids if self.accepts(pool.members[i], task)]
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


def _speed_class(step_s: float) -> float:
    """The least that an idle engine's step may take of those in the same grade."""
    return float(2.0 ** (floor(_CLASSES_PER_DOUBLING * log2(step_s)) / _CLASSES_PER_DOUBLING))
