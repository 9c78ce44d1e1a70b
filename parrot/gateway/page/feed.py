"""Live updates of the page. A view is a set of rows with versions. Each viewer receives the rows
that changed since its own version, and each view is read once for all of its viewers."""

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

# Removed rows whose keys a topic remembers. Viewers with an older version receive all rows again.
_MAX_REMOVED = 4096
_INTERVAL_S = 0.1  # Shortest time between two updates of a view, in seconds.
# Largest share of the event loop's CPU time that all topics together may use. More updates views of
# large graphs more often, and slows the calls of programs.
_LOAD = 0.01
# Longest CPU time that is charged for sending one update. A longer time includes other tasks.
_MAX_SEND_S = 1e-3
_MAX_VIEWERS = 256  # Views that may be open at the same time. More are rejected.


class Changes(NamedTuple):
    """The rows that changed since an earlier version. `event` is a server-sent event `changes` with
    the data `{version, whole, rows, gone}`. `whole` means that `rows` replaces all earlier rows."""

    version: str
    event: bytes


class Topic:
    """The rows that `read` returns, each with the number of the update that last changed it.

    A version is an update's number after a random name of the topic. A version of another topic,
    for example from before a restart, is unknown, and its viewer receives all rows."""

    def __init__(self, read: ReadRows) -> None:
        """If `read` returns the same object again, its rows have not changed."""
        self._read = read
        self._last: Rows | None = None  # of the last update
        self._epoch = new_token()
        self._number = 0
        self._rows: dict[str, tuple[int, bytes]] = {}
        self._removed: dict[
            str, int
        ] = {}  # removed keys and their updates, in order of the updates
        self._forgotten = 0  # removals in updates up to this number may no longer be in `_removed`
        self._made: dict[int, Changes] = {}  # by starting update, to reuse for other viewers

    @property
    def version(self) -> str:
        return f"{self._epoch}-{self._number}"

    def update(self) -> bool:
        """Read the rows again. Returns whether any row has changed."""
        read = self._read()
        if read is self._last:
            return False
        self._last = read
        fresh = {key: orjson.dumps(row) for key, row in read.items()}
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
            self._removed[key] = number
        for key in changed:
            self._removed.pop(key, None)
        known.update(changed)
        while len(self._removed) > _MAX_REMOVED:
            self._forgotten = self._removed.pop(next(iter(self._removed)))
        return True

    def since(self, version: str | None) -> Changes | None:
        """The changes since `version`. All rows if the version is unknown or too old, None if
        nothing has changed."""
        number = self._number_of(version)
        if number is None or number < self._forgotten:
            number = -1
        elif number == self._number:
            return None
        if (changes := self._made.get(number)) is None:
            changes = self._made[number] = self._changes(number)
        return changes

    def _changes(self, number: int) -> Changes:
        """The changes after update `number`; all rows for -1."""
        gone = [key for key, at in self._removed.items() if at > number >= 0]
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
    """A topic with viewers, and the task that reads it."""

    topic: Topic
    # Done at the next change. Fails with the error of `read`, which ends the feed of each viewer.
    news: "asyncio.Future[None]"
    reader: "asyncio.Task[None] | None" = None  # updates the topic
    spent_s: float = 0.0  # CPU seconds of the last update and of sending it to the viewers
    num_viewers: int = 0


class Feed:
    """Owns the topics that have viewers, by name. A topic is read every 0.1 s, or less often if all
    topics would otherwise use more than 1% of the thread's CPU time. So large graphs and many
    viewers do not slow programs down. A topic is removed with its last viewer."""

    def __init__(self, clock: Clock, cpu_time: Callable[[], float] = time.thread_time) -> None:
        """`cpu_time`: CPU seconds of this thread, because only these are lost to programs. On a
        busy machine, wall time would be much longer."""
        self._clock = clock
        self._cpu_time = cpu_time
        self._watched: dict[object, _Watched] = {}
        self._num_viewers = 0

    def __len__(self) -> int:
        return len(self._watched)

    async def changes(
        self, name: object, read: ReadRows, since: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield the changes of a topic since a version as server-sent events, until the caller
        closes the generator. Viewers with the same version receive the same bytes. Raises the
        errors of `read`, and `QuotaExceeded` if `_MAX_VIEWERS` views are open."""
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
        """Update the topic until it fails. The error is raised in the viewers' feeds."""
        loop = asyncio.get_running_loop()
        while True:
            await self._pause(watched)
            try:
                has_changed = self._update(watched)
            except Exception as error:  # noqa: BLE001
                watched.news.set_exception(error)
                watched.news.exception()  # Mark it as retrieved: all viewers may have left.
                return
            if has_changed:
                news, watched.news = watched.news, loop.create_future()
                news.set_result(None)

    async def _pause(self, watched: _Watched) -> None:
        """Wait until the next update is due. The wait grows if viewers use CPU time meanwhile."""
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
