"""An event loop in a thread of its own: it lets blocking code and any number of other event loops
use one asynchronous implementation."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_CLOSE_TIMEOUT_S = 5.0


class BackgroundLoop:
    """Starts at once; close it when done. All methods may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="parrot-io", daemon=True)
        self._thread.start()

    def start(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Cancelling the future cancels the coroutine. Raises `RuntimeError` after `close`."""
        try:
            return asyncio.run_coroutine_threadsafe(coro, self._loop)
        except RuntimeError:
            coro.close()
            raise

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        return self.start(coro).result()

    def close(self) -> None:
        """Cancel what still runs and end the thread. The second call does nothing."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self.start(cancel_others()).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def cancel_others() -> None:
    """Cancel all tasks of this loop but the running one, and wait until they have ended."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
