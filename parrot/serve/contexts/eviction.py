"""Orders of eviction: which idle context goes first."""

from collections.abc import Callable, Collection
from itertools import islice

from parrot.serve.contexts.index import Context
from parrot.utils.clock import Clock
from parrot.utils.heaps import LazyHeap, LruDict

_REVIEW = 0.25  # a prediction is made anew after this part of the time to the next use
_SOONER = 0.9  # a use expected within this part of the predicted time changes the order
_MIN_REVIEW_S = 0.05
_MAX_LOOKS = 8  # predictions made anew before one context is evicted, of either kind
_MAX_FIRST_LOOKS = 64  # likewise, of contexts that have no prediction yet


class LeastRecentlyUsed:
    """Orders one engine's idle contexts: those without users and forks."""

    def __init__(self) -> None:
        self._idle: LruDict[int, Context] = LruDict()

    def add(self, context: Context, *, recent: bool) -> None:
        """It is idle now, or was already and has moved. `recent`: it was used just now; else only
        what was forked from it has gone."""
        self._idle.put(context.id, context)
        self._idle.touch(context.id, newest=recent)

    def discard(self, context: Context) -> None:
        """It is not idle any more, or gone."""
        self._idle.pop(context.id)

    def first(self) -> Context | None:
        """The one to evict; None if none is idle."""
        oldest = self._idle.oldest()
        return None if oldest is None else oldest[1]

    def context_ids(self) -> Collection[int]:
        return self._idle.keys()


class FarthestNextUse:
    """Orders them by the predicted time of the next use. Nothing is predicted while there is room:
    an eviction looks at some of those that became idle since the last one, the oldest first.
    Predictions age: each is made anew after a part of the time that it spans, and before anything
    is evicted by it, a few at a time. Two heaps: an eviction takes O(log n) of all idle ones."""

    def __init__(self, predict: Callable[[Context, float], float], clock: Clock) -> None:
        self._predict = predict
        self._clock = clock
        self._fresh: dict[Context, None] = {}  # idle ones without a prediction yet
        self._farthest: LazyHeap[Context, float] = LazyHeap()  # the others, by minus the next use
        self._reviews: LazyHeap[Context, float] = LazyHeap()

    def add(self, context: Context, *, recent: bool) -> None:
        self.discard(context)
        self._fresh[context] = None

    def discard(self, context: Context) -> None:
        self._fresh.pop(context, None)
        self._farthest.discard(context)
        self._reviews.discard(context)

    def first(self) -> Context | None:
        now = self._clock.now()
        for context in list(islice(self._fresh, _MAX_FIRST_LOOKS)):
            self._file(context, now)
        looks = 0
        while (due := self._reviews.top()) and due[0] <= now and looks < _MAX_LOOKS:
            self._file(due[1], now)
            looks += 1
        looks = 0
        while (top := self._farthest.top()) is not None:
            rest_s, context = -top[0] - now, top[1]
            if looks == _MAX_LOOKS or self._predict(context, now) - now >= _SOONER * rest_s:
                return context
            self._file(context, now)  # it is expected sooner by now
            looks += 1
        return None

    def context_ids(self) -> Collection[int]:
        return {context.id for context in (*self._fresh, *self._farthest)}

    def _file(self, context: Context, now: float) -> None:
        self._fresh.pop(context, None)
        when = self._predict(context, now)
        self._farthest.set(context, -when)
        self._reviews.set(context, now + max(_MIN_REVIEW_S, _REVIEW * (when - now)))


EvictionOrder = LeastRecentlyUsed | FarthestNextUse
