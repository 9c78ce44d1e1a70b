"""Keeping those who look up to date: a view is rows with versions, so that whoever looks is sent
what has changed since, and is read once for all of its viewers."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from parrot.protocol.errors import QuotaExceeded
from parrot.utils.clock import Clock
from parrot.utils.ids import new_token

Rows = Mapping[str, Mapping[str, Any]]
ReadRows = Callable[[], Rows]

_MAX_GONE = 4096  # rows that are remembered to be gone
_INTERVAL_S = 0.1  # between two updates
_LOAD = 0.01  # of the event loop's thread, at most, for all topics together
_MAX_SEND_S = 1e-3  # of a send; beyond that it has waited, and others have run
_MAX_VIEWERS = 256


class Changes(NamedTuple):
    """The changes since an earlier version. `event`: a server-sent event `changes`, whose data is
    `{version, whole, rows, gone}`; `whole`: these are all rows there are, and whatever was known
    before is void."""

    version: str
    event: bytes


class Topic:
    """The rows that `read` gives, each with the number of the update in which it last changed.

    A version is a number of an update, behind a name that no other topic has: whoever comes with
    another topic's version, of before a restart for example, gets all rows."""

    def __init__(self, read: ReadRows) -> None:
        self._read = read
        self._epoch = new_token()
        self._number = 0
        self._rows: dict[str, tuple[int, bytes]] = {}
        self._gone: dict[str, int] = {}  # in order of their numbers
        self._forgotten = 0  # rows that went in this update, or earlier, may be unknown
        self._made: dict[int, Changes] = {}  # since which update, for who comes next

    @property
    def version(self) -> str:
        return f"{self._epoch}-{self._number}"

    def update(self) -> bool:
        """Read the rows again; returns whether any has changed."""
        fresh = {key: orjson.dumps(row) for key, row in self._read().items()}
        number = self._number + 1
        known = self._rows
        changed = {
            key: (number, text)
            for key, text in fresh.items()
            if key not in known or known[key][1] != text
        }
        gone = [key for key in known if key not in fresh]
        if not changed and not gone:
            return False
        self._number = number
        self._made.clear()
        for key in gone:
            del known[key]
            self._gone[key] = number
        for key in changed:
            self._gone.pop(key, None)
        known.update(changed)
        while len(self._gone) > _MAX_GONE:
            self._forgotten = self._gone.pop(next(iter(self._gone)))
        return True

    def since(self, version: str | None) -> Changes | None:
        """The changes since `version`; all rows if that is unknown or too old; None if nothing
        has."""
        number = self._number_of(version)
        if number is None or number < self._forgotten:
            number = -1
        elif number == self._number:
            return None
        if (changes := self._made.get(number)) is None:
            changes = self._made[number] = self._changes(number)
        return changes

    def _changes(self, number: int) -> Changes:
        """The changes behind an update; all rows for -1."""
        gone = [key for key, at in self._gone.items() if at > number >= 0]
        rows = {key: orjson.Fragment(text) for key, (at, text) in self._rows.items() if at > number}
        payload = {"version": self.version, "whole": number < 0, "rows": rows, "gone": gone}
        return Changes(self.version, b"event: changes\ndata: %b\n\n" % orjson.dumps(payload))

    def _number_of(self, version: str | None) -> int | None:
        epoch, _, number = (version or "").rpartition("-")
        if epoch != self._epoch or not number.isascii() or not number.isdigit():
            return None
        return int(number) if len(number) < 16 and int(number) <= self._number else None


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
