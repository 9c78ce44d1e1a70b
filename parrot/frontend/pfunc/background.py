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
        """Wait for the result. An interrupt (Ctrl-C) ends the wait at once, and the coroutine."""
        future = self.start(coro)
        try:
            return future.result()
        finally:
            future.cancel()

    async def arun(self, coro: Coroutine[Any, Any, T]) -> T:
        """The same for a caller with an event loop. Cancelling the caller cancels the coroutine."""
        return await asyncio.wrap_future(self.start(coro))

    def close(self) -> None:
        """Cancel what still runs and end the thread. The second call does nothing."""
        if self._loop.is_closed():
            return
        with suppress(TimeoutError):
            self.start(_cancel_others()).result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
