"""Python's collector of garbage, which stops the process while it looks at objects: never at many
of them, however many are alive.

Nearly all that ServeCore drops is freed without it, a session's graph in slices. What is left are
cycles of a few objects each, mostly of exceptions, that soon die. So what has survived a collection
of the oldest generation is frozen if it is much: later ones pass over it. Garbage among that is
looked for when there is little to look at, or when so much has been kept for long that it may be
garbage."""

import asyncio
import gc
import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from parrot.utils.clock import Clock, MonotonicClock

_YOUNG = 10_000  # objects; the interpreter's 700 are a call's or two
_MIDDLE = 4  # collections of those in which some survive, and ...
_OLD = 2  # ... of survivors, before the oldest are looked at, too
_MOST_OLD = 50_000  # objects that are looked at again and again
_FEW = 100_000  # blocks of memory more than at first: most objects have one or two
_KEPT_S = 3600.0


class Collector:
    """Bounds collections while it is entered. `call_soon` calls a function in the event loop, from
    any thread. A turn of the collector is for at most 0.25 million objects, except that it looks
    at all

    - when there are few,
    - when an hour long there were twice as many blocks of memory as after it last did."""

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
        self._few = self._base = 0  # blocks
        self._has_frozen = False  # something that was not there when it last looked at all
        self._large_since: float | None = None
        self._is_due = False
        self._thresholds = gc.get_threshold()

    def __enter__(self) -> Self:
        """Pass over all that there is now: mostly modules, which stay."""
        self._collect_all()
        self._has_frozen = True  # whoever restores a journal freezes what it has
        self._few = self._base + _FEW
        gc.set_threshold(self._young, _MIDDLE, _OLD)
        gc.callbacks.append(self._after)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        gc.callbacks.remove(self._after)
        gc.set_threshold(*self._thresholds)
        gc.unfreeze()

    def _after(self, phase: str, info: dict[str, Any]) -> None:
        """A collection begins or has ended, in any thread."""
        if phase == "start" or info["generation"] == 0:
            return
        if info["generation"] == 2 and len(gc.get_objects(generation=2)) > self._most_old:
            gc.freeze()
            self._has_frozen = True
        if self._has_frozen and not self._is_due and self._is_worth_it():
            self._is_due = True  # none can begin within another
            self._call_soon(self._collect_all)

    def _is_worth_it(self) -> bool:
        size, now = self._num_blocks(), self._clock.now()
        if size < 2 * self._base:
            self._large_since = None
        elif self._large_since is None:
            self._large_since = now
        is_kept = self._large_since is not None and now - self._large_since >= _KEPT_S
        return is_kept or size <= self._few

    def _collect_all(self) -> None:
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        gc.collect()  # the next of the oldest waits for a quarter of what this one looks at
        self._base = self._num_blocks()
        self._large_since = None
        self._has_frozen = self._is_due = False


def bounded_collections() -> Collector:
    """A collector of this process, for the running event loop."""
    return Collector(asyncio.get_running_loop().call_soon_threadsafe, MonotonicClock())
