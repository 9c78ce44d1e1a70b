"""Many deadlines, one sleeper."""

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

_MIN_GARBAGE = 64  # cancelled timers that are worth a sweep


class Timer:
    """A callback that is due at `when`, unless cancelled before."""

    __slots__ = ("_queue", "callback", "when")

    def __init__(self, queue: "TimerQueue", when: float, callback: Callable[[], None]) -> None:
        self._queue = queue
        self.when = when
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        """Safe in any state."""
        if self.callback is not None:
            self.callback = None
            self._queue._cancelled()


class TimerQueue:
    """Runs callbacks at times on a clock's scale. Holds one sleeping task while a timer is set,
    and nothing while none is. Callbacks must not raise."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._heap: list[tuple[float, int, Timer]] = []
        self._order = count()
        self._num_cancelled = 0
        self._tasks = TaskSet()
        self._sleeper: asyncio.Task[None] | None = None
        self._sleeping_until: float | None = None

    def __len__(self) -> int:
        return len(self._heap) - self._num_cancelled

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self, when, callback)
        heapq.heappush(self._heap, (when, next(self._order), timer))
        if self._sleeping_until is None or when < self._sleeping_until:
            self._restart()
        return timer

    async def close(self) -> None:
        """Forget every timer."""
        self._heap.clear()
        self._num_cancelled = 0
        await self._tasks.close()

    def _restart(self) -> None:
        """Sleep until the earliest timer, and no longer for any other."""
        if self._sleeper is not None:
            self._sleeper.cancel()
        self._sleeping_until = self._heap[0][0]
        self._sleeper = self._tasks.spawn(self._run(), name="timers")

    async def _run(self) -> None:
        while self._heap:
            self._sleeping_until = self._heap[0][0]
            await self._clock.sleep(max(0.0, self._sleeping_until - self._clock.now()))
            self._fire()
        self._sleeping_until = None

    def _fire(self) -> None:
        now = self._clock.now()
        while self._heap and self._heap[0][0] <= now:
            timer = heapq.heappop(self._heap)[2]
            if timer.callback is None:
                self._num_cancelled -= 1
            else:
                callback, timer.callback = timer.callback, None
                callback()

    def _cancelled(self) -> None:
        self._num_cancelled += 1
        if self._num_cancelled > _MIN_GARBAGE and 2 * self._num_cancelled > len(self._heap):
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._num_cancelled = 0
