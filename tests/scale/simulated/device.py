"""Model the time of one engine. Each step reads the weights and the KV of all sequences, and
computes prompts one after the other."""

import asyncio
import heapq
from collections import deque
from dataclasses import dataclass, field

from parrot.engine.config import SimInstance

_CHUNK = 8192  # Prompt tokens that a step computes at most.
_AFTER = 1e-9  # Smaller fractions of a step are rounding errors.


@dataclass(slots=True, eq=False)
class Job:
    """A request: the last `to_compute` prompt tokens have no KV yet, and `output` tokens follow.
    `ended` is set after the last token."""

    prompt: int
    to_compute: float
    output: int
    ended: "asyncio.Future[None]"
    token_s: float = field(init=False, default=0.0)  # seconds per prompt token


class Device:
    """Advances from event to event: a job arrives, or a prompt or output is complete. All steps
    between two events have the same duration, so their number does not matter."""

    def __init__(self, costs: SimInstance) -> None:
        self.busy_s = 0.0
        self.num_steps = 0.0
        self._costs = costs
        self._loop = asyncio.get_running_loop()
        self._prompts: deque[Job] = deque()
        self._outputs: list[tuple[float, int, Job]] = []  # by the step at which each is complete
        self._num_read = 0.0
        self._num_jobs = 0
        self._since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    def add(self, job: Job) -> None:
        self._advance()
        costs = self._costs
        behind = job.prompt - job.to_compute / 2
        job.token_s = costs.prefill_token_s + behind * costs.prefill_pair_s
        self._prompts.append(job)
        self._wait()

    def drop(self, job: Job) -> None:
        """Remove a job that was cancelled."""
        self._advance()
        if job in self._prompts:
            self._prompts.remove(job)
        for row in [row for row in self._outputs if row[2] is job]:
            self._outputs.remove(row)
            heapq.heapify(self._outputs)
            self._num_read -= job.prompt + job.output - (row[0] - self.num_steps)
        self._wait()

    def _step(self) -> tuple[float, float]:
        """Return the duration of the current step in seconds, and its number of prompt tokens."""
        costs, num_computed, prompt_s = self._costs, 0.0, 0.0
        if self._prompts:
            job = self._prompts[0]
            num_computed = min(_CHUNK, job.to_compute)
            prompt_s = num_computed * job.token_s
        read_s = len(self._outputs) * costs.sequence_s + self._num_read * costs.context_token_s
        return costs.step_s + read_s + prompt_s, num_computed

    def _advance(self) -> None:
        now = self._loop.time()
        passed_s, self._since = now - self._since, now
        if passed_s <= 0.0 or not (self._prompts or self._outputs):
            return
        self.busy_s += passed_s
        step_s, num_computed = self._step()
        num_steps = passed_s / step_s
        self.num_steps += num_steps
        self._num_read += num_steps * len(self._outputs)
        if self._prompts:
            self._prompts[0].to_compute -= num_steps * num_computed

    def _wait(self) -> None:
        """Set the timer to the next event."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not (self._prompts or self._outputs):
            return
        step_s, num_computed = self._step()
        num_steps = self._outputs[0][0] - self.num_steps if self._outputs else float("inf")
        if self._prompts:
            job = self._prompts[0]
            num_steps = min(num_steps, job.to_compute / num_computed if num_computed else 0.0)
        when = self._since + max(0.0, num_steps) * step_s
        self._timer = self._loop.call_at(when, self._ring)

    def _ring(self) -> None:
        self._advance()
        while self._prompts and self._prompts[0].to_compute <= _AFTER * _CHUNK:
            job = self._prompts.popleft()
            if job.output:
                self._num_jobs += 1
                heapq.heappush(self._outputs, (self.num_steps + job.output, self._num_jobs, job))
                self._num_read += job.prompt
            else:
                _end(job)
        while self._outputs and self._outputs[0][0] <= self.num_steps * (1 + _AFTER) + _AFTER:
            job = heapq.heappop(self._outputs)[2]
            self._num_read -= job.prompt + job.output
            _end(job)
        if not self._outputs:
            self._num_read = 0.0
        self._wait()


def _end(job: Job) -> None:
    if not job.ended.done():
        job.ended.set_result(None)
