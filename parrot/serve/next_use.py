"""When a context will be used again, in predicted seconds.

Each reason why somebody may use it has a rate: one over the seconds until it is expected to come
true. The rates add up; the next use is expected after one over their sum.

    queued tasks                now
    completions that wait       when their inputs are predicted to be there
    the session's next call     the rest of the usual pause (see `PauseModel`)
    reuse so far                the mean time between uses, or the time since the last if longer
    anybody else                in a while, the later the longer nobody came"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from parrot.serve.context_index import Boundary, Context
from parrot.serve.pauses import PauseModel

_SOON_S = 0.5  # what is due or overdue is expected within this
_OPEN_END_S = 60.0  # what waits for the program itself, of which nothing is known
_UNUSED_S = 600.0  # a context that nobody is known to want


@dataclass(slots=True)
class _Expectation:
    """`soonest`: of all since the key was last not expected at all."""

    count: int
    soonest: float


class Expectations:
    """The prefix keys that queued and waiting completions will use, and when."""

    def __init__(self) -> None:
        self._expected: dict[bytes, _Expectation] = {}

    def add(self, key: bytes, when: float) -> None:
        """`when` is on the clock's scale; infinite: nobody knows."""
        known = self._expected.get(key)
        if known is None:
            self._expected[key] = _Expectation(1, when)
        else:
            known.count += 1
            known.soonest = min(known.soonest, when)

    def remove(self, keys: Iterable[bytes]) -> None:
        """Take back one `add` of each key."""
        for key in keys:
            known = self._expected[key]
            known.count -= 1
            if not known.count:
                del self._expected[key]

    def soonest(self, boundaries: Iterable[Boundary]) -> float | None:
        """When the first of them is used; None if none is expected to be."""
        found = [
            known.soonest
            for boundary in boundaries
            if (known := self._expected.get(boundary.key)) is not None
        ]
        return min(found) if found else None

    def check_integrity(self, counts: Mapping[bytes, int]) -> None:
        own = {key: known.count for key, known in self._expected.items()}
        assert own == counts, (own, counts)


class NextUse:
    """Predicts by what is expected and what was learnt."""

    def __init__(self, expectations: Expectations, pauses: PauseModel) -> None:
        self._expectations = expectations
        self._pauses = pauses

    def predict(self, context: Context, now: float) -> float:
        """When it is expected to be used, on the clock's scale."""
        idle_s = now - context.last_used
        rate = 1 / (_UNUSED_S + idle_s)
        when = self._expectations.soonest(context.boundaries)
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
