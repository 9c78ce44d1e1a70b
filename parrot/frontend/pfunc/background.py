"""An event loop in its own thread. Blocking code and other event loops share one asynchronous
implementation through it."""

import asyncio
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from typing import Any, TypeVar

from parrot.protocol.errors import SessionGone

T = TypeVar("T")
Producer = Callable[[Callable[[T], None]], Coroutine[Any, Any, None]]

_CLOSE_TIMEOUT_S = 10.0  # Seconds to wait for the farewell, and for the thread.
_GONE = "the session has ended"


class BackgroundLoop:
    """The event loop of one session. After `close`, all waiting and later calls raise
    `SessionGone`. All methods may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="parrot-io", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine and return its result. An interrupt (Ctrl-C) cancels the coroutine."""
        future = self._start(coro)
        try:
            return _result(future)
        finally:
            future.cancel()

    async def arun(self, coro: Coroutine[Any, Any, T]) -> T:
        """`run` for async code. Cancelling the caller cancels the coroutine."""
        future = self._start(coro)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            return _result(future)

    def items(self, produce: Producer[T]) -> Iterator[T]:
        """Yield the items that `produce(emit)` emits. Items must not be None. Closing the iterator
        cancels `produce`."""
        emitted: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        future = self._start(produce(emitted.put))
        future.add_done_callback(lambda _: emitted.put(None))
        try:
            while (item := emitted.get()) is not None:
                yield item
            _result(future)
        finally:
            future.cancel()

    async def aitems(self, produce: Producer[T]) -> AsyncGenerator[T]:
        """`items` for async code. `aclose` cancels `produce` immediately."""
        emitted: asyncio.Queue[T | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: T | None) -> None:
            with suppress(RuntimeError):  # The caller's loop is closed.
                loop.call_soon_threadsafe(emitted.put_nowait, item)

        future = self._start(produce(put))
        future.add_done_callback(lambda _: put(None))
        try:
            while (item := await emitted.get()) is not None:
                yield item
            _result(future)
        finally:
            future.cancel()

    def close(self, farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Cancel all running coroutines, run `farewell`, and end the thread. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(_end(farewell), self._loop)
        with suppress(TimeoutError):
            ending.result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _start(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine. Cancelling the future cancels the coroutine."""
        if self._is_closed:
            coro.close()
            raise SessionGone(_GONE)
        return asyncio.run_coroutine_threadsafe(coro, self._loop)

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


def _result(future: Future[T]) -> T:
    """Wait for the result. Only `close` cancels the future, hence `SessionGone`."""
    try:
        return future.result()
    except CancelledError:
        raise SessionGone(_GONE) from None


async def _end(farewell: Callable[[], Coroutine[Any, Any, None]]) -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await farewell()
