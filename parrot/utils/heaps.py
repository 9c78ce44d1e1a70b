"""A heap with changeable keys, a queue of timers with one sleeping task, and a bounded LRU
dictionary."""

import asyncio
import heapq
import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, KeysView
from itertools import count
from typing import Generic, TypeVar

from parrot.utils.clock import Clock
from parrot.utils.tasks import TaskSet

logger = logging.getLogger(__name__)

T = TypeVar("T", bound=Hashable)
K = TypeVar("K", bound=Hashable)
V = TypeVar("V")
Key = TypeVar("Key", float, tuple[float, ...])

_MIN_STALE = 64  # Stale entries below which a heap is not swept.


class LazyHeap(Generic[T, Key]):
    """A priority queue whose items can get new keys and be removed. Items with equal keys are in
    the order in which the keys were set.

    A changed item leaves a stale entry, which is dropped at the top or when most entries are stale.
    Operations take amortised O(log n). Items are compared by hash and equality only."""

    __slots__ = ("_heap", "_numbers", "_valid")

    def __init__(self) -> None:
        self._numbers = count()
        self._valid: dict[T, tuple[Key, int]] = {}
        self._heap: list[tuple[Key, int, T]] = []

    def __len__(self) -> int:
        return len(self._valid)

    def __contains__(self, item: object) -> bool:
        return item in self._valid

    def __iter__(self) -> Iterator[T]:
        """Yield all items, in no particular order."""
        return iter(self._valid)

    def key(self, item: T) -> Key:
        """The item's current key. Raises `KeyError` for an unknown item."""
        return self._valid[item][0]

    def set(self, item: T, key: Key) -> None:
        """Insert the item or change its key. An unchanged key keeps the item's position among items
        with equal keys."""
        valid, heap = self._valid, self._heap
        known = valid.get(item)
        if known is not None and known[0] == key:
            return
        number = next(self._numbers)
        valid[item] = (key, number)
        heapq.heappush(heap, (key, number, item))
        if len(heap) > _MIN_STALE + 2 * len(valid):
            self._sweep()

    def discard(self, item: T) -> None:
        """Remove the item if the heap has it."""
        if self._valid.pop(item, None) is None:
            return
        if not self._valid:
            self._heap.clear()
        elif len(self._heap) > _MIN_STALE + 2 * len(self._valid):
            self._sweep()

    def top(self) -> tuple[Key, T] | None:
        """The smallest key and its item; None if the heap is empty."""
        heap = self._heap
        while heap:
            key, number, item = heap[0]
            known = self._valid.get(item)
            if known is not None and known[1] == number:
                return key, item
            heapq.heappop(heap)
        return None

    def is_before_others(self, key: Key) -> bool:
        """Whether no item except the top has a key smaller than `key`. Call `top` first. Stale
        entries can make the result False although no item has a smaller key."""
        return all(key <= entry[0] for entry in self._heap[1:3])

    def pop(self) -> tuple[Key, T] | None:
        """Remove and return the smallest key and its item; None if the heap is empty."""
        if (top := self.top()) is not None:
            heapq.heappop(self._heap)
            del self._valid[top[1]]
        return top

    def pop_until(self, limit: Key) -> Iterator[T]:
        """Remove and yield all items with keys up to `limit`, including items that are set during
        the iteration."""
        while (top := self.top()) is not None and top[0] <= limit:
            heapq.heappop(self._heap)
            del self._valid[top[1]]
            yield top[1]

    def smallest(self, num_items: int) -> list[T]:
        """The first `num_items` items in order, or all if there are fewer."""
        found: list[tuple[Key, int, T]] = []
        while len(found) < num_items and self.top() is not None:
            found.append(heapq.heappop(self._heap))
        for entry in found:
            heapq.heappush(self._heap, entry)
        return [entry[2] for entry in found]

    def clear(self) -> None:
        self._valid.clear()
        self._heap.clear()

    def _sweep(self) -> None:
        self._heap = [(key, number, item) for item, (key, number) in self._valid.items()]
        heapq.heapify(self._heap)


class LruDict(Generic[K, V]):
    """A dictionary that drops the least recently used values when it exceeds `max_weight`.

    `weigh` gives the weight of a value, which must not change. Without `weigh` each value weighs 1.
    `max_weight` None: no limit; the owner calls `pop_oldest`. A value heavier than `max_weight` is
    not stored and evicts no other value."""

    __slots__ = ("_items", "_max_weight", "_weigh", "peek", "weight")

    def __init__(
        self, max_weight: int | None = None, weigh: Callable[[V], int] | None = None
    ) -> None:
        self._items: OrderedDict[K, V] = OrderedDict()
        self.peek: Callable[[K], V | None] = self._items.get
        """Returns the key's value, or None. Does not count as a use."""
        self._max_weight = max_weight
        self._weigh = weigh
        self.weight = 0  # Sum of the values' weights.

    def __len__(self) -> int:
        return len(self._items)

    def __contains__(self, key: object) -> bool:
        return key in self._items

    def __iter__(self) -> Iterator[K]:
        """Yield the keys, least recently used first."""
        return iter(self._items)

    def get(self, key: K) -> V | None:
        """The key's value, or None. Counts as a use."""
        value = self._items.get(key)
        if value is not None:
            self._items.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Insert or replace the value as the most recently used one. The value must not be None."""
        assert value is not None, key
        if key in self._items:
            self.pop(key)
        weight = 1 if self._weigh is None else self._weigh(value)
        if self._max_weight is not None and weight > self._max_weight:
            return
        self._items[key] = value
        self.weight += weight
        while self._max_weight is not None and self.weight > self._max_weight:
            self.pop_oldest()

    def touch(self, key: K, *, newest: bool = True) -> None:
        """Make the key the most recently used one, or the least recently used one if `newest` is
        False. Raises `KeyError` for an unknown key."""
        self._items.move_to_end(key, last=newest)

    def pop(self, key: K) -> V | None:
        """Remove and return the key's value; None if there is none."""
        value = self._items.pop(key, None)
        if value is not None:
            self.weight -= 1 if self._weigh is None else self._weigh(value)
        return value

    def oldest(self) -> tuple[K, V] | None:
        """The least recently used key and its value; None if there is none."""
        return next(iter(self._items.items()), None)

    def pop_oldest(self) -> tuple[K, V] | None:
        """Remove and return the least recently used key and its value; None if there is none."""
        if (oldest := self.oldest()) is not None:
            self.pop(oldest[0])
        return oldest

    def keys(self) -> KeysView[K]:
        """A set-like view of the keys, least recently used first."""
        return self._items.keys()

    def values(self) -> Iterator[V]:
        """Yield the values, least recently used first."""
        return iter(self._items.values())

    def clear(self) -> None:
        self._items.clear()
        self.weight = 0


class Timer:
    """A callback that runs at `when` unless it is cancelled first."""

    __slots__ = ("_timers", "callback", "when")

    def __init__(
        self, timers: "LazyHeap[Timer, float]", when: float, callback: Callable[[], None]
    ) -> None:
        self._timers = timers
        self.when = when
        self.callback = callback

    def cancel(self) -> None:
        """Cancel the timer, in any state, and release its callback."""
        self._timers.discard(self)
        self.callback = _nothing  # The heap keeps a stale entry with this timer.


def _nothing() -> None:
    pass


class TimerQueue:
    """Runs callbacks at times of a clock. One task sleeps while any timer is set. An exception of a
    callback is logged and does not affect other timers."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._timers: LazyHeap[Timer, float] = LazyHeap()
        self._tasks = TaskSet()
        self._sleeper: asyncio.Task[None] | None = None
        self._sleeping_until: float | None = None

    def __len__(self) -> int:
        return len(self._timers)

    def call_at(self, when: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self._timers, when, callback)
        self._timers.set(timer, when)
        if self._sleeping_until is None or when < self._sleeping_until:
            if self._sleeper is not None:
                self._sleeper.cancel()
            self._sleeping_until = when
            self._sleeper = self._tasks.spawn(self._run(), name="timers")
        return timer

    async def close(self) -> None:
        """Cancel all timers."""
        self._timers.clear()
        await self._tasks.close()

    async def _run(self) -> None:
        while (first := self._timers.top()) is not None:
            self._sleeping_until = first[0]
            await self.clock.sleep(max(0.0, first[0] - self.clock.now()))
            for timer in self._timers.pop_until(self.clock.now()):
                try:
                    timer.callback()
                except Exception:
                    logger.exception("a timer's callback failed")
        self._sleeping_until = None
