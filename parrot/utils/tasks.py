"""Supervised background tasks: none is lost, none fails unseen. And long work in steps, so that
others have a turn of the event loop between two."""

import asyncio
import logging
from collections import deque
from collections.abc import Coroutine, Generator, Hashable, Iterator
from typing import Any, TypeVar

logger = logging.getLogger(__name__)
T = TypeVar("T")
Steps = Generator[None, None, T]
"""Yields between two steps of some milliseconds, and returns what they have made."""


async def in_turns(steps: Steps[T]) -> T:
    """Take the steps, between which others may go on, and return what they have made."""
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
    """Work that is done at once if it is little, and else in slices, one in a turn of the event
    loop. Owners take turns; what one has added is done in the order in which it was. An iterator
    that is added does a part with each step and yields how much that was, in whatever unit
    `per_slice` is."""

    def __init__(self, per_slice: int = 512) -> None:
        self.per_slice = per_slice
        self._work: dict[Hashable, deque[Iterator[int]]] = {}
        self._is_due = False

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._work

    def add(self, owner: Hashable, work: Iterator[int]) -> None:
        """Do a slice of it now, unless something of the owner is under way."""
        if owner in self._work:
            self._work[owner].append(work)
            return
        self._work[owner] = deque([work])
        self._take(owner, self.per_slice)

    def drop(self, owner: Hashable) -> None:
        """Do nothing more of what it has added."""
        self._work.pop(owner, deque()).clear()

    def finish(self) -> None:
        """Do all there is, now."""
        while self._work:
            self._take(next(iter(self._work)), None)

    def _take(self, owner: Hashable, limit: int | None) -> None:
        """Do so much of the owner's work, and the rest later."""
        work, done = self._work[owner], 0
        try:
            while work and (limit is None or done < limit):
                first = work.popleft()
                if (size := next(first, None)) is not None:
                    done += size
                    if self._work.get(owner) is work:  # it was not dropped
                        work.appendleft(first)
        finally:
            if self._work.get(owner) is work:
                del self._work[owner]
                if work:
                    self._work[owner] = work  # behind the others
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
    """Owns asyncio tasks: keeps a reference to each, logs what one raises, cancels all on close."""

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
        """Cancel every task and wait until all have ended."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
