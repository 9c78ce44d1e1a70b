"""Noticing a server that neither answers nor breaks the connection."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LivenessProbe:
    """Notices a server that hangs: its host answers, and its connections stay open, for ever.

    `ask` returns when the server is alive and raises what a waiting read is to raise when it is
    not. It is asked on behalf of all who wait, at most once per `interval_s`."""

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
                now = asyncio.get_running_loop().time()
                if self._probe is None or now - self._asked_at >= self._interval_s:
                    self._asked_at = now
                    self._probe = asyncio.ensure_future(self._ask())
                await asyncio.shield(self._probe)
            return task.result()
        finally:
            task.cancel()
