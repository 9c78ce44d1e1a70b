"""When a context will be used again, in predicted seconds.

Each reason why somebody may use it has a rate: one over the seconds until it is expected to come
true. The rates add up; the next use is expected after one over their sum.

    queued tasks                now
    completions that wait       when their inputs are predicted to be there
    the session's next call     the rest of the usual pause (see `PauseModel`)
    reuse so far                the mean time between uses, or the time since the last if longer
    anybody else                in a while, the later the longer nobody came"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from parrot.serve.contexts.index import Boundary, Context
from parrot.serve.contexts.think_time import PauseModel

_SOON_S = 0.5  # what is due or overdue is expected within this
_OPEN_END_S = 60.0  # what waits for the program itself, of which nothing is known
_UNUSED_S = 600.0  # a context that nobody is known to want


Forecast = Callable[[], float]
"""When a completion that waits will have its inputs, on the clock's scale; infinite: nobody
knows."""


@dataclass(slots=True)
class _Expectation:
    """Who will use a prefix. `waiting`: the first to wait is the first."""

    num_queued: int = 0
    waiting: dict[Forecast, None] = field(default_factory=dict)


class Expectations:
    """The prefix keys that queued and waiting completions will use, and when."""

    def __init__(self) -> None:
        self._expected: dict[bytes, _Expectation] = {}

    def add_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._of(key).num_queued += 1

    def remove_queued(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._expected[key].num_queued -= 1
            self._tidy(key)

    def add_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._of(key).waiting[forecast] = None

    def remove_waiting(self, keys: Iterable[bytes], forecast: Forecast) -> None:
        for key in keys:
            self._expected[key].waiting.pop(forecast)
            self._tidy(key)

    def soonest(self, boundaries: Iterable[Boundary], now: float) -> float | None:
        """When the first of them is used; None if none is expected to be."""
        soonest = None
        for boundary in boundaries:
            expectation = self._expected.get(boundary.key)
            if expectation is not None:
                when = now if expectation.num_queued else next(iter(expectation.waiting))()
                soonest = when if soonest is None else min(soonest, when)
        return soonest

    def check_integrity(self, counts: Mapping[bytes, int]) -> None:
        """`counts`: how many completions, queued or waiting, would use each key."""
        own = {key: e.num_queued + len(e.waiting) for key, e in self._expected.items()}
        assert own == counts, (own, counts)

    def _of(self, key: bytes) -> _Expectation:
        return self._expected.setdefault(key, _Expectation())

    def _tidy(self, key: bytes) -> None:
        expectation = self._expected[key]
        if not expectation.num_queued and not expectation.waiting:
            del self._expected[key]


class NextUse:
    """Predicts by what is expected and what was learnt."""

    def __init__(self, expectations: Expectations, pauses: PauseModel) -> None:
        self._expectations = expectations
        self._pauses = pauses

    def predict(self, context: Context, now: float) -> float:
        """When it is expected to be used, on the clock's scale."""
        idle_s = now - context.last_used
        rate = 1 / (_UNUSED_S + idle_s)
        when = self._expectations.soonest(context.boundaries, now)
        if when is not None:
            rate += 1 / min(max(when - now, _SOON_S), _OPEN_END_S)
        num_forks = context.num_forks
        if context.awaiting is not None:
            source, since = context.awaiting
            rate += 1 / max(self._pauses.rest_s(source, now - since), _SOON_S)
            num_forks -= 1  # the session's own next call
        if num_forks > 0:
            between_s = (context.last_used - context.opened_at) / num_forks
            rate += 1 / max(between_s, idle_s, _SOON_S)
        return now + 1 / rate
