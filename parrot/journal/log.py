"""The journal as ServeCore uses it. Records are appended in memory. One thread writes all records
that have gathered in one transaction.

    append, append, ...     in one turn of the event loop; can be undone until the turn ends
          |                 handed over when the loop is idle, or after at most 20 ms
          v
    the thread: write ---> `durable` returns
"""

import asyncio
import logging
import threading
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, Protocol

import orjson

from parrot.protocol.errors import InsufficientStorage, ParrotError, Unavailable
from parrot.utils.clock import Clock
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

ENDED = "ended"
"""The kind of a subject's last record. All records of the subject may then be removed."""

Payload = dict[str, Any]


class Kind(StrEnum):
    """The kinds of a session's records, besides `ENDED`."""

    SESSION = "session"  # a session began
    CALL = "call"
    NATIVE = "native"
    GRAPH = "graph"
    VARIABLE = "variable"  # a program created a variable
    PROMPT = "prompt"  # a call without a template
    SETTLED = "settled"  # a variable has its value or its own error
    ATTEMPT = "attempt"  # a completion was sent to an engine
    READ = "read"  # the session's first read that had to wait


class Record(NamedTuple):
    """A command or fact about a subject, such as a session or a response."""

    seq: int  # grows with each record
    at: float  # Unix time at which the record was appended
    subject: str
    kind: str
    payload: bytes  # JSON

    @property
    def checksum(self) -> int:
        head = f"{self.seq} {self.at!r} {self.subject} {self.kind} ".encode()
        return zlib.crc32(self.payload, zlib.crc32(head))

    def fields(self) -> Payload:
        fields: Payload = orjson.loads(self.payload)
        return fields


class Storage(Protocol):
    """Records on a disk, owned by one process at a time. It is not thread-safe, and `read` comes
    first. All methods except `close` raise one of `errors` if the disk cannot be read or written.
    """

    errors: type[Exception]
    epoch: int
    """Greater than the epoch of every earlier owner of the records."""

    def is_owned(self) -> bool:
        """Whether it is certain that no other process owns the records. Thread-safe."""
        ...

    def fact(self, name: str, value: int) -> int:
        """The number that was first stored under this name; stores `value` for a new name."""
        ...

    def read(self) -> Iterator[Record]:
        """Yield all records of subjects that have not ended, in order. If a record is damaged, it
        and all later records are moved elsewhere."""
        ...

    def last_seq(self) -> int: ...

    def write(self, records: Sequence[Record]) -> None:
        """Write all records or none. Written records survive a power failure."""
        ...

    def note_ends(self, records: Sequence[Record]) -> None:
        """Note the subjects that these records end: their records may be trimmed."""
        ...

    @property
    def is_short(self) -> bool:
        """Whether the space that is reserved for records of accepted work is in use."""
        ...

    def use_reserve(self, error: Exception) -> bool:
        """Use the reserved space after `error`. Returns False if that cannot help."""
        ...

    def refill(self) -> bool:
        """Reserve space again. Returns False if there is too little space."""
        ...

    def describe(self, error: Exception) -> str:
        """Why records cannot be written, for clients: without names of the server or its files."""
        ...

    @property
    def has_ended(self) -> bool:
        """Whether `trim` has records to remove."""
        ...

    def trim(self) -> None:
        """Remove some records of an ended subject, its `ENDED` record last."""
        ...

    def close(self) -> None: ...


class EndedSubjects:
    """The part of a `Storage` that knows which subjects may be trimmed."""

    def __init__(self) -> None:
        self._ended: dict[str, None] = {}  # subjects, in the order in which they are trimmed

    def note_ends(self, records: Sequence[Record]) -> None:
        for record in records:
            if record.kind == ENDED:
                self._ended[record.subject] = None

    @property
    def has_ended(self) -> bool:
        return bool(self._ended)


def is_address(journal: str) -> bool:
    """Whether `journal` is the address of a PostgreSQL database, not the path of a file."""
    return journal.startswith(("postgresql://", "postgres://"))


def is_intact(record: Record, checksum: object) -> bool:
    """Whether the record is undamaged: its checksum matches."""
    try:
        return record.checksum == checksum and type(record.payload) is bytes
    except TypeError:  # A damaged field has another type.
        return False


class ReplayClock:
    """A clock that shows the time of each record while records are replayed."""

    now: Callable[[], float]

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now, self.sleep = clock.now, clock.sleep

    def show(self, seconds_ago: float | None) -> None:
        """Stop at the time `seconds_ago`. None: show the underlying clock's time again."""
        self.now = self._clock.now
        if seconds_ago is not None:
            then = self._clock.now() - max(0.0, seconds_ago)
            self.now = lambda: then


class RecordsLost(Exception):
    """Records could not be written before the process ended."""


_NO_RESERVE = "there is too little space for the reserve"
_RETRY_S = 1.0  # Seconds between attempts to write after a failure.
_MAX_NAMED = 20  # Subjects of lost records that the log names.
_CLOSE_S = 5.0  # Seconds that `close` waits for the last records.
_BYTES_PER_WRITE = 8 * 2**20  # Payload bytes at which a transaction ends.
# A transaction costs as much as dozens of records, so records gather while the event loop is busy.
_IDLE_S = 0.0003  # Seconds. A turn of the event loop that is shorter ends the gathering.
_GATHER_S = 0.005  # Seconds after which gathering ends even if the loop is busy.
_LAZY_S = 0.02  # Seconds after which records are written if no caller waits for them.


class Journal:
    """One process's journal; close it when done. Its records are read once, before the first
    `append`.

    If the storage is full, its reserve is used: `require_room` rejects new work, and records
    of accepted work are written. Without a reserve, these records stay in memory until they can be
    written, and `stored` raises an error for them."""

    def __init__(self, file: Storage, clock: Clock, max_wait_s: float = 10.0) -> None:
        """`clock` is the time that `self.clock` shows outside of replays."""
        self._file = file
        self.clock = ReplayClock(clock)
        self.epoch = self._file.epoch
        self._max_wait_s = max_wait_s
        self._failure = self._delay = ""  # why records cannot be written: an error, a late record
        self._shortage = ""  # why only records of accepted work are written
        self.num_lost = 0  # records that `close` could not write
        self._turn: list[Record] = []  # of the current turn of the event loop
        self._ready: list[Record] = []  # of earlier turns, not yet handed to the thread
        self._is_gathering = False  # a caller waits for the ready records
        self._write_timer: asyncio.TimerHandle | None = None  # set while records are ready
        self._seq = self._num_flushed = self._num_written = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writable = asyncio.Event()  # set, and replaced, when records can be written again
        self._unwritten: deque[tuple[int, float]] = deque()  # last seqs of turns, and their times
        self._watch: asyncio.TimerHandle | None = None  # set while records are unwritten
        self._batches: SimpleQueue[list[Record] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pending: list[Record] = []  # Handed to the thread and not written.
        self._close_by = 0.0  # When the thread stops trying, on the monotonic clock.

    @property
    def trouble(self) -> str:
        """Why records cannot be written; empty if they can."""
        return self._failure or self._delay

    @property
    def shortage(self) -> str:
        """Why new work is rejected; empty if it is accepted."""
        return self.trouble or self._shortage

    def fact(self, name: str, value: int) -> int:
        """The number that was first stored under this name; call it before the first `append`.
        Raises `ConfigError` if the file cannot be read, or not written for a new name."""
        try:
            return self._file.fact(name, value)
        except self._file.errors as error:
            raise ConfigError(f"journal: cannot be read or written: {error}") from None

    def read(self, apply: Callable[[Record], None]) -> None:
        """Call `apply` with each record, with the clock at the record's time.

        Raises `ConfigError` if the file cannot be read."""
        try:
            self.replay(self._file.read(), apply)
        except self._file.errors as error:
            raise ConfigError(f"journal: cannot be read: {error}") from None
        self._seq = self._num_flushed = self._num_written = self._file.last_seq()
        self._loop = asyncio.get_running_loop()
        if self._file.is_short:
            self._shorten(_NO_RESERVE)
            self._start_thread()

    def replay(self, records: Iterable[Record], apply: Callable[[Record], None]) -> None:
        """Call `apply` with each record, with the clock at the record's time."""
        now = time.time()
        try:
            for record in records:
                self.clock.show(now - record.at)
                apply(record)
        finally:
            self.clock.show(None)

    @property
    def last_seq(self) -> int:
        """The number of the last record that was appended."""
        return self._seq

    def append(self, subject: str, kind: str, fields: Payload) -> int:
        """Add a record, and return its number. It is written within about 20 ms, or sooner if a
        caller waits for it. All records of one turn of the event loop are written together or not
        at all."""
        assert self._loop is not None, "the journal was not read"
        payload = orjson.dumps(fields)
        if not self._turn:
            self._loop.call_soon(self._flush)
        self._seq += 1
        self._turn.append(Record(self._seq, time.time(), subject, kind, payload))
        return self._seq

    def end(self, subject: str) -> None:
        """Record that the subject has ended. Its records are removed later."""
        self.append(subject, ENDED, {})

    @contextmanager
    def recorded(self, subject: str, kind: str, fields: Payload) -> Iterator[None]:
        """Append a record of the command that the block applies, before the records of its effects.
        If the block raises, all these records are discarded."""
        self.append(subject, kind, fields)
        place = len(self._turn)
        try:
            yield
        except BaseException:
            del self._turn[place - 1 :]
            self._seq = self._num_flushed + len(self._turn)
            raise

    def require_room(self) -> None:
        """Raise `InsufficientStorage` while new work is rejected: the disk or the journal is full,
        or a record has waited for `max_wait_s`. Raise `Unavailable` instead if another process may
        own the records, because then this process must not answer."""
        if self.shortage:
            raise self._refusal()

    async def writable(self) -> None:
        """Wait until new work is accepted."""
        while self.shortage:
            await self._writable.wait()

    async def durable(self) -> None:
        """Wait until all records appended so far are on disk. Raises `InsufficientStorage` if they
        cannot be written now."""
        await self.stored(self._seq)

    async def stored(self, seq: int) -> None:
        """Wait until the record with this number is on disk. Raises as `durable` does."""
        if seq <= self._num_written:
            return
        if self.trouble:
            raise self._refusal()
        assert self._loop is not None
        waiter = self._loop.create_future()
        self._waiters.append((seq, waiter))
        if not self._turn:
            self._write_soon()
        await waiter

    async def published(self) -> None:
        """Wait like `durable`, but return at once while records cannot be written."""
        with suppress(InsufficientStorage):
            await self.durable()

    async def close(self) -> None:
        """Write the remaining records, for at most 5 s. Callers that wait longer, and later calls,
        receive an error. Records that were not written are logged, and counted in `num_lost`."""
        self._flush()
        self._hand_over()
        if not self._file.is_owned():
            self._refuse("another process owns it")
        if self._watch is not None:
            self._watch.cancel()
        is_writing = False
        if self._thread is not None:
            self._close_by = time.monotonic() + _CLOSE_S
            self._batches.put(None)
            try:
                await asyncio.to_thread(self._thread.join, _CLOSE_S + _RETRY_S)
            finally:
                is_writing = self._thread.is_alive()
                self._count_lost(list(self._pending))
        self._refuse("it was closed")
        if not is_writing:
            self._file.close()

    def _count_lost(self, lost: Sequence[Record]) -> None:
        self.num_lost = len(lost)
        if not lost:
            return
        counts = Counter(record.subject for record in lost)
        named = ", ".join(
            f"{subject}: {count}" for subject, count in counts.most_common(_MAX_NAMED)
        )
        logger.error(
            "the journal's last %d records are lost, because it cannot be written: %s. By session "
            "or response: %s%s",
            len(lost),
            self.trouble or "the disk does not answer",
            named,
            ", ..." if len(counts) > _MAX_NAMED else "",
        )

    def _flush(self) -> None:
        if not self._turn:
            return
        assert self._loop is not None
        if self._write_timer is None:
            self._write_timer = self._loop.call_later(_LAZY_S, self._hand_over)
        self._num_flushed = self._turn[-1].seq
        self._ready += self._turn
        self._turn = []
        self._unwritten.append((self._num_flushed, self._loop.time()))
        self._set_watch()
        if self._waiters:
            self._write_soon()

    def _write_soon(self) -> None:
        """Write the ready records as soon as a turn of the event loop is idle: a caller waits."""
        if self._ready and not self._is_gathering:
            self._is_gathering = True
            assert self._loop is not None
            now = self._loop.time()
            self._loop.call_soon(self._gather_more, now, now)

    def _gather_more(self, since: float, turn_began: float) -> None:
        assert self._loop is not None
        now = self._loop.time()
        if now - turn_began < _IDLE_S or now - since >= _GATHER_S:
            self._hand_over()
        else:
            self._loop.call_soon(self._gather_more, since, now)

    def _hand_over(self) -> None:
        """Pass the ready records to the thread."""
        self._is_gathering = False
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        if not self._ready:
            return
        self._batches.put(self._ready)
        self._ready = []
        if self._thread is None:
            self._start_thread()

    def _start_thread(self) -> None:
        """Start the thread. Until now, the event loop used the file alone."""
        self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
        self._thread.start()

    # In the writer thread

    def _write_all(self) -> None:
        pending = self._pending
        has_failed = is_closing = False
        while not is_closing or (pending and time.monotonic() < self._close_by):
            wait_s = None
            if has_failed or self._file.is_short:
                wait_s = _RETRY_S
            if self._file.has_ended and not has_failed:
                wait_s = 0.0
            is_closing |= self._gather(pending, wait_s)
            try:
                while self._file.has_ended and (has_failed or not pending):
                    self._file.trim()
                    if not has_failed:
                        break  # New records go first.
                while pending:
                    count = _num_at_once(pending)
                    self._file.write(pending[:count])
                    self._report(self._written, pending[count - 1].seq)
                    del pending[:count]
                if self._file.is_short and not is_closing:
                    self._refill()
                if has_failed:
                    self._report(self._recovered)
                has_failed = False
            except Exception as error:  # noqa: BLE001 - waiting callers must receive it
                reason = self._file.describe(error)
                if self._file.use_reserve(error):
                    self._report(self._shorten, reason, error)
                    self._batches.put([])  # Write again at once.
                    continue
                if not has_failed:
                    logger.error("the journal cannot be written: %s", error)
                self._report(self._refuse, reason)
                has_failed = True
                self._file.note_ends(pending)  # Trimming ended subjects makes room for the rest.

    def _refill(self) -> None:
        if self._file.refill():
            self._report(self._refilled)
        else:
            self._report(self._shorten, _NO_RESERVE)

    def _gather(self, pending: list[Record], wait_s: float | None) -> bool:
        """Move all queued records to `pending`. If the queue is empty, wait up to `wait_s` seconds,
        or without limit for None. Returns True when the journal is closing."""
        try:
            batch = self._batches.get(wait_s != 0, wait_s)
            while batch is not None:
                pending += batch
                batch = self._batches.get_nowait()
        except Empty:
            return False
        return True

    def _report(self, report: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(report, *args)

    # Reports of the writer thread, in the event loop

    def _written(self, seq: int) -> None:
        self._num_written = seq
        while self._unwritten and self._unwritten[0][0] <= seq:
            self._unwritten.popleft()
        if self._delay and self._remaining_s() > 0:
            self._delay = ""
            logger.warning("the journal's disk has caught up; changes are accepted again")
            self._set_watch()
            self._report_writable()
        while self._waiters and self._waiters[0][0] <= seq:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _set_watch(self) -> None:
        assert self._loop is not None
        if self._watch is None and self._unwritten and not self._delay:
            self._watch = self._loop.call_later(self._remaining_s(), self._check_delay)

    def _remaining_s(self) -> float:
        """Seconds that the oldest unwritten record may still wait."""
        if not self._unwritten:
            return self._max_wait_s
        assert self._loop is not None
        return self._unwritten[0][1] + self._max_wait_s - self._loop.time()

    def _check_delay(self) -> None:
        """Reject new work if the disk hangs, or if records arrive faster than it writes."""
        self._watch = None
        if self._remaining_s() > 0:
            self._set_watch()
            return
        self._delay = f"a record has waited for {self._max_wait_s:g} s"
        logger.error("the journal cannot be written: %s", self._delay)
        self._refuse_all()

    def _recovered(self) -> None:
        logger.warning("the journal can be written again")
        self._failure = ""
        self._report_writable()

    def _shorten(self, reason: str, error: Exception | None = None) -> None:
        if not self._shortage:
            cause = error or reason
            logger.error("the journal has no room: %s. Only accepted work is written", cause)
            self._shortage = reason

    def _refilled(self) -> None:
        if self._shortage:
            logger.warning("the journal has room again; changes are accepted")
            self._shortage = ""
            self._report_writable()

    def _report_writable(self) -> None:
        self._writable.set()
        self._writable = asyncio.Event()

    def _refuse(self, reason: str) -> None:
        self._failure = reason
        self._refuse_all()

    def _refusal(self) -> ParrotError:
        if not self._file.is_owned():
            return Unavailable("another ServeCore may have taken over, so this one cannot answer")
        return InsufficientStorage(
            f"the journal cannot be written, so nothing is accepted: {self.shortage}"
        )

    def _refuse_all(self) -> None:
        while self._waiters:
            seq, waiter = self._waiters.popleft()
            if waiter.done():
                continue
            if seq <= self._num_written:
                waiter.set_result(None)
            else:
                waiter.set_exception(self._refusal())


def _num_at_once(records: list[Record]) -> int:
    """The number of records for one transaction."""

    size = 0
    for count, record in enumerate(records, start=1):
        size += len(record.payload)
        if size > _BYTES_PER_WRITE:
            return count
    return len(records)
