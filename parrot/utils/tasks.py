"""Background tasks whose errors are logged, and long work in steps that lets other tasks run."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Generator, Hashable, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields between steps of a few milliseconds each, and returns the result of the work."""


async def in_turns(steps: Steps[T]) -> T:
    """Run all steps and return the result. Other tasks may run between two steps."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made
        await asyncio.sleep(0)


def at_once(steps: Steps[T]) -> T:
    while True:
        try:
            next(steps)
        except StopIteration as end:
            made: T = end.value
            return made


class Backlog:
    """Work in slices of `per_slice` units, at most one slice per iteration of the event loop.

    Each step of an added iterator does some work and yields the number of units. Owners take turns.
    The work of one owner is done in order. Small work finishes inside `add`."""

    def __init__(self, per_slice: int = 512) -> None:
        self.per_slice = per_slice
        self._work: dict[Hashable, deque[Iterator[int]]] = {}
        self._is_due = False

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._work

    def add(self, owner: Hashable, work: Iterator[int]) -> None:
        """Do the first slice now, unless earlier work of the owner is pending."""
        if owner in self._work:
            self._work[owner].append(work)
            return
        self._work[owner] = deque([work])
        self._take(owner, self.per_slice)

    def drop(self, owner: Hashable) -> None:
        """Drop the owner's pending work."""
        self._work.pop(owner, deque()).clear()

    def finish(self) -> None:
        """Do all pending work now."""
        while self._work:
            self._take(next(iter(self._work)), None)

    def _take(self, owner: Hashable, limit: int | None) -> None:
        """Do `limit` units of the owner's work (None: all) and schedule the rest."""
        work, done = self._work[owner], 0
        try:
            while work and (limit is None or done < limit):
                first = work.popleft()
                if (size := next(first, None)) is not None:
                    done += size
                    if self._work.get(owner) is work:  # The step did not drop the work.
                        work.appendleft(first)
        finally:
            if self._work.get(owner) is work:
                del self._work[owner]
                if work:
                    self._work[owner] = work  # After the other owners.
            self._go_on()

    def _go_on(self) -> None:
        if self._work and not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        self._is_due = False
        if self._work:
            self._take(next(iter(self._work)), self.per_slice)


class TaskSet:
    """Owns asyncio tasks: keeps a reference to each, logs exceptions, and cancels all on close."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def spawn(
        self, coro: Coroutine[Any, Any, Any], *, name: str | None = None
    ) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coro, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("background task %s failed", task.get_name(), exc_info=error)

    async def close(self) -> None:
        """Cancel all tasks and wait for them."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
