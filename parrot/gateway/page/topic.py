"""A view as rows with versions, so that whoever looks is sent what has changed since."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import orjson

from parrot.utils.ids import new_token

Rows = Mapping[str, Mapping[str, Any]]
ReadRows = Callable[[], Rows]

_MAX_GONE = 4096  # rows that are remembered to be gone


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
