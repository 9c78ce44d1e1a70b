"""Series by names that programs make up: the names that are used most have their own."""

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, Self, TypeVar

OTHER = "other"
_MAX_CANDIDATES = 1024


class Series(Protocol):
    def add(self, other: Self) -> None:
        """Take over the counts of another."""
        ...


S = TypeVar("S", bound=Series)


class SeriesByName(Generic[S]):
    """At most `limit` names have series of their own, and `other` has the rest.

    A name that is used more than twice as much as the least used of those takes its place. What was
    counted stays counted: the series of a displaced name is added to `other`, and that of a new one
    begins with nothing, so no counter ever falls."""

    def __init__(self, limit: int, make: Callable[[], S]) -> None:
        self._limit = limit
        self._make = make
        self._own: dict[str, S] = {}
        self._uses: Counter[str] = Counter()  # of names that have their own
        self._candidates: Counter[str] = Counter()  # of others: no less than uses minus the cut
        self._other: S | None = None

    def use(self, name: str, times: int = 1) -> S:
        """The series in which so many uses of this name are counted."""
        if (series := self._own.get(name)) is None and name != OTHER:
            series = self._admitted(name, times)
        if series is not None:
            self._uses[name] += times
            return series
        if self._other is None:
            self._other = self._make()
        return self._other

    def items(self) -> Iterator[tuple[str, S]]:
        yield from self._own.items()
        if self._other is not None:
            yield OTHER, self._other

    def _admitted(self, name: str, times: int) -> S | None:
        if len(self._own) >= self._limit:
            uses = self._count(name, times)
            least = min(self._uses, key=self._uses.__getitem__)
            if uses <= 2 * self._uses[least]:
                return None
            if self._other is None:
                self._other = self._make()
            self._other.add(self._own.pop(least))
            del self._uses[least]
            self._uses[name] = self._candidates.pop(name)
        return self._own.setdefault(name, self._make())

    def _count(self, name: str, times: int) -> int:
        """Count in bounded memory: too many names take one use from each other (Misra-Gries)."""
        self._candidates[name] += times
        if len(self._candidates) > _MAX_CANDIDATES:
            self._candidates = Counter({n: c - 1 for n, c in self._candidates.items() if c > 1})
        return self._candidates[name]
