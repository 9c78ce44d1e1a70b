"""The loop that runs the core of a simulated engine, on the event loop.

Many steps are one: while every step is sure to give the same jobs a token each, virtual time need
not stop at each of them."""

import asyncio
import logging
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate

from parrot.engine.core.driver import Verb, apply_verbs, deliver
from parrot.engine.core.engine_core import EngineCore
from parrot.engine.core.scheduler import Step
from parrot.engine.sim.runner import LETTER_IDS, SimRunner
from parrot.protocol.errors import EngineFailed, Unavailable
from parrot.utils.clock import Clock

logger = logging.getLogger(__name__)

_MAX_CATCH_UP_S = 0.02


class SimDriver:
    """Steps take what `runner` says, times `slowdown`. With `leaps`, for which the loop's time must
    be the clock's, steps that are sure are run together; every request is answered at the same
    time, with the same tokens, as without. What can be seen meanwhile (`runtime_info`) is older."""

    is_lost = False

    def __init__(
        self, core: EngineCore, clock: Clock, runner: SimRunner, *, leaps: bool = False
    ) -> None:
        self._core = core
        self._clock = clock
        self._runner = runner
        self._leaps = leaps
        self.slowdown = 1.0
        self._inbox: deque[Verb] = deque()
        self._wake = asyncio.Event()
        self._interrupted = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._busy_until = 0.0

    async def start(self) -> EngineCore:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-core")
        return self._core

    def post(self, verb: Verb) -> None:
        self._inbox.append(verb)
        self._wake.set()
        self.interrupt()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        apply_verbs(self._inbox, self._core)
        self._core.fail_everything(Unavailable("the engine is shutting down"))
        deliver(self._core.requests.outbox.take())

    def slow_down(self, factor: float) -> None:
        """From the next step on."""
        self.slowdown = factor
        self.interrupt()

    def interrupt(self) -> None:
        """End a leap with the step under way."""
        self._interrupted.set()

    async def _run(self) -> None:
        while True:
            try:
                await self._turn()
            except Exception:
                logger.exception("the engine core failed; its requests are given up")
                self._core.fail_everything(EngineFailed("internal error of the engine"))
                deliver(self._core.requests.outbox.take())

    async def _turn(self) -> None:
        core = self._core
        may_leap = self._leaps and not self._inbox and core.has_work
        num_steps = core.num_sure_steps(LETTER_IDS) if may_leap else 0
        apply_verbs(self._inbox, core)
        step = core.plan() if core.has_work else None
        if step is not None and num_steps > 1:
            await self._leap(step, num_steps)
        elif step is not None:
            result = core.run(step)
            await self._spend(self.slowdown * self._runner.cost(step.plan))
            core.deliver(step, result)
        deliver(core.requests.outbox.take())
        if step is None and not self._inbox:
            self._wake.clear()
            await self._rest()
            self._busy_until = self._clock.now()

    async def _rest(self) -> None:
        """Wait for a verb, or until a copy between the tiers has landed."""
        landing = self._runner.next_landing
        if landing is None:
            await self._wake.wait()
            return
        delay = max(0.0, landing - self._clock.now())
        waits = [asyncio.ensure_future(w) for w in (self._clock.sleep(delay), self._wake.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    async def _spend(self, seconds: float) -> None:
        """Let the step's time pass. Sleeping too long is made up for in the next step."""
        now = self._clock.now()
        self._busy_until = max(self._busy_until, now - _MAX_CATCH_UP_S) + seconds
        if (delay := self._busy_until - now) > 0:
            await self._clock.sleep(delay)
        else:
            await asyncio.sleep(0)

    async def _leap(self, step: Step, num_steps: int) -> None:
        seconds = [self.slowdown * cost for cost in self._runner.costs(step.plan, num_steps)]
        done = seconds[: await self._spend_until_called(seconds)]
        self._core.deliver_sure(step, self._runner.run_on(step.plan, len(done)), done)

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
