"""The load of one engine, and what a newcomer would find there."""

from dataclasses import dataclass, field
from math import isclose

from parrot.protocol.criteria import PerformanceCriteria
from parrot.protocol.engine_api import StepCosts
from parrot.serve.scheduling.outlook import Outlook, UsualLoad
from parrot.serve.scheduling.task import CompletionTask

_HARM_WEIGHT = 10.0  # how much worse a second is for whoever waits than for throughput work;
_TYPICAL_OUTPUT = 300  # who reads along judges by the time per token: it is that for so many,
_MIN_OUTPUT, _MAX_OUTPUT = 150, 1024  # and more for fewer, within bounds
_TYPICAL_TOKENS = 500  # of a task's own, to compare what a newcomer costs on each engine


def weight_of(task: CompletionTask) -> float:
    """The weight of a second that the task loses; 1.0 for throughput work."""
    if not task.is_latency:
        return 1.0
    objective = task.objective
    paced = objective is not None and objective.criteria is PerformanceCriteria.TPOT
    if not (paced or task.wants_stream):
        return _HARM_WEIGHT
    output = min(max(task.expected_output, _MIN_OUTPUT), _MAX_OUTPUT)
    return _HARM_WEIGHT * _TYPICAL_OUTPUT / output


@dataclass(frozen=True, slots=True)
class _Charge:
    """A placed task's part of its engine's load, to be taken back when it ends."""

    room: int  # tokens kept for the output
    num_read: int  # tokens of the output that a step reads, on average
    weight: float
    end: float  # the predicted time


@dataclass(slots=True)
class EngineLoad:
    """The tasks that were placed on an engine and have not ended.

    `num_tokens` counts their prompts (shared beginnings once) and the room for their outputs, and
    `num_read` those that a decode step reads. `weight` sums what a second is worth to each task,
    `weighted_end` that times the predicted time of its end. `prefill_until` is the time at which
    the prompts will have been computed."""

    id: int
    model: str
    max_tasks: int
    max_tokens: int
    max_len: int  # tokens of the longest sequence that the engine takes
    costs: StepCosts
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0
    num_read: int = 0
    weight: float = 0.0
    weighted_end: float = 0.0
    prefill_until: float = 0.0
    tasks: dict[CompletionTask, _Charge] = field(default_factory=dict)
    _usual: UsualLoad = field(default_factory=UsualLoad)
    _outlook: Outlook | None = None  # cached while the time and the load are unchanged
    _outlook_at: float = 0.0

    @property
    def is_open(self) -> bool:
        return self.num_tasks < self.max_tasks

    @property
    def step_s(self) -> float:
        return self.costs.decode_step_s(self.num_tasks, self.num_read)

    @property
    def rank(self) -> float:
        """Weighted seconds that a step costs a typical newcomer and the others there."""
        newcomer_s = self.costs.sequence_s + _TYPICAL_TOKENS * self.costs.token_s
        return self.step_s + self.weight * newcomer_s

    def set_costs(self, costs: StepCosts) -> None:
        self.costs = costs
        self._outlook = None

    def outlook(self, now: float) -> Outlook:
        if self._outlook is None or self._outlook_at != now:
            usual = self._usual
            usual.advance(now, self.num_tasks, self.num_read, self.weight, self.prefill_until)
            remaining_s = max(0.0, self.weighted_end / self.weight - now) if self.num_tasks else 0.0
            self._outlook_at = now
            self._outlook = Outlook(
                max(0.0, self.prefill_until - now),
                self.step_s,
                remaining_s,
                self.weight,
                self.costs.decode_step_s(usual.tasks, usual.read) * usual.stretch,
                usual.weight,
            )
        return self._outlook

    def admit(self, task: CompletionTask, new_prompt: int, to_compute: int, now: float) -> float:
        """Book a task of whose prompt `new_prompt` tokens are in no other running one, and
        `to_compute` in no cache. Returns the seconds that it is predicted to need, without
        waiting."""
        self._advance(now)
        charge_room, num_read = min(task.max_output, self.max_tokens), task.expected_output // 2
        weight = weight_of(task)
        self.num_tasks += 1
        self.num_latency += task.is_latency
        self.num_tokens += new_prompt + charge_room
        self.num_read += new_prompt + num_read
        prefill_s = to_compute * self.costs.prefill_s
        self.prefill_until = max(self.prefill_until, now) + prefill_s
        decode_s = task.expected_output * self.step_s
        end = self.prefill_until + decode_s
        self.weight += weight
        self.weighted_end += weight * end
        self.tasks[task] = _Charge(charge_room, num_read, weight, end)
        return prefill_s + decode_s

    def release(self, task: CompletionTask, old_prompt: int, now: float) -> None:
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

    def check_integrity(self, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompts here, shared beginnings once."""
        charges = self.tasks.values()
        assert self.num_tasks == len(charges), self.id
        assert self.num_latency == sum(task.is_latency for task in self.tasks), self.id
        assert self.num_tokens == num_prompt + sum(c.room for c in charges), self.id
        assert self.num_read == num_prompt + sum(c.num_read for c in charges), self.id
        assert isclose(self.weight, sum(c.weight for c in charges), abs_tol=1e-6), self.id
        weighted_end = sum(c.weight * c.end for c in charges)
        assert isclose(self.weighted_end, weighted_end, rel_tol=1e-6, abs_tol=1e-6), self.id

    def _advance(self, now: float) -> None:
        self._usual.advance(now, self.num_tasks, self.num_read, self.weight, self.prefill_until)
        self._outlook = None
