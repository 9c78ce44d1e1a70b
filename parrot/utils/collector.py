"""Limits the pauses of Python's garbage collector, which stops the process while it visits objects.

Reference counting frees nearly all objects of ServeCore. The garbage collector is only needed for
small cycles, mostly of exceptions, which die young. Therefore the survivors of a full collection
are frozen if there are more than 50,000: later collections skip them. Frozen garbage is only
collected when the process is small, or has been twice as large as before for an hour."""

import asyncio
import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self

from parrot.utils.clock import Clock, MonotonicClock

_YOUNG = 10_000  # New objects per young collection. One or two calls reach CPython's default, 700.
_MIDDLE = 4  # Threshold of CPython: each fifth young collection is a middle collection.
_OLD = 2  # Threshold of CPython: each third middle collection is a full collection.
_MOST_OLD = 50_000  # Survivors of a full collection above which they are frozen.
# Memory blocks above the number at the start, below which all objects are collected again. Most
# objects have one or two blocks.
_SMALL_BLOCKS = 100_000
_DOUBLED_S = 3600.0  # Seconds of doubled memory after which all objects are collected again.


class Collector:
    """Bounds each collection to about 250,000 objects while this context is entered. It visits all
    objects only when the process has few memory blocks, or has had twice as many blocks for an
    hour as after the last full visit. `call_soon` schedules a function in the event loop."""

    def __init__(
        self,
        call_soon: Callable[[Callable[[], None]], object],
        clock: Clock,
        *,
        young: int = _YOUNG,
        most_old: int = _MOST_OLD,
        num_blocks: Callable[[], int] = sys.getallocatedblocks,
    ) -> None:
        self._call_soon = call_soon
        self._clock = clock
        self._young = young
        self._most_old = most_old
        self._num_blocks = num_blocks
        self._small = self._base = 0  # Memory blocks.
        self._has_frozen = False  # Objects were frozen since the last visit of all objects.
        self._large_since: float | None = None
        self._is_due = False
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        """Freeze all current objects. Most belong to modules, which stay."""
        self._collect_all()
        self._has_frozen = True  # The replay of a journal has frozen its objects.
        self._small = self._base + _SMALL_BLOCKS
        gc.set_threshold(self._young, _MIDDLE, _OLD)
        gc.callbacks.append(self._on_gc)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._on_gc)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _on_gc(self, phase: str, info: dict[str, Any]) -> None:
        """Callback of `gc`, at the start and the stop of each collection, in any thread."""
        if phase == "start" or info["generation"] == 0:
            return
        if info["generation"] == 2 and len(gc.get_objects(generation=2)) > self._most_old:
            gc.freeze()
            self._has_frozen = True
        if self._has_frozen and not self._is_due and self._should_collect_all():
            self._is_due = True  # A collection cannot begin inside the callback of another.
            self._call_soon(self._collect_all)

    def _should_collect_all(self) -> bool:
        size, now = self._num_blocks(), self._clock.now()
        if size < 2 * self._base:
            self._large_since = None
        elif self._large_since is None:
            self._large_since = now
        is_kept = self._large_since is not None and now - self._large_since >= _DOUBLED_S
        return is_kept or size <= self._small

    def _collect_all(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        # CPython delays the next full collection until the survivors since the last one exceed 25%
        # of the objects that it visited. This collection visits almost none.
        gc.collect()
        self._base = self._num_blocks()
        self._large_since = None
        self._has_frozen = self._is_due = False


def bounded_collections() -> Collector:
    """The `Collector` for the running event loop."""
    return Collector(asyncio.get_running_loop().call_soon_threadsafe, MonotonicClock())


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable garbage collection in the block. All objects of the block stay alive, so collections
    would free nothing. Afterwards a `Collector`, if one is entered, skips these objects too."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            # To count the frozen objects would visit each of them.
            if any(isinstance(getattr(one, "__self__", None), Collector) for one in gc.callbacks):
                gc.freeze()
            gc.enable()
