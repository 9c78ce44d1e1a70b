"""Which idle context is evicted first."""

import heapq
from collections import OrderedDict
from collections.abc import Callable, Collection
from itertools import count, islice
from typing import Protocol

from parrot.serve.contexts.index import Context
from parrot.utils.clock import Clock

_REVIEW = 0.25  # of the predicted time to the next use: until it is predicted anew
_SOONER = 0.9  # of the predicted time: then something new is known, and the order may change
_MIN_REVIEW_S = 0.05
_NO_ENTRY = -1
_MAX_LOOKS = 8  # predictions made anew before one context is evicted, of either kind
_MAX_FIRST_LOOKS = 64  # likewise, of contexts that have no prediction yet
_MAX_STALE = 64  # entries of contexts that are not idle any more, besides as many as there are idle


class EvictionOrder(Protocol):
    """One engine's idle contexts."""

    def add(self, context: Context, *, recent: bool) -> None:
        """It is idle now. `recent`: it was used just now; else only what was forked from it has
        gone. No effect but that if it was idle before."""
        ...

    def discard(self, context: Context) -> None:
        """It is not idle any more, or gone."""
        ...

    def first(self) -> Context | None:
        """The one to evict; None if none is idle."""
        ...

    def context_ids(self) -> Collection[int]: ...


class LeastRecentlyUsed:
    def __init__(self) -> None:
        self._idle: OrderedDict[int, Context] = OrderedDict()

    def add(self, context: Context, *, recent: bool) -> None:
        self._idle[context.id] = context
        self._idle.move_to_end(context.id, last=recent)

    def discard(self, context: Context) -> None:
        self._idle.pop(context.id, None)

    def first(self) -> Context | None:
        return next(iter(self._idle.values()), None)

    def context_ids(self) -> Collection[int]:
        return self._idle.keys()


class FarthestNextUse:
    """By the predicted time of the next use. Nothing is predicted while there is room: an eviction
    looks at some of those that became idle since the last one, the oldest first. Predictions age:
    each is made anew after a part of the time that it spans, and before anything is evicted by it,
    a few at a time. Two heaps: O(log n) for an eviction, however many contexts are idle."""

    def __init__(self, predict: Callable[[Context, float], float], clock: Clock) -> None:
        self._predict = predict
        self._clock = clock
        self._entries = count()
        self._idle: dict[int, int] = {}  # context id -> its valid entry
        self._fresh: dict[int, Context] = {}  # of these, those without a prediction yet
        self._farthest: list[tuple[float, int, Context]] = []  # by minus the next use
        self._reviews: list[tuple[float, int, Context]] = []

    def add(self, context: Context, *, recent: bool) -> None:
        self._fresh[context.id] = context
        self._idle[context.id] = _NO_ENTRY

    def discard(self, context: Context) -> None:
        self._idle.pop(context.id, None)
        self._fresh.pop(context.id, None)

    def first(self) -> Context | None:
        now = self._clock.now()
        for context in list(islice(self._fresh.values(), _MAX_FIRST_LOOKS)):
            self._file(context, now)
        self._review(now)
        looks = 0
        while (top := self._top()) is not None:
            rest_s, context = -top[0] - now, top[2]
            if looks == _MAX_LOOKS or self._predict(context, now) - now >= _SOONER * rest_s:
                return context
            self._file(context, now)  # it is expected sooner by now
            looks += 1
        return None

    def context_ids(self) -> Collection[int]:
        return self._idle.keys()

    def _review(self, now: float) -> None:
        looks = 0
        while self._reviews and self._reviews[0][0] <= now and looks < _MAX_LOOKS:
            _, entry, context = heapq.heappop(self._reviews)
            if self._idle.get(context.id) == entry:
                self._file(context, now)
                looks += 1

    def _top(self) -> tuple[float, int, Context] | None:
        """The valid entry that is predicted farthest."""
        while self._farthest:
            if self._idle.get(self._farthest[0][2].id) == self._farthest[0][1]:
                return self._farthest[0]
            heapq.heappop(self._farthest)
        return None

    def _file(self, context: Context, now: float) -> None:
        self._fresh.pop(context.id, None)
        when = self._predict(context, now)
        entry = self._idle[context.id] = next(self._entries)
        heapq.heappush(self._farthest, (-when, entry, context))
        review_s = max(_MIN_REVIEW_S, _REVIEW * (when - now))
        heapq.heappush(self._reviews, (now + review_s, entry, context))
        for heap in (self._farthest, self._reviews):
            if len(heap) > _MAX_STALE + 2 * len(self._idle):
                heap[:] = [item for item in heap if self._idle.get(item[2].id) == item[1]]
                heapq.heapify(heap)
