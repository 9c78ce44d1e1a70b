"""The stores that keep a journal's records."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from parrot.serve.journal.record import ENDED, Record


class Storage(Protocol):
    """Records on a disk, which one process has at a time. Not for two threads at once; `read` comes
    first. Every method but `close` raises one of `errors` when the disk cannot be read or
    written."""

    errors: type[Exception]
    epoch: int
    """Greater than that of whoever had the records before."""

    def is_ours(self) -> bool:
        """Whether it is certain that no other process has them yet. From any thread."""
        ...

    def fact(self, name: str, value: int) -> int:
        """The number that was first given for this name."""
        ...

    def read(self) -> Iterator[Record]:
        """Yield all records of subjects that have not ended, in their order. From the first one on
        that is damaged, all are cut off, and kept elsewhere."""
        ...

    def last_seq(self) -> int: ...

    def write(self, records: Sequence[Record]) -> None:
        """All of them or none. They survive the loss of power."""
        ...

    def note_ends(self, records: Sequence[Record]) -> None:
        """Note that what these records end may be trimmed."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether there is something to `trim`."""
        ...

    def trim(self) -> None:
        """Remove some records of a subject that has ended, the last one last."""
        ...

    def close(self) -> None: ...


class NotedEnds:
    """The part of a `Storage` that knows what may be trimmed."""

    def __init__(self) -> None:
        self._ended: dict[str, None] = {}  # subjects, in the order in which they go

    def note_ends(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.kind == ENDED:
                self._ended[record.subject] = None

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)


def is_address(journal: str) -> bool:
    """Whether it is the address of a PostgreSQL database, not the path of a file."""
    return journal.startswith(("postgresql://", "postgres://"))


def is_whole(record: Record, checksum: object) -> bool:
    """Whether it is as it was written."""
    try:
        return record.checksum == checksum and type(record.payload) is bytes
    except TypeError:  # a field of another type
        return False
