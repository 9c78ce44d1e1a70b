"""The attempts of calls that were tried again: where each ran, and why it ended."""

from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from parrot.serve.events import CompletionRetried, Sink
from parrot.serve.graph.nodes import Completion
from parrot.utils.clock import Clock

_MAX_ATTEMPTS = 8  # The last attempts of one call are shown.


class EndedAttempt(NamedTuple):
    """An attempt that failed. Times are on the clock's scale."""

    number: int  # the first attempt is 1
    engine_name: str | None
    queued: float | None
    started: float | None
    ended: float
    why: str


class AttemptLog:
    """Remembers the failed attempts of completions, as long as the completions exist."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._ended: WeakKeyDictionary[Completion, list[EndedAttempt]] = WeakKeyDictionary()

    @property
    def sink(self) -> Sink:
        return {CompletionRetried: self._retried}

    def _retried(self, event: CompletionRetried) -> None:
        completion = event.completion
        ended = self._ended.setdefault(completion, [])
        queued = ended[-1].ended if ended else completion.times.ready
        stats, started = completion.stats, completion.times.started
        facts = (stats.attempts, stats.engine_name, queued, started)
        ended.append(EndedAttempt(*facts, ended=self._clock.now(), why=event.why))
        del ended[: 1 - _MAX_ATTEMPTS]

    def rows(self, completion: Completion, began: float) -> list[dict[str, Any]]:
        """All attempts, the last one included. `queued_s` and `ran_s` are durations. `started_s` is
        the time since `began`. None: not known yet."""
        ended, times = self._ended.get(completion, []), completion.times
        rows = [
            _row(one.engine_name, began, (one.queued, one.started, one.ended))
            | {"why_left": one.why}
            for one in ended
        ]
        if completion.stats.attempts > (ended[-1].number if ended else 0):
            queued = ended[-1].ended if ended else times.ready
            last = (queued, times.started, times.finished)
            rows.append(_row(completion.stats.engine_name, began, last) | {"why_left": None})
        return rows


def _row(
    engine_name: str | None, began: float, times: tuple[float | None, float | None, float | None]
) -> dict[str, Any]:
    queued, started, ended = times
    return {
        "engine": engine_name,
        "queued_s": _between(queued, started),
        "started_s": _between(began, started),
        "ran_s": _between(started, ended),
    }


def _between(start: float | None, end: float | None) -> float | None:
    return None if start is None or end is None else max(0.0, end - start)
