"""Supervised background tasks: none is lost, none fails unseen. And long work in steps, so that
others have a turn of the event loop between two."""

import asyncio
import logging
from collections.abc import Coroutine, Generator
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
