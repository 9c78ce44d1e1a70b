"""Keeping those who look up to date: a view is read once for all of its viewers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from parrot.gateway.page.topic import Changes, ReadRows, Topic
from parrot.protocol.errors import QuotaExceeded
from parrot.utils.clock import Clock

_INTERVAL_S = 0.1  # between two updates
_LOAD = 0.01  # of the event loop's thread, at most, for all topics together
_MAX_SEND_S = 1e-3  # of a send; beyond that it has waited, and others have run
_MAX_VIEWERS = 256


@dataclass(slots=True, eq=False)
class _Watched:
    """`reader` reads it again and again, and `news` ends when there are changes, or raises why
    there are no more. `spent_s`: the CPU time that it and its viewers took since it was read."""

    topic: Topic
    news: "asyncio.Future[None]"
    reader: "asyncio.Task[None] | None" = None
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
        watched = self._watched.get(name) or self._watch(name, read)
        watched.num_viewers += 1
        self._num_viewers += 1
        try:
            while True:
                news, changes = watched.news, self._since(watched, since)
                if changes is None:
                    await asyncio.shield(news)
                    continue
                since, began = changes.version, self._cpu_time()
                yield changes.event
                watched.spent_s += min(self._cpu_time() - began, _MAX_SEND_S)
        finally:
            self._num_viewers -= 1
            watched.num_viewers -= 1
            if not watched.num_viewers:
                self._forget(name, watched)

    def _watch(self, name: object, read: ReadRows) -> _Watched:
        loop = asyncio.get_running_loop()
        watched = _Watched(Topic(read), loop.create_future())
        self._update(watched)
        self._watched[name] = watched
        watched.reader = loop.create_task(self._read(watched), name=f"feed of {name}")
        return watched

    def _forget(self, name: object, watched: _Watched) -> None:
        if watched.reader is not None:
            watched.reader.cancel()
        if self._watched.get(name) is watched:
            del self._watched[name]

    async def _read(self, watched: _Watched) -> None:
        """Read the view; an error of the reading is given to the viewers."""
        loop = asyncio.get_running_loop()
        while True:
            await self._pause(watched)
            try:
                has_changed = self._update(watched)
            except Exception as error:  # noqa: BLE001
                watched.news.set_exception(error)
                watched.news.exception()  # all may have gone
                return
            if has_changed:
                news, watched.news = watched.news, loop.create_future()
                news.set_result(None)

    async def _pause(self, watched: _Watched) -> None:
        """Until the time for the next reading. Viewers may spend more meanwhile."""
        began = self._clock.now()
        while True:
            pause_s = max(_INTERVAL_S, watched.spent_s * len(self._watched) / _LOAD)
            rest_s = began + pause_s - self._clock.now()
            if rest_s <= 0:
                return
            await self._clock.sleep(rest_s)

    def _update(self, watched: _Watched) -> bool:
        began = self._cpu_time()
        has_changed = watched.topic.update()
        watched.spent_s = self._cpu_time() - began
        return has_changed

    def _since(self, watched: _Watched, since: str | None) -> Changes | None:
        began = self._cpu_time()
        changes = watched.topic.since(since)
        watched.spent_s += self._cpu_time() - began
        return changes
