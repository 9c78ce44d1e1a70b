"""An event loop on virtual time. When no task can run, time jumps to the next timer.

Computation takes no virtual time and waiting takes no real time. An hour of a cluster takes
seconds. A program with seeded random numbers runs identically each time.
"""

import asyncio
import heapq
import selectors
from asyncio import AbstractEventLoop, TimerHandle
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor
from contextvars import Context
from typing import Any, TypeVar, TypeVarTuple, Unpack

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

END_OF_TIME_S = 1e7  # Virtual seconds after which timers never fire. They are only timeouts.
_MAX_NAMED = 20  # Tasks that the message of a `Deadlock` lists.


class Deadlock(RuntimeError):
    """Tasks are waiting, but no event can ever occur. The message lists the tasks."""


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time advances only when no callback is ready. Timers with the same time fire in the order in
    which they were set. `run_in_executor` runs the function at once in this thread. Sockets, pipes
    and threads never wake this loop. Raises `Deadlock` when time would pass `end_s` seconds."""

    def __init__(self, end_s: float = END_OF_TIME_S) -> None:
        super().__init__(_IdleSelector(self._pass_time))
        self._end_s = end_s
        self._now = 0.0
        self._timers: list[tuple[float, int, TimerHandle]] = []
        self.num_timers = 0  # Timers set so far.

    def time(self) -> float:
        return self._now

    def call_at(
        self,
        when: float,
        callback: Callable[[Unpack[Ts]], object],
        *args: *Ts,
        context: Context | None = None,
    ) -> TimerHandle:
        timer = TimerHandle(when, callback, args, self, context)
        self.num_timers += 1
        heapq.heappush(self._timers, (when, self.num_timers, timer))
        return timer

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[Unpack[Ts]], T], *args: *Ts
    ) -> "asyncio.Future[T]":
        """Run the function now. `executor` is ignored."""
        done: asyncio.Future[T] = self.create_future()
        try:
            done.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - the awaiting task handles it
            done.set_exception(error)
        return done

    def _pass_time(self) -> None:
        """Advance to the next timer, and make all timers of that time ready."""
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers or timers[0][0] > self._end_s:
            raise Deadlock(_explain(self))
        self._now = max(self._now, timers[0][0])
        ready: Any = self._ready  # type: ignore[attr-defined]
        while timers and timers[0][0] <= self._now:
            ready.append(heapq.heappop(timers)[2])


class _IdleSelector(selectors.SelectSelector):
    """Calls `on_idle` instead of waiting. `on_idle` must make a callback ready or raise."""

    def __init__(self, on_idle: Callable[[], None]) -> None:
        super().__init__()
        self._on_idle = on_idle

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            self._on_idle()
        return []


class LoopClock:
    """The running loop's time as a `Clock`. Use it only in that loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()

    def now(self) -> float:
        return self._loop.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def run_virtual(main: Coroutine[Any, Any, T], *, end_s: float = END_OF_TIME_S) -> T:
    """As `asyncio.run`, on a `VirtualLoop` that starts at time 0. Raises `Deadlock`."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(end_s)) as runner:
        return runner.run(main)


def _explain(loop: AbstractEventLoop) -> str:
    names = sorted(f"{task.get_name()} ({_where(task)})" for task in asyncio.all_tasks(loop))
    more = f" and {len(names) - _MAX_NAMED} more" if len(names) > _MAX_NAMED else ""
    return (
        f"at {loop.time():.6g} s no event is left, but these tasks still wait: "
        + ", ".join(names[:_MAX_NAMED])
        + more
    )


def _where(task: asyncio.Task[Any]) -> str:
    """The innermost line, outside asyncio, at which the task waits."""
    waiting: Any = task.get_coro()
    place = "?"
    while waiting is not None:
        frame = getattr(waiting, "cr_frame", None) or getattr(waiting, "ag_frame", None)
        if frame is not None and "/asyncio/" not in frame.f_code.co_filename:
            place = f"{frame.f_code.co_qualname}:{frame.f_lineno}"
        waiting = getattr(waiting, "cr_await", None) or getattr(waiting, "ag_await", None)
    return place
