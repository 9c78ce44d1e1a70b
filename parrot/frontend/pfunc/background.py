"""An event loop in a thread of its own: blocking code and any number of other event loops share one
asynchronous implementation."""

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

_CLOSE_TIMEOUT_S = 10.0
_GONE = "the session has ended"


class BackgroundLoop:
    """The loop of one session: it starts at once, and whatever waits for it, or comes later, gets
    `SessionGone` when it is closed. All methods may be called from any other thread."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._is_closed = False
        self._thread = threading.Thread(target=self._serve, name="parrot-io", daemon=True)
        self._thread.start()

    def run(self, coro: Coroutine[Any, Any, T]) -> T:
        """Wait for the result. An interrupt (Ctrl-C) ends the wait at once, and the coroutine."""
        future = self._start(coro)
        try:
            return _result(future)
        finally:
            future.cancel()

    async def arun(self, coro: Coroutine[Any, Any, T]) -> T:
        """The same for a caller with an event loop. Cancelling the caller cancels the coroutine."""
        future = self._start(coro)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            return _result(future)

    def items(self, produce: Producer[T]) -> Iterator[T]:
        """Yield what `produce(emit)` emits, never None, as it comes. Leaving early cancels it."""
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
        """The same for a caller with an event loop: close it to cancel at a certain moment."""
        emitted: asyncio.Queue[T | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def put(item: T | None) -> None:
            with suppress(RuntimeError):  # the caller's loop is closed: nobody listens any more
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
        """Cancel what still runs, run `farewell`, and end the thread. Does nothing once closed."""
        if self._is_closed:
            return
        self._is_closed = True
        ending = asyncio.run_coroutine_threadsafe(_end(farewell), self._loop)
        with suppress(TimeoutError):
            ending.result(_CLOSE_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _start(self, coro: Coroutine[Any, Any, T]) -> Future[T]:
        """Cancelling the future cancels the coroutine."""
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
    """Wait for it. Only the end of the loop cancels it."""
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
