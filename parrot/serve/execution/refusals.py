"""Engines that refuse calls, because they or their servers are full.

    429, Retry-After: 20     no new calls for 20 s
    429 with 10 calls there  at most 10 calls, for 0.5 s; then at most 20, and so on
    429 without calls there  no new calls for 0.5 s

Calls that wait stay in the queue, so they run on another engine as soon as one has room."""

from collections.abc import Callable
from dataclasses import dataclass

from parrot.serve.scheduling.load import LoadIndex
from parrot.utils.heaps import Timer, TimerQueue

_FIRST_PAUSE_S = 0.5  # Seconds until the limit is raised, without a `Retry-After`.
_MAX_PAUSE_S = 8.0  # Consecutive refusals double the pause up to this number of seconds.
_MAX_RETRY_AFTER_S = 60.0  # Longest `Retry-After` that is obeyed, in seconds.
_FIRST_LIMIT = 4  # Calls that an engine gets at most after a pause without calls.


@dataclass(frozen=True, slots=True)
class _Pause:
    seconds: float
    until: float
    timer: Timer


class Refusals:
    """Limits the calls on engines that refused one."""

    def __init__(self, timers: TimerQueue, loads: LoadIndex, wake: Callable[[], None]) -> None:
        self._timers = timers
        self._loads = loads
        self._wake = wake
        self._pauses: dict[int, _Pause] = {}  # By engine id.

    def refused(self, engine_id: int, retry_after_s: float | None) -> None:
        """The engine refused a call. The call's load was removed before."""
        load = self._loads.get(engine_id)
        if load is None:
            return
        now, before = self._timers.clock.now(), self._pauses.get(engine_id)
        seconds = _FIRST_PAUSE_S
        if before is not None:
            # A call that is refused during the pause was sent before it.
            is_same = now < before.until
            seconds = before.seconds if is_same else min(2 * before.seconds, _MAX_PAUSE_S)
        until = now + seconds
        limit = min(load.num_tasks, load.num_slots)
        if retry_after_s is not None:
            until, limit = now + min(retry_after_s, _MAX_RETRY_AFTER_S), 0
        self._loads.set_slots(load, limit)
        self._pause(engine_id, seconds, until if before is None else max(until, before.until))

    def engine_lost(self, engine_id: int) -> None:
        if (pause := self._pauses.pop(engine_id, None)) is not None:
            pause.timer.cancel()

    def _pause(self, engine_id: int, seconds: float, until: float) -> None:
        if (before := self._pauses.get(engine_id)) is not None:
            before.timer.cancel()
        timer = self._timers.call_at(until, lambda: self._raise_limit(engine_id))
        self._pauses[engine_id] = _Pause(seconds, until, timer)

    def _raise_limit(self, engine_id: int) -> None:
        load = self._loads.get(engine_id)
        assert load is not None, engine_id
        self._loads.set_slots(load, max(_FIRST_LIMIT, 2 * load.num_slots))
        if load.num_slots < load.max_tasks:
            pause = self._pauses[engine_id]
            self._pause(engine_id, pause.seconds, self._timers.clock.now() + pause.seconds)
        else:
            del self._pauses[engine_id]
        self._wake()
