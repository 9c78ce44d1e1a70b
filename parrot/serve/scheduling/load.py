"""The predicted load of each engine, and an index that finds engines by model and load."""

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

# One second lost by a latency task counts as this many seconds lost by a throughput task.
_LATENCY_WEIGHT = 10.0
# Output length, in tokens, at which a streamed task has exactly the weight `_LATENCY_WEIGHT`. The
# weight is inversely proportional to the length, since its reader notices the time per token.
_TYPICAL_OUTPUT = 300
# Bounds of the output length, in tokens, from which the weight of a streamed task is computed.
_MIN_OUTPUT, _MAX_OUTPUT = 150, 1024
# Tokens of KV that a typical new task adds to a step. A larger value ranks engines with many
# latency tasks lower.
_TYPICAL_TOKENS = 500
# Time constant of an engine's usual load, in seconds. A larger value remembers past load longer.
_LOAD_WINDOW_S = 10.0
# Sequences among which the fixed time of a step is divided when a tenant is charged for service.
_TYPICAL_BATCH = 64
# Upper limit of the predicted share of time in which an engine computes prompts. At 0.8 the usual
# decode step is at most 5 times as long as without prompts.
_MAX_PREFILL_SHARE = 0.8


def latency_weight(task: CompletionTask) -> float:
    """The weight of one second of delay of the task: 1.0 for throughput tasks."""
    if not task.is_latency:
        return 1.0
    objective = task.objective
    paced = objective is not None and objective.criteria is PerformanceCriteria.TPOT
    if not (paced or task.wants_stream):
        return _LATENCY_WEIGHT
    output = min(max(task.expected_output, _MIN_OUTPUT), _MAX_OUTPUT)
    return _LATENCY_WEIGHT * _TYPICAL_OUTPUT / output


IDLE = ServerLoad()  # The load of an engine's server that has no other clients.


class Outlook(NamedTuple):
    """The predicted delays of a new task on an engine: the present load for `remaining_s` seconds,
    and the engine's usual load after that."""

    wait_s: float  # Until the prompts that are there have been computed.
    step_s: float  # A decode step with the present tasks.
    remaining_s: float  # Until the present tasks finish, averaged by their weights.
    weight: float  # Sum of the present tasks' latency weights.
    usual_step_s: float
    usual_weight: float

    def steps_s(self, num_steps: float) -> float:
        """Predicted seconds of `num_steps` decode steps, without the new task."""
        if num_steps * self.step_s <= self.remaining_s:
            return num_steps * self.step_s
        num_usual = num_steps - self.remaining_s / self.step_s
        return self.remaining_s + num_usual * self.usual_step_s

    def harm_s(self, prefill_s: float, num_steps: float, growth_s: float) -> float:
        """Weighted seconds by which a new task delays other tasks. Present tasks wait
        `prefill_s` for its prompt. Each of its `num_steps` steps takes `growth_s` longer."""
        remaining_s = self.remaining_s
        steps = min(num_steps, remaining_s / self.step_s) if remaining_s else 0.0
        harm_s = self.weight * (min(prefill_s, remaining_s) + steps * growth_s)
        return harm_s + self.usual_weight * (num_steps - steps) * growth_s


def service_s(costs: StepCosts, num_computed: int, num_read: int, num_output: int) -> float:
    """Engine seconds of a call. It computes `num_computed` prompt tokens and generates `num_output`
    tokens. Each output token reads `num_read` prompt tokens and the output so far."""
    read_s = (num_read + num_output / 2) * costs.token_s
    token_s = costs.step_s / _TYPICAL_BATCH + costs.sequence_s + read_s
    return num_computed * costs.prefill_s + num_output * token_s


class Charge(NamedTuple):
    """The load that a placed task adds to its engine, and its predicted service."""

    weight: float  # Its latency weight.
    begin: float  # When it was placed.
    end: float  # When it is predicted to finish, after the prompts that were there.
    duration_s: float  # Predicted seconds without the wait for other prompts.
    num_tokens: int  # Its prompt, without prefixes of other running prompts, plus its output room.
    num_read: int  # Prompt tokens in `num_tokens`.
    costs: StepCosts  # The engine's costs at placement.
    service_s: float  # Predicted engine seconds.

    def actual_s(self, task: CompletionTask, now: float) -> float:
        """Engine seconds that the task has used, when it leaves the engine at `now`."""
        # A stopped task has no token counts. It pays for the part of its prediction that it ran.
        if task.used is not None:
            num_computed, num_output = task.used
            return service_s(self.costs, num_computed, self.num_read, num_output)
        if now - self.begin < self.duration_s:
            return self.service_s * (now - self.begin) / self.duration_s
        return self.service_s


class PlacementListener(Protocol):
    """Is notified of each task that is placed on an engine or leaves it."""

    def placed(self, task: CompletionTask, engine_id: int, charge: Charge) -> None: ...

    def released(
        self, task: CompletionTask, engine_id: int, charge: Charge, actual_s: float
    ) -> None:
        """The task has left the engine. It used `actual_s` engine seconds."""


@dataclass(slots=True)
class EngineLoad:
    """The predicted load of one engine: the sum over its placed and unfinished tasks.

    `usual_tasks`, `usual_read`, `usual_weight` and `usual_prefill` are exponential averages with
    the time constant `_LOAD_WINDOW_S`."""

    index: "LoadIndex" = field(repr=False, compare=False)
    id: int
    model: str
    max_tasks: int
    max_tokens: int
    max_len: int  # Tokens of the longest sequence that the engine accepts.
    costs: StepCosts
    features: frozenset[str] | None = None  # See `Capabilities`. None: unknown.
    # The engine's server is not Parrot's. It schedules its requests itself, and `costs` are
    # estimated from the duration of its answers.
    is_foreign: bool = False
    is_draining: bool = False  # A draining engine receives no tasks.
    num_slots: int = field(init=False)  # `max_tasks`, or fewer after the engine has refused tasks.
    # Load of the server behind the engine. Requests of other clients lengthen steps, and requests
    # that wait there run before a new task.
    server: ServerLoad = IDLE
    device: str = ""  # The GPU type. Empty: unknown.
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0  # Prompts, with shared prefixes counted once, and output room.
    num_read: int = 0  # Tokens that a decode step reads: prompts and half of the outputs.
    weight: float = 0.0  # Sum of the tasks' latency weights.
    weighted_end: float = 0.0  # Sum of latency weight x predicted end.
    prefill_until: float = 0.0  # When the placed prompts will have been computed.
    tasks: dict[CompletionTask, Charge] = field(default_factory=dict)
    since: float = 0.0  # Time up to which the averages are computed.
    usual_tasks: float = 0.0
    usual_read: float = 0.0
    usual_weight: float = 0.0
    usual_prefill: float = 0.0  # Share of the time in which the engine computes prompts.
    _outlook: Outlook | None = None  # Cached while the time and the load are unchanged.

    def __post_init__(self) -> None:
        self.num_slots = self.max_tasks

    @property
    def is_open(self) -> bool:
        """Whether another task fits into the engine's slots. See `LoadIndex.accepts` as well."""
        return self.num_tasks < self.num_slots

    @property
    def step_s(self) -> float:
        server = self.server
        num_sequences = self.num_tasks + server.num_others
        return self.costs.decode_step_s(num_sequences, self.num_read + server.other_tokens)

    @property
    def _queue_s(self) -> float:
        """Seconds until the requests that wait at the engine's server have started."""
        server = self.server
        if not server.num_waiting:
            return 0.0
        num_turns = server.num_waiting / max(1, server.num_running)
        return num_turns * _TYPICAL_OUTPUT * self.step_s

    def rank(self, step_s: float) -> float:
        """Weighted seconds that one step of `step_s` costs a typical new task and the present
        tasks. The engine with the smallest rank is the least loaded."""
        newcomer_s = self.costs.sequence_s + _TYPICAL_TOKENS * self.costs.token_s
        return step_s + self.weight * newcomer_s

    def runs_session(self, session_id: int) -> bool:
        """Whether a call of this session is placed on the engine."""
        return any(task.completion.session_id == session_id for task in self.tasks)

    def reported(self, costs: StepCosts, server: ServerLoad) -> None:
        self.costs, self.server = costs, server
        self._outlook = None

    def reserved_output(self, task: CompletionTask) -> int:
        """Tokens that are reserved for the task's output."""
        return min(task.max_output, self.max_tokens)

    def fits(self, task: CompletionTask, new_prompt: int) -> bool:
        """Whether KV memory for the task is free. `new_prompt`: the prompt tokens that no running
        prompt has. An idle engine accepts any task, because no other engine has more room."""
        if not self.num_tasks:
            return True
        return self.num_tokens + new_prompt + self.reserved_output(task) <= self.max_tokens

    def outlook(self, now: float) -> Outlook:
        if self._outlook is None or self.since != now:
            self._update_averages(now)
            remaining_s = max(0.0, self.weighted_end / self.weight - now) if self.num_tasks else 0.0
            usual_step_s = self.costs.decode_step_s(self.usual_tasks, self.usual_read)
            # Prompts of other tasks take part of the time and so lengthen the steps.
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
        """Add the task and notify the listeners. `to_compute`: uncached prompt tokens."""
        self._update_averages(now)
        new_prompt = self.index.running.add(task, self.id)
        self._add_counts(task, new_prompt, 1)
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
        """Remove the task from the load, add its service to the task and notify the listeners."""
        self._update_averages(now)
        self._add_counts(task, self.index.running.remove(task, self.id), -1)
        charge = self.tasks.pop(task)
        self.weight -= charge.weight
        self.weighted_end -= charge.weight * charge.end
        if not self.tasks:
            self.weight = self.weighted_end = 0.0  # Remove rounding errors.
            self.prefill_until = 0.0
        actual_s = charge.actual_s(task, now)
        task.service_s += actual_s
        self.index.changed(self)
        for listener in self.index.listeners:
            listener.released(task, self.id, charge, actual_s)

    def check_integrity(self, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompts here, with shared prefixes counted once."""
        tasks, charges = self.tasks, self.tasks.values()
        assert self.num_tasks == len(tasks), self.id
        assert self.num_latency == sum(task.is_latency for task in tasks), self.id
        assert self.num_tokens == num_prompt + sum(map(self.reserved_output, tasks)), self.id
        assert self.num_read == num_prompt + sum(t.expected_output // 2 for t in tasks), self.id
        assert isclose(self.weight, sum(c.weight for c in charges), abs_tol=1e-6), self.id
        weighted_end = sum(c.weight * c.end for c in charges)
        assert isclose(self.weighted_end, weighted_end, rel_tol=1e-6, abs_tol=1e-6), self.id

    def _add_counts(self, task: CompletionTask, prompt: int, sign: int) -> None:
        self.num_tasks += sign
        self.num_latency += sign * task.is_latency
        self.num_tokens += sign * (prompt + self.reserved_output(task))
        self.num_read += sign * (prompt + task.expected_output // 2)

    def _update_averages(self, now: float) -> None:
        """Update the averages up to `now`. The load was constant since the last call."""
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
"""The models on which a task may run. Empty: all models."""

Weigh = Callable[[str], float]
"""Returns the weight of a tenant. If two tenants always have waiting tasks, the tenant with twice
the weight receives twice the service."""

Features = frozenset[str] | None
"""The features of an engine, see `Capabilities`. None: unknown."""

_ANY_MODEL = ""  # The name of the pool that has all engines.
_USUAL_COSTS = StepCosts()  # The costs of an engine if no engine has reported any.
# Speed classes of idle engines per factor of two. Engines in one class count as equally fast, since
# two measurements always differ slightly. A larger value makes the classes narrower.
_CLASSES_PER_DOUBLING = 4
# Number of engines among whose costs the median is taken. A larger value costs more CPU time.
_MAX_MEDIAN = 63


@dataclass(slots=True)
class _Pool:
    """The engines of one model, without draining ones."""

    members: dict[int, EngineLoad] = field(default_factory=dict)
    open: LazyHeap[int, float] = field(default_factory=LazyHeap)  # Engines with a free slot.
    full: LazyHeap[int, float] = field(default_factory=LazyHeap)  # All other engines.
    # The longest accepted sequence, in tokens, by features.
    max_lens: dict[Features, int] = field(default_factory=dict)
    # The number of members with the same features and the same `max_len`.
    num_similar: Counter[tuple[Features, int]] = field(default_factory=Counter)
    step_s: float = 0.0  # Sum of the members' decode steps, in seconds.

    def count(self, load: EngineLoad, sign: int) -> None:
        """Add (1) or remove (-1) a member, in a time that does not depend on their number."""
        key = load.features, load.max_len
        self.num_similar[key] += sign
        if not self.num_similar[key]:
            del self.num_similar[key]
        self.max_lens.clear()
        for features, max_len in self.num_similar:
            self.max_lens[features] = max(self.max_lens.get(features, 0), max_len)


class LoadIndex:
    """Finds engines by id, by model and by load. Owns the loads and the step costs of all engines.
    A draining engine is found by its id only."""

    def __init__(self) -> None:
        self.running = RunningPrefixes()  # The prompts of placed tasks.
        self.listeners: list[PlacementListener] = []
        self._loads: dict[int, EngineLoad] = {}
        self._pools: dict[str, _Pool] = {}  # By model.
        self._step_s: dict[int, float] = {}  # Each engine's part of its pools' `step_s`.
        self._costs: dict[str, StepCosts] = {}  # The last report of any engine of the model.
        # The costs that engines have measured, by model and device, then by engine id.
        self._measured: dict[tuple[str, str], dict[int, StepCosts]] = {}

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
        *,
        is_foreign: bool = False,
    ) -> None:
        """`max_len`: tokens of the longest accepted sequence. None: `max_tokens`.

        An engine without `costs` gets the median of its model and device until it reports costs."""
        longest = max_tokens if max_len is None else min(max_len, max_tokens)
        load = EngineLoad(self, engine_id, model, max_tasks, max_tokens, longest, _USUAL_COSTS)
        load.is_foreign = is_foreign
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
        """Store an engine's report. None: the engine reported no such value."""
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
        """Remove an engine. No task may be placed on it."""
        load = self._loads.pop(engine_id)
        assert not load.tasks, load
        self._drop_costs(load)
        if not load.is_draining:
            self._leave_pools(load)

    def set_draining(self, load: EngineLoad, is_draining: bool) -> None:
        """Start or stop draining. A draining engine finishes its tasks and receives no new ones."""
        if is_draining and not load.is_draining:
            self._leave_pools(load)
        was_draining, load.is_draining = load.is_draining, is_draining
        if was_draining and not is_draining:
            self._enter_pools(load)

    def set_slots(self, load: EngineLoad, num_slots: int) -> None:
        """Set how many tasks the engine gets, up to its `max_tasks`."""
        load.num_slots = min(num_slots, load.max_tasks)
        self.changed(load)

    def _record_costs(self, load: EngineLoad, costs: StepCosts | None) -> StepCosts:
        """Store the costs that the engine has measured, if any. Returns the costs to use."""
        own = self._measured.get((load.model, load.device), {})
        if costs is None:
            return own.get(load.id) or self._median_costs(load, own)
        if own.get(load.id) != costs:
            self._measured.setdefault((load.model, load.device), own)[load.id] = costs
            self._costs[load.model] = costs
        return costs

    def _median_costs(self, load: EngineLoad, alike: dict[int, StepCosts]) -> StepCosts:
        """The costs of the engine whose decode step is the median."""
        # A mean would mix values of different engines, and one faulty engine would distort it.
        if not alike:
            return self._costs.get(load.model, _USUAL_COSTS)
        costs = sorted(islice(alike.values(), _MAX_MEDIAN), key=lambda c: c.decode_step_s(1, 0))
        return costs[(len(costs) - 1) // 2]

    def _drop_costs(self, load: EngineLoad) -> StepCosts | None:
        """Remove the costs that the engine has measured, and return them."""
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
        """Update the pools after an engine's load or costs have changed."""
        if load.is_draining:
            return
        step_s, is_open = load.step_s, load.is_open
        # Idle engines of one speed class have the same key, so new tasks rotate among them.
        # Sessions between two turns add no load. Otherwise all would gather on a few engines.
        key = load.rank(step_s) if load.num_tasks else _speed_class(step_s)
        added_s, self._step_s[load.id] = step_s - self._step_s[load.id], step_s
        for pool in (self._pools[_ANY_MODEL], self._pools[load.model]):
            pool.step_s += added_s
            here, elsewhere = (pool.open, pool.full) if is_open else (pool.full, pool.open)
            here.set(load.id, key)
            elsewhere.discard(load.id)

    def check_integrity(self) -> None:
        """Recount the loads. Raises AssertionError with the values that differ."""
        num_prompt = self.running.check_integrity({load.id: load.tasks for load in self})
        for load in self:
            load.check_integrity(num_prompt[load.id])

    # One engine

    def get(self, engine_id: int) -> EngineLoad | None:
        return self._loads.get(engine_id)

    def num_placed(self, engine_id: int) -> int:
        load = self._loads.get(engine_id)
        return 0 if load is None else load.num_tasks

    # Engines of given models

    def members(self, models: Models) -> Iterator[EngineLoad]:
        """Yield the engines, in the order in which they joined each pool."""
        for pool in self._pools_for(models):
            yield from pool.members.values()

    def num_members(self, models: Models) -> int:
        count = 0
        for pool in self._pools_for(models):
            count += len(pool.members)
        return count

    def num_open(self, models: Models) -> int:
        """Number of engines with a free slot."""
        count = 0
        for pool in self._pools_for(models):
            count += len(pool.open)
        return count

    def pace(self, models: Models) -> Pace:
        """The average speed of the engines under their present load."""
        known = filter(None, map(self._costs.get, models or self._costs))
        costs = next(known, _USUAL_COSTS)
        alone_s = costs.decode_step_s(1, 0)
        num_members, steps_s = 0, 0.0
        for pool in self._pools_for(models):
            num_members += len(pool.members)
            steps_s += pool.step_s
        return Pace(costs.prefill_s, steps_s / num_members if num_members else alone_s, alone_s)

    def missing_features(self, task: CompletionTask) -> frozenset[str]:
        """The features that the task needs and the best engine does not have. Empty if an engine
        may have all of them, or if the task's models have no engine."""
        known = [features for pool in self._pools_for(task.models) for features in pool.max_lens]
        lacking = [frozenset() if f is None else task.needs - f for f in known]
        return min(lacking, key=len, default=frozenset())

    def accepts_longest(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether no eligible engine accepts longer sequences than this engine."""
        return load.max_len >= max(self._accepted_lens(task).values(), default=0)

    def accepts(self, load: EngineLoad, task: CompletionTask) -> bool:
        """Whether the engine may run the task once it has room.

        It must not be draining and must serve one of the task's models. It must support the task's
        features and length, except if no engine of these models does."""
        if load.is_draining or (task.models and load.model not in task.models):
            return False
        features = load.features
        if features is not None and task.needs <= features and load.max_len >= task.max_total_len:
            return True  # The usual case.
        able = self._accepted_lens(task)
        longest = max(able.values(), default=0)
        return features in able and load.max_len >= min(task.max_total_len, longest)

    def _accepted_lens(self, task: CompletionTask) -> dict[Features, int]:
        """The longest accepted sequence, in tokens, for each set of features that is eligible: sets
        with all needed features, else unknown features, else all sets."""
        grades: list[dict[Features, int]] = [{}, {}, {}]
        for pool in self._pools_for(task.models):
            for features, max_len in pool.max_lens.items():
                grade = 1 if features is None else 0 if task.needs <= features else 2
                grades[grade][features] = max(grades[grade].get(features, 0), max_len)
        return grades[0] or grades[1] or grades[2]

    def least_loaded(
        self, task: CompletionTask, count: int, *, full: bool = False
    ) -> list[EngineLoad]:
        """For each of the task's models, the `count` least loaded engines that accept the task, in
        no particular order. `full`: among the engines without a free slot."""
        found: list[EngineLoad] = []
        for pool in self._pools_for(task.models):
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

    def _pools_for(self, models: Models) -> Iterator[_Pool]:
        return filter(None, map(self._pools.get, models or (_ANY_MODEL,)))


def _speed_class(step_s: float) -> float:
    """The lower bound, in seconds, of the speed class of a step."""
    return float(2.0 ** (floor(_CLASSES_PER_DOUBLING * log2(step_s)) / _CLASSES_PER_DOUBLING))
