"""Many steps in one: while every step is sure to give the same jobs a token each, virtual time need
not stop at each of them."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate

from parrot.engine.core.driver import AsyncDriver, Verb, deliver
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.plan import StepPlan
from parrot.engine.sim.runner import LETTER_IDS, SimRunner
from parrot.utils.clock import Clock


class SimDriver(AsyncDriver):
    """Steps take what `runner` says, times `slowdown`. With `leaps`, for which the loop's time must
    be the clock's, steps that are sure are run together; every request is answered at the same
    time, with the same tokens, as without. What can be seen meanwhile (`runtime_info`) is older."""

    def __init__(self, core: EngineCore, clock: Clock, runner: SimRunner, *, leaps: bool) -> None:
        super().__init__(core, clock, self._step_cost)
        self._runner = runner
        self._leaps = leaps
        self.slowdown = 1.0
        self._interrupted = asyncio.Event()

    def slow_down(self, factor: float) -> None:
        """From the next step on."""
        self.slowdown = factor
        self.interrupt()

    def post(self, verb: Verb) -> None:
        super().post(verb)
        self.interrupt()

    def _step_cost(self, plan: StepPlan) -> float:
        return self.slowdown * self._runner.cost(plan)

    async def _turn(self) -> None:
        core = self._core
        may_leap = self._leaps and not self._inbox and core.has_work
        num_steps = core.num_sure_steps(LETTER_IDS) if may_leap else 0
        if num_steps < 2:
            await super()._turn()
            return
        step = core.plan()
        assert step is not None, "a sure step was not planned"
        seconds = [self.slowdown * cost for cost in self._runner.costs(step.plan, num_steps)]
        done = seconds[: await self._spend_until_called(seconds)]
        core.deliver_sure(step, self._runner.run_on(step.plan, len(done)), done)
        deliver(core.requests.outbox.take())

    async def _spend_until_called(self, seconds: Sequence[float]) -> int:
        """Let the steps' time pass, until the end of that in which a verb comes. Returns how many
        have ended."""
        first = max(self._busy_until, self._clock.now())
        ends = list(accumulate(seconds, initial=first))[1:]
        await self._nap(ends[-1])
        num_done = min(bisect_left(ends, self._clock.now()) + 1, len(ends))
        self._busy_until = ends[num_done - 1]
        if (delay := self._busy_until - self._clock.now()) > 0:
            await self._clock.sleep(delay)
        return num_done

    async def _nap(self, until: float) -> None:
        self._interrupted.clear()
        timer = asyncio.get_running_loop().call_at(until, self.interrupt)
        try:
            await self._interrupted.wait()
        finally:
            timer.cancel()

    def interrupt(self) -> None:
        """End a leap with the step under way."""
        self._interrupted.set()
