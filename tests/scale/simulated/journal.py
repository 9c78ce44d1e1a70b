"""The real journal without a disk and without a thread, for a simulated ServeCore."""

from collections.abc import Iterator, Sequence

from parrot.journal.log import ENDED, Journal, Record


class MemoryStorage:
    """The records of all open sessions. `num_bytes` is the size of their payloads. `num_written` is
    the size of all payloads ever written."""

    errors: type[Exception] = OSError
    has_ended = False
    is_short = False  # never out of space

    def __init__(self) -> None:
        self.epoch = 0
        self.num_bytes = self.num_written = 0
        self._records: dict[str, list[Record]] = {}
        self._facts: dict[str, int] = {}
        self._last_seq = 0

    def is_owned(self) -> bool:
        return True

    def fact(self, name: str, value: int) -> int:
        return self._facts.setdefault(name, value)

    def read(self) -> Iterator[Record]:
        self.epoch += 1
        kept = [record for records in self._records.values() for record in records]
        return iter(sorted(kept, key=lambda record: record.seq))

    def last_seq(self) -> int:
        return self._last_seq

    def write(self, records: Sequence[Record]) -> None:
        for record in records:
            self._last_seq = record.seq
            self.num_written += len(record.payload)
            if record.kind == ENDED:
                ended = self._records.pop(record.subject, [])
                self.num_bytes -= sum(len(one.payload) for one in ended)
            else:
                self._records.setdefault(record.subject, []).append(record)
                self.num_bytes += len(record.payload)

    def use_reserve(self, error: Exception) -> bool:
        return False

    def refill(self) -> bool:
        return True

    def describe(self, error: Exception) -> str:
        return str(error)

    def note_ends(self, records: Sequence[Record]) -> None: ...

    def trim(self) -> None: ...

    def close(self) -> None: ...


class VirtualJournal(Journal):
    """Writes records at once, because virtual time does not wait for threads."""

    def _hand_over(self) -> None:
        self._is_gathering = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if self._ready:
            self._file.write(self._ready)
            self._written(self._ready[-1].seq)
            self._ready = []
