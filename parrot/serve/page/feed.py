"""Keeping those who look up to date: a view is read once for all of its viewers."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from parrot.protocol.errors import QuotaExceeded
from parrot.serve.page.topic import ReadRows, Topic
from parrot.utils.clock import Clock

_INTERVAL_S = 0.1  # between two updates
_LOAD = 0.005  # of the event loop's time, at most, for each topic
_MAX_VIEWERS = 256


@dataclass(slots=True, eq=False)
class _Watched:
    """`due`: when it may be read next."""

    topic: Topic
    due: float
    num_viewers: int = 0


class Feed:
    """Owns the topics that somebody looks at, by their names. A topic is read ten times a second,
    or less often if that takes long, so that a look at a large graph slows no program down. When
    its last viewer has gone the topic is forgotten."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._watched: dict[object, _Watched] = {}
        self._num_viewers = 0

    def __len__(self) -> int:
        return len(self._watched)

    async def changes(
        self, name: object, read: ReadRows, since: str | None
    ) -> AsyncGenerator[bytes]:
        """Yield the changes of a topic since a version, as JSON, whenever there are some, for ever.
        Raises what `read` raises, and `QuotaExceeded` when too many look already."""
        if self._num_viewers >= _MAX_VIEWERS:
            raise QuotaExceeded(f"{_MAX_VIEWERS} views of the page are open already")
        now = self._clock.now()
        watched = self._watched.setdefault(name, _Watched(Topic(read), due=now))
        watched.num_viewers += 1
        self._num_viewers += 1
        try:
            while True:
                if (changes := self._next(watched, since)) is not None:
                    since, payload = changes
                    yield payload
                await self._clock.sleep(max(0.0, watched.due - self._clock.now()))
        finally:
            self._num_viewers -= 1
            watched.num_viewers -= 1
            if not watched.num_viewers:
                del self._watched[name]

    def _next(self, watched: _Watched, since: str | None) -> tuple[str, bytes] | None:
        """The version and the JSON of what has changed, read anew if it is time to."""
        began = self._clock.now()
        is_due = began >= watched.due
        if is_due:
            watched.topic.update()
        changes = watched.topic.since(since)
        ended = self._clock.now()
        if is_due:
            watched.due = ended + _INTERVAL_S
        watched.due = max(watched.due, began + (ended - began) / _LOAD)
        return changes
