"""Notices a ServeCore that hangs: its host answers, and its connections stay open, for ever."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LivenessProbe:
    """A probe on behalf of everybody who waits without a timeout, at most once per `interval_s`.

    `ask` returns when the server is alive and raises what a waiting read is to raise when it is
    not."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, None]], interval_s: float) -> None:
        self._ask = ask
        self._interval_s = interval_s
        self._probe: asyncio.Task[None] | None = None
        self._asked_at = 0.0

    async def guard(self, read: Awaitable[T]) -> T:
        """Wait for `read` while the server is alive. Cancelled, it cancels `read`."""
        task = asyncio.ensure_future(read)
        try:
            while not (await asyncio.wait((task,), timeout=self._interval_s))[0]:
                await self._check()
            return task.result()
        finally:
            task.cancel()

    async def _check(self) -> None:
        now = asyncio.get_running_loop().time()
        if self._probe is None or now - self._asked_at >= self._interval_s:
            self._asked_at = now
            self._probe = asyncio.ensure_future(self._ask())
        await asyncio.shield(self._probe)
