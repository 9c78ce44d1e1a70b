"""What runs on each engine, and the engines in order of load, per model."""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.engine_api import Usage
from parrot.serve.scheduling.cost import CostModel, EngineSpeed, ModelCosts, Work
from parrot.serve.scheduling.outlook import Outlook
from parrot.serve.scheduling.task import CompletionTask
from parrot.serve.scheduling.usual import UsualLoad

ANY_MODEL = None

_HARM_WEIGHT = 10.0  # how much worse a second is for whoever waits than for throughput work;
_TYPICAL_OUTPUT = 300  # who reads along judges by the time per token: it is that for so many,
_MIN_OUTPUT, _MAX_OUTPUT = 150, 1024  # and more for fewer, within bounds
_FRESH_S = 0.01  # averages need not be newer
_TYPICAL_TOKENS = 500  # of a task's own, to compare what a newcomer costs on each engine


def weight_of(task: CompletionTask) -> float:
    """What a second more is worth to it."""
    if not task.is_latency:
        return 1.0
    if not _is_read_along(task):
        return _HARM_WEIGHT
    output = min(max(task.expected_output, _MIN_OUTPUT), _MAX_OUTPUT)
    return _HARM_WEIGHT * _TYPICAL_OUTPUT / output


def _is_read_along(task: CompletionTask) -> bool:
    objective = task.objective
    paced = objective is not None and objective.criteria is PerformanceCriteria.TPOT
    return paced or task.wants_stream


@dataclass(frozen=True, slots=True)
class Charge:
    """What a placed task was predicted to cost its engine, to be taken back when it ends, and what
    the engine had done when it came."""

    room: int  # tokens kept for the output
    num_read: int  # tokens of the output that a step reads, on average
    weight: float
    end: float
    placed_at: float
    task_s: float
    token_s: float
    prefilled: float
    prefill_end: float  # prompt tokens that the engine had been given, its own included
    prompt_share: float  # of its prompt, what it was predicted to compute


@dataclass(slots=True)
class EngineLoad:
    """What was placed on an engine and has not ended. `num_tokens`: prompts (shared beginnings
    once) and room for outputs; `num_read`: those that a decode step reads. `weight` sums what a
    second is worth to each task, and `weighted_end` that times when it is predicted to end.
    `prefill_until`: when it will have computed the prompts."""

    id: int
    model: str
    max_tasks: int
    max_tokens: int
    max_len: int  # tokens of the longest sequence that the engine takes
    costs: ModelCosts
    cost: CostModel = field(init=False)
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0
    num_read: int = 0
    weight: float = 0.0
    weighted_end: float = 0.0
    prefill_until: float = 0.0
    rank: float = 0.0  # the key in the order of load: what a step of a newcomer costs
    tasks: dict[CompletionTask, Charge] = field(default_factory=dict)
    _speed: EngineSpeed = field(default_factory=EngineSpeed)
    _usual: UsualLoad = field(default_factory=UsualLoad)
    _outlook: Outlook | None = None
    _outlook_at: float = 0.0
    _version: int = -1
    _since: float = 0.0
    _task_s: float = 0.0  # tasks times seconds, and tokens times seconds, up to `_since`
    _token_s: float = 0.0
    _num_prompted: float = 0.0  # prompt tokens that it was ever given to compute

    def __post_init__(self) -> None:
        self.refresh()

    @property
    def is_open(self) -> bool:
        return self.num_tasks < self.max_tasks

    def refresh(self) -> None:
        """Take over what was learnt of its model from other engines."""
        if self._version != self.costs.version:
            self._version = self.costs.version
            self.cost = self.costs.at_speed(self._speed.slowness)
            self._outlook = None

    def rank_now(self) -> float:
        """In terms of the model's first costs: what is learnt changes them for all engines alike,
        also for those that nobody looks at."""
        cost = self.costs.default
        newcomer_s = cost.sequence_s + _TYPICAL_TOKENS * cost.token_s
        step_s = cost.decode_step_s(self.num_tasks, self.num_read)
        return self._speed.slowness * (step_s + self.weight * newcomer_s)

    @property
    def step_s(self) -> float:
        return self.cost.decode_step_s(self.num_tasks, self.num_read)

    def wait_s(self, now: float) -> float:
        return max(0.0, self.prefill_until - now)

    def outlook(self, now: float) -> Outlook:
        """Looked at once for all that is weighed at one time."""
        if self._outlook is None or self._outlook_at != now:
            usual, cost = self.usual(now), self.cost
            remaining_s = max(0.0, self.weighted_end / self.weight - now) if self.num_tasks else 0.0
            self._outlook_at = now
            self._outlook = Outlook(
                self.wait_s(now),
                self.step_s,
                remaining_s,
                self.weight,
                cost.decode_step_s(usual.tasks, usual.read) * usual.stretch,
                usual.weight,
            )
        return self._outlook

    def usual(self, now: float) -> UsualLoad:
        if now - self._usual.since > _FRESH_S:
            self._advance_usual(now)
        return self._usual

    def admit(self, task: CompletionTask, new_prompt: int, to_compute: int, now: float) -> float:
        """Book a task: `new_prompt` tokens of its prompt are in no other running one, `to_compute`
        of them in no cache. Returns the seconds that it is predicted to need, but for waiting."""
        self._advance(now)
        room = min(task.max_output, self.max_tokens)
        num_read = task.expected_output // 2
        weight = weight_of(task)
        self.num_tasks += 1
        self.num_latency += task.is_latency
        self.num_tokens += new_prompt + room
        self.num_read += new_prompt + num_read
        prefilled = self._num_prefilled(now)
        self._num_prompted += to_compute
        prefill_s = to_compute * self.cost.prefill_s
        self.prefill_until = max(self.prefill_until, now) + prefill_s
        decode_s = task.expected_output * self.step_s
        end = self.prefill_until + decode_s
        self.weight += weight
        self.weighted_end += weight * end
        self.tasks[task] = Charge(
            room,
            num_read,
            weight,
            end,
            now,
            self._task_s,
            self._token_s,
            prefilled,
            self._num_prompted,
            to_compute / max(1, task.prompt_len),
        )
        return prefill_s + decode_s

    def release(self, task: CompletionTask, old_prompt: int, now: float) -> Charge:
        """Take back what `admit` booked; no running prompt has these `old_prompt` tokens now."""
        self._advance(now)
        charge = self.tasks.pop(task)
        self.num_tasks -= 1
        self.num_latency -= task.is_latency
        self.num_tokens -= old_prompt + charge.room
        self.num_read -= old_prompt + charge.num_read
        self.weight -= charge.weight
        self.weighted_end -= charge.weight * charge.end
        if not self.tasks:
            self.weight = self.weighted_end = 0.0  # exactly, whatever was rounded
            self.prefill_until = 0.0
        return charge

    def learn(self, task: CompletionTask, charge: Charge, usage: Usage, now: float) -> None:
        """What an answer shows of the engine's speed. Call it after `release`."""
        elapsed = now - charge.placed_at
        if usage.output_tokens <= 0 or elapsed <= 0:
            return
        num_tasks = (self._task_s - charge.task_s) / elapsed
        num_tokens = (self._token_s - charge.token_s) / elapsed
        if usage.steps:
            # Tasks whose prompts wait in the engine's queue are not in its steps.
            share = min(1.0, usage.step_sequences / (usage.steps * num_tasks))
            num_read = usage.steps * num_tokens * share
            work = Work(usage.steps, usage.step_sequences, num_read, usage.step_prompt_tokens)
            seconds = usage.prefill_s + usage.decode_s
        else:
            num_steps = usage.output_tokens
            num_prefilled = self._prefilled_beside(task, charge, usage, now)
            work = Work(num_steps, num_steps * num_tasks, num_steps * num_tokens, num_prefilled)
            seconds = min(usage.queue_s + usage.prefill_s + usage.decode_s, elapsed)
        self.costs.learn(work, seconds, self._speed)
        self.refresh()

    def _prefilled_beside(
        self, task: CompletionTask, charge: Charge, usage: Usage, now: float
    ) -> float:
        """Prompt tokens that it must have computed while it had the task."""
        prefilled = self._num_prefilled(now)
        if not task.is_latency:  # what was given before it has been computed by now
            prefilled = max(prefilled, charge.prefill_end)
        num_prompt = usage.cached_tokens + usage.computed_tokens
        share = usage.computed_tokens / num_prompt if num_prompt else charge.prompt_share
        surplus = (share - charge.prompt_share) * task.prompt_len
        return max(0.0, prefilled - charge.prefilled + surplus)

    def check_integrity(self, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompts here, shared beginnings once."""
        charges = self.tasks.values()
        assert self.num_tasks == len(charges), self.id
        assert self.num_latency == sum(task.is_latency for task in self.tasks), self.id
        assert self.num_tokens == num_prompt + sum(c.room for c in charges), self.id
        assert self.num_read == num_prompt + sum(c.num_read for c in charges), self.id
        assert abs(self.weight - sum(c.weight for c in charges)) < 1e-6, self.id

    def _advance(self, now: float) -> None:
        self._advance_usual(now)
        self._outlook = None
        self._task_s += self.num_tasks * (now - self._since)
        self._token_s += self.num_read * (now - self._since)
        self._since = now

    def _advance_usual(self, now: float) -> None:
        num_tasks, num_read = self.num_tasks, self.num_read
        self._usual.advance(now, num_tasks, num_read, self.weight, self.prefill_until)

    def _num_prefilled(self, now: float) -> float:
        """Prompt tokens that it is taken to have computed by now."""
        return self._num_prompted - self.wait_s(now) / self.cost.prefill_s


class LoadIndex:
    """Every engine's load, and lazy heaps that give the least loaded engines of a model: an entry
    counts only while its rank is the engine's, and the engine has a free slot."""

    def __init__(self) -> None:
        self._loads: dict[int, EngineLoad] = {}
        self._heaps: dict[str | None, list[tuple[float, int]]] = {ANY_MODEL: []}
        self._members: dict[str | None, dict[int, EngineLoad]] = {ANY_MODEL: {}}
        self._open: dict[str | None, set[int]] = {ANY_MODEL: set()}
        self._unfiled: dict[int, EngineLoad] = {}  # changed since the heaps were looked at
        self._longest: dict[str | None, int] = {ANY_MODEL: 0}

    def __iter__(self) -> Iterator[EngineLoad]:
        return iter(self._loads.values())

    def get(self, engine_id: int) -> EngineLoad | None:
        return self._loads.get(engine_id)

    def add(self, load: EngineLoad) -> None:
        self._loads[load.id] = load
        for name in (ANY_MODEL, load.model):
            self._members.setdefault(name, {})[load.id] = load
            self._heaps.setdefault(name, [])
            self._open.setdefault(name, set())
            self._longest[name] = max(self._longest.get(name, 0), load.max_len)
        self.changed(load)

    def remove(self, engine_id: int) -> EngineLoad:
        load = self._loads.pop(engine_id)
        self._unfiled.pop(engine_id, None)
        for name in (ANY_MODEL, load.model):
            del self._members[name][engine_id]
            self._open[name].discard(engine_id)
            if name is not ANY_MODEL and not self._members[name]:
                del self._members[name], self._heaps[name], self._open[name], self._longest[name]
            else:
                members = self._members[name].values()
                self._longest[name] = max([other.max_len for other in members], default=0)
        return load

    def members(self, models: tuple[str, ...]) -> Iterator[EngineLoad]:
        """The engines with one of the models (empty: all), in the order in which they came."""
        for name in models or (ANY_MODEL,):
            yield from self._members.get(name, {}).values()

    def is_served(self, models: tuple[str, ...]) -> bool:
        return any(self._members.get(name) for name in models or (ANY_MODEL,))

    def num_members(self, models: tuple[str, ...]) -> int:
        """Engines with one of the models (empty: all)."""
        return sum(len(self._members.get(name, ())) for name in models or (ANY_MODEL,))

    def num_open(self, models: tuple[str, ...]) -> int:
        """Engines with one of the models (empty: any) that have a free slot."""
        return sum(len(self._open.get(name, ())) for name in models or (ANY_MODEL,))

    def longest(self, models: tuple[str, ...]) -> int:
        """Tokens of the longest sequence that an engine with one of the models takes."""
        return max([self._longest.get(name, 0) for name in models or (ANY_MODEL,)])

    def takes(self, task: CompletionTask, load: EngineLoad) -> bool:
        """Whether the task's prompt and output are within the engine's limit; if they are beyond
        all limits, whether no engine takes longer sequences."""
        return load.max_len >= task.wanted_len or load.max_len >= self.longest(task.models)

    def least_loaded(self, task: CompletionTask, count: int) -> list[EngineLoad]:
        """Up to `count` open engines for each of the task's models that take sequences as long as
        it, least loaded first."""
        models = task.models
        found: list[EngineLoad] = []
        for name in models or (ANY_MODEL,):
            heap = self._heaps.get(name)
            if heap is None:
                continue
            if len(self._open[name]) <= count:
                there = [self._loads[engine_id] for engine_id in self._open[name]]
                found += [load for load in there if self.takes(task, load)]
            else:
                self._file_changed()
                found += self._least(heap, task, count)
        return found

    def _least(
        self, heap: list[tuple[float, int]], task: CompletionTask, count: int
    ) -> list[EngineLoad]:
        found: list[EngineLoad] = []
        entries: list[tuple[float, int]] = []
        while heap and len(found) < count:
            entry = heapq.heappop(heap)
            load = self._loads.get(entry[1])
            if load is None or load.rank != entry[0] or not load.is_open or entry in entries:
                continue
            entries.append(entry)
            if self.takes(task, load):
                found.append(load)
        for entry in entries:
            heapq.heappush(heap, entry)
        return found

    def changed(self, load: EngineLoad) -> None:
        """An engine's load or speed has changed."""
        self._unfiled[load.id] = load
        for name in (ANY_MODEL, load.model):
            if load.is_open:
                self._open[name].add(load.id)
            else:
                self._open[name].discard(load.id)

    def _file_changed(self) -> None:
        """Few engines are all compared, so their heaps are never looked at."""
        for load in self._unfiled.values():
            load.rank = load.rank_now()
            if load.is_open:
                self._file(load)
        self._unfiled.clear()

    def _file(self, load: EngineLoad) -> None:
        for name in (ANY_MODEL, load.model):
            heap = self._heaps[name]
            heapq.heappush(heap, (load.rank, load.id))
            if len(heap) > 64 + 4 * len(self._members[name]):
                heap[:] = [
                    (other.rank, engine_id)
                    for engine_id, other in self._members[name].items()
                    if other.is_open
                ]
                heapq.heapify(heap)
