"""Many deadlines, one sleeper."""

import asyncio
import logging
from collections.abc import Callable

from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)


class Timer:
    """A callback that is due at `when`, unless cancelled before."""

    __slots__ = ("_timers", "callback", "when")

    def __init__(
        self, timers: "LazyHeap[Timer, float]", when: float, callback: Callable[[], None]
    ) -> None:
        self._timers = timers
        self.when = when
        self.callback = callback

    def cancel(self) -> None:
        """Drop the timer, in whatever state it is, and what its callback holds."""
        self._timers.discard(self)
        self.callback = _nothing  # the heap forgets it later


def _nothing() -> None:
    pass


class TimerQueue:
    """Runs callbacks at times on a clock's scale. Holds one sleeping task while a timer is set,
    and nothing while none is. A callback that raises is logged, and stops no other timer."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._timers: LazyHeap[Timer, float] = LazyHeap()
        self._tasks = TaskSet()
        self._sleeper: asyncio.Task[None] | None = None
        self._sleeping_until: float | None = None

    def __len__(self) -> int:
        return len(self._timers)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self._timers, when, callback)
        self._timers.set(timer, when)
        if self._sleeping_until is None or when < self._sleeping_until:
            if self._sleeper is not None:
                self._sleeper.cancel()
            self._sleeping_until = when
            self._sleeper = self._tasks.spawn(self._run(), name="timers")
        return timer

    async def close(self) -> None:
        """Forget every timer."""
        self._timers.clear()
        await self._tasks.close()

    async def _run(self) -> None:
        while (first := self._timers.top()) is not None:
            self._sleeping_until = first[0]
            await self._clock.sleep(max(0.0, first[0] - self._clock.now()))
            for timer in self._timers.pop_until(self._clock.now()):
                try:
                    timer.callback()
                except Exception:
                    logger.exception("a timer's callback failed")
        self._sleeping_until = None
