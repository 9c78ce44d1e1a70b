"""The load of one engine, and what a newcomer would find there: now, and usually."""

from dataclasses import dataclass, field
from math import exp, isclose
from typing import NamedTuple

from parrot.protocol.engine_api import Lease, ServerLoad, StepCosts
from parrot.protocol.fields import PerformanceCriteria
from parrot.serve.scheduling.task import CompletionTask

_HARM_WEIGHT = 10.0  # how much worse a second is for whoever waits than for throughput work;
_TYPICAL_OUTPUT = 300  # who reads along judges by the time per token: it is that for so many,
_MIN_OUTPUT, _MAX_OUTPUT = 150, 1024  # and more for fewer, within bounds
_TYPICAL_TOKENS = 500  # of a task's own, to compare what a newcomer costs on each engine
_MEMORY_S = 10.0  # an engine's load counts for so long as usual there
_MAX_PROMPT_SHARE = 0.8  # of the time: prompts that are given faster wait, and are not computed


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


class _Charge(NamedTuple):
    """A placed task's part of its engine's weight, to be taken back when it ends."""

    weight: float
    end: float  # the predicted time


@dataclass(slots=True)
class EngineLoad:
    """The tasks that were placed on an engine and have not ended.

    `num_tokens` counts their prompts (shared beginnings once) and the room for their outputs, and
    `num_read` those that a decode step reads. `weight` sums what a second is worth to each task,
    `weighted_end` that times the predicted time of its end. `prefill_until` is the time at which
    the prompts will have been computed. What is usual are averages over time up to `since`, in
    which what is older than `_MEMORY_S` counts little; `usual_prefill` is the share of the time
    that prompts take. `server`: what a server behind the engine does. Others of its clients
    lengthen its steps, and a newcomer comes behind all who wait there. `device`: what runs the
    model; empty: not known."""

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
    lease: Lease | None = None
    num_tasks: int = 0
    num_latency: int = 0
    num_tokens: int = 0
    num_read: int = 0
    weight: float = 0.0
    weighted_end: float = 0.0
    prefill_until: float = 0.0
    tasks: dict[CompletionTask, _Charge] = field(default_factory=dict)
    since: float = 0.0
    usual_tasks: float = 0.0
    usual_read: float = 0.0
    usual_weight: float = 0.0
    usual_prefill: float = 0.0
    _outlook: Outlook | None = None  # cached while the time and the load are unchanged

    @property
    def is_open(self) -> bool:
        return self.num_tasks < self.task_limit and not self.is_draining

    @property
    def task_limit(self) -> int:
        """The most tasks that it may have now."""
        return self.max_tasks if self.lease is None else min(self.lease.calls, self.max_tasks)

    @property
    def token_limit(self) -> int:
        """The most tokens that these may need now."""
        return self.max_tokens if self.lease is None else min(self.lease.tokens, self.max_tokens)

    @property
    def step_s(self) -> float:
        server = self.server
        num_sequences = self.num_tasks + server.num_others
        return self.costs.decode_step_s(num_sequences, self.num_read + server.other_tokens)

    @property
    def _queue_s(self) -> float:
        """Seconds until all who wait at the server have begun, in the places of those who run."""
        num_turns = self.server.num_waiting / max(1, self.server.num_running)
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

    def room_for(self, task: CompletionTask) -> int:
        """Tokens that are kept for the task's output."""
        return min(task.max_output, self.max_tokens)

    def fits(self, task: CompletionTask, new_prompt: int) -> bool:
        """Whether its memory holds the task, of whose prompt `new_prompt` tokens are in no running
        one. An idle engine takes any task, unless others have a part of it: none has more room."""
        limit = self.token_limit
        if not self.num_tasks and limit == self.max_tokens:
            return True
        return self.num_tokens + new_prompt + self.room_for(task) <= limit

    def outlook(self, now: float) -> Outlook:
        if self._outlook is None or self.since != now:
            self._advance(now)
            remaining_s = max(0.0, self.weighted_end / self.weight - now) if self.num_tasks else 0.0
            usual_step_s = self.costs.decode_step_s(self.usual_tasks, self.usual_read)
            # Prompts that are computed meanwhile lengthen steps.
            usual_step_s *= 1.0 / (1.0 - min(self.usual_prefill, _MAX_PROMPT_SHARE))
            self._outlook = Outlook(
                max(0.0, self.prefill_until - now) + self._queue_s,
                self.step_s,
                remaining_s,
                self.weight,
                usual_step_s,
                self.usual_weight,
            )
        return self._outlook

    def admit(self, task: CompletionTask, new_prompt: int, to_compute: int, now: float) -> float:
        """Book a task of whose prompt `new_prompt` tokens are in no other running one, and
        `to_compute` in no cache. Returns the seconds that it is predicted to need, without
        waiting."""
        self._advance(now)
        self._book(task, new_prompt, 1)
        prefill_s = to_compute * self.costs.prefill_s
        self.prefill_until = max(self.prefill_until, now) + prefill_s
        decode_s = task.expected_output * self.step_s
        weight, end = weight_of(task), self.prefill_until + decode_s
        self.weight += weight
        self.weighted_end += weight * end
        self.tasks[task] = _Charge(weight, end)
        return prefill_s + decode_s

    def release(self, task: CompletionTask, old_prompt: int, now: float) -> None:
        """Take back what `admit` booked; no running prompt has these `old_prompt` tokens now."""
        self._advance(now)
        self._book(task, old_prompt, -1)
        weight, end = self.tasks.pop(task)
        self.weight -= weight
        self.weighted_end -= weight * end
        if not self.tasks:
            self.weight = self.weighted_end = 0.0  # exactly, whatever was rounded
            self.prefill_until = 0.0

    def check_integrity(self, num_prompt: int) -> None:
        """`num_prompt`: tokens of the prompts here, shared beginnings once."""
        tasks, charges = self.tasks, self.tasks.values()
        assert self.num_tasks == len(tasks), self.id
        assert self.num_latency == sum(task.is_latency for task in tasks), self.id
        assert self.num_tokens == num_prompt + sum(map(self.room_for, tasks)), self.id
        assert self.num_read == num_prompt + sum(t.expected_output // 2 for t in tasks), self.id
        assert isclose(self.weight, sum(c.weight for c in charges), abs_tol=1e-6), self.id
        weighted_end = sum(c.weight * c.end for c in charges)
        assert isclose(self.weighted_end, weighted_end, rel_tol=1e-6, abs_tol=1e-6), self.id

    def _book(self, task: CompletionTask, prompt: int, sign: int) -> None:
        self.num_tasks += sign
        self.num_latency += sign * task.is_latency
        self.num_tokens += sign * (prompt + self.room_for(task))
        self.num_read += sign * (prompt + task.expected_output // 2)

    def _advance(self, now: float) -> None:
        """Take in that the load was as it is since the last call. It will be another, or is looked
        at anew."""
        self._outlook = None
        if now == self.since:
            return
        old = exp((self.since - now) / _MEMORY_S)
        new = 1.0 - old
        server = self.server
        self.usual_tasks = old * self.usual_tasks + new * (self.num_tasks + server.num_others)
        self.usual_read = old * self.usual_read + new * (self.num_read + server.other_tokens)
        self.usual_weight = old * self.usual_weight + new * self.weight
        self.usual_prefill *= old
        if self.prefill_until >= now:
            self.usual_prefill += new
        elif self.prefill_until > self.since:
            self.usual_prefill += exp((self.prefill_until - now) / _MEMORY_S) - old
        self.since = now
