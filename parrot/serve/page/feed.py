"""Keeping those who look up to date: a view is read once for all of its viewers."""

import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from parrot.protocol.errors import QuotaExceeded
from parrot.serve.page.topic import Changes, ReadRows, Topic
from parrot.utils.clock import Clock

_INTERVAL_S = 0.1  # between two updates
_LOAD = 0.01  # of the event loop's thread, at most, for all topics together
_MAX_SEND_S = 1e-3  # of a send; beyond that it has waited, and others have run
_MAX_VIEWERS = 256


@dataclass(slots=True, eq=False)
class _Watched:
    """`read_at`: when it was read last, and `due`: when it may be again. `spent_s`: the CPU time
    that it and its viewers took since."""

    topic: Topic
    due: float
    read_at: float = 0.0
    spent_s: float = 0.0
    num_viewers: int = 0


class Feed:
    """Owns the topics that somebody looks at, by their names. A topic is read ten times a second,
    or less often if that and sending it take long, so that a look at a large graph, or many who
    look, slow no program down. When its last viewer has gone the topic is forgotten."""

    def __init__(self, clock: Clock, cpu_time: Callable[[], float] = time.thread_time) -> None:
        """`cpu_time`: of the thread, since that is what programs lose; on a busy machine a reading
        may last much longer."""
        self._clock = clock
        self._cpu_time = cpu_time
        self._watched: dict[object, _Watched] = {}
        self._num_viewers = 0

    def __len__(self) -> int:
        return len(self._watched)

    async def changes(
        self, name: object, read: ReadRows, since: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield the changes of a topic since a version, whenever there are some, for ever:
        server-sent events, the same bytes for all who know as much. Raises what `read` raises, and
        `QuotaExceeded` when too many look already."""
        if self._num_viewers >= _MAX_VIEWERS:
            raise QuotaExceeded(f"{_MAX_VIEWERS} views of the page are open already")
        now = self._clock.now()
        watched = self._watched.setdefault(name, _Watched(Topic(read), due=now))
        watched.num_viewers += 1
        self._num_viewers += 1
        try:
            while True:
                if (changes := self._next(watched, since)) is not None:
                    since, began = changes.version, self._cpu_time()
                    yield changes.event
                    self._spent(watched, min(self._cpu_time() - began, _MAX_SEND_S))
                await self._clock.sleep(max(0.0, watched.due - self._clock.now()))
        finally:
            self._num_viewers -= 1
            watched.num_viewers -= 1
            if not watched.num_viewers:
                del self._watched[name]

    def _next(self, watched: _Watched, since: str | None) -> Changes | None:
        """What has changed, read anew if it is time to."""
        now, began = self._clock.now(), self._cpu_time()
        if now >= watched.due:
            watched.topic.update()
            watched.read_at, watched.spent_s, watched.due = now, 0.0, now + _INTERVAL_S
        changes = watched.topic.since(since)
        self._spent(watched, self._cpu_time() - began)
        return changes

    def _spent(self, watched: _Watched, seconds: float) -> None:
        watched.spent_s += seconds
        pause_s = watched.spent_s * len(self._watched) / _LOAD
        watched.due = max(watched.due, watched.read_at + pause_s)
