"""The journal as ServeCore uses it: records are appended at once, and written by one thread, all
that have gathered in one transaction.

    append, append, ...     in a turn of the event loop; can be taken back until it ends
          |                 when the loop has nothing else to do, or some milliseconds later
          v
    the thread: write ---> `durable` goes on
"""

import asyncio
import logging
import threading
import time
import zlib
from collections import deque
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
"""The kind of a subject's last record: nothing of the subject is needed any more."""

Payload = dict[str, Any]


class Kind(StrEnum):
    """The kinds of a session's records, besides `ENDED`."""

    SESSION = "session"  # it began
    CALL = "call"
    NATIVE = "native"
    GRAPH = "graph"
    VARIABLE = "variable"  # the program made one
    PROMPT = "prompt"  # a call without a template
    SETTLED = "settled"  # a variable has its value, or its error, which is its own
    ATTEMPT = "attempt"  # a completion was sent to an engine
    READ = "read"  # the first read that had to wait


class Record(NamedTuple):
    """Something that happened to a subject, a session or a response: `seq` grows from one to the
    next, `at` is when, in Unix time, and `payload` is JSON."""

    seq: int
    at: float
    subject: str
    kind: str
    payload: bytes

    @property
    def checksum(self) -> int:
        head = f"{self.seq} {self.at!r} {self.subject} {self.kind} ".encode()
        return zlib.crc32(self.payload, zlib.crc32(head))

    def fields(self) -> Payload:
        fields: Payload = orjson.loads(self.payload)
        return fields


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


class ReplayClock:
    """A clock that shows, while records are replayed, when they were made."""

    now: Callable[[], float]

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.now, self.sleep = clock.now, clock.sleep

    def show(self, seconds_ago: float | None) -> None:
        """Stand still at the time `seconds_ago`; for None, show the clock's own again."""
        self.now = self._clock.now
        if seconds_ago is not None:
            then = self._clock.now() - max(0.0, seconds_ago)
            self.now = lambda: then


_RETRY_S = 1.0  # between attempts to write what could not be written
_CLOSE_S = 5.0
_BYTES_PER_WRITE = 8 * 2**20
# A transaction costs as much as dozens of records. So it takes what comes while the event loop is
_IDLE_S = 0.0003  # busy, that is, while its turns take longer than this,
_GATHER_S = 0.005  # for so long at most; and
_LAZY_S = 0.02  # what nobody waits for goes with what comes within this


class Journal:
    """One process's journal; close when done. Its records are read back once, before the first is
    appended, in the event loop where everything else happens.

    While the file cannot be written (its bound or the disk is full, or a record has waited for
    `max_wait_s`), `require_room` refuses what would be recorded. What happens all the same, since
    it was begun before, is kept in memory and written as soon as there is room. So memory is
    bounded by what was accepted within `max_wait_s` and what was begun by then.

    While another process may have the records, nothing is told that is not written, and what
    raises `InsufficientStorage` otherwise raises `Unavailable`."""

    def __init__(self, file: Storage, clock: Clock, max_wait_s: float = 10.0) -> None:
        """`clock` is what `self.clock` shows, but while records are read."""
        self._file = file
        self.clock = ReplayClock(clock)
        self.epoch = self._file.epoch
        self._max_wait_s = max_wait_s
        self._failure = self._delay = ""  # why nothing can be written
        self._turn: list[Record] = []
        self._ready: list[Record] = []  # of turns that have ended
        self._is_gathering = False  # somebody waits for what is ready
        self._lazy: asyncio.TimerHandle | None = None  # while something is ready
        self._seq = self._num_flushed = self._num_written = 0
        self._waiters: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._writable = asyncio.Event()  # set, and another, when it can be written again
        self._unwritten: deque[tuple[int, float]] = deque()  # last seqs of turns, and since when
        self._watch: asyncio.TimerHandle | None = None  # while something is unwritten
        self._batches: SimpleQueue[list[Record] | None] = SimpleQueue()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    @property
    def trouble(self) -> str:
        """Why nothing can be written; empty: it can."""
        return self._failure or self._delay

    def fact(self, name: str, value: int) -> int:
        """The number that was first given for this name, before anything is appended. Raises
        `ConfigError` if the file cannot be read, or written for a new name."""
        try:
            return self._file.fact(name, value)
        except self._file.errors as error:
            raise ConfigError(f"journal: it cannot be had: {error}") from None

    def read(self, apply: Callable[[Record], None]) -> None:
        """Call `apply` with each record there is, at the time when it was made.

        Raises `ConfigError` if the file cannot be read."""
        try:
            self.replay(self._file.read(), apply)
        except self._file.errors as error:
            raise ConfigError(f"journal: it cannot be read: {error}") from None
        self._seq = self._num_flushed = self._num_written = self._file.last_seq()
        self._loop = asyncio.get_running_loop()

    def replay(self, records: Iterable[Record], apply: Callable[[Record], None]) -> None:
        """Call `apply` with each record, at the time when it was made."""
        now = time.time()
        try:
            for record in records:
                self.clock.show(now - record.at)
                apply(record)
        finally:
            self.clock.show(None)

    def append(self, subject: str, kind: str, fields: Payload) -> None:
        """It is written soon, sooner if somebody waits for it, and either with all that is
        appended in this turn of the event loop or, like them, not at all."""
        assert self._loop is not None, "the journal was not read"
        payload = orjson.dumps(fields)
        if not self._turn:
            self._loop.call_soon(self._flush)
        self._seq += 1
        self._turn.append(Record(self._seq, time.time(), subject, kind, payload))

    def end(self, subject: str) -> None:
        """Forget the subject."""
        self.append(subject, ENDED, {})

    @contextmanager
    def recorded(self, subject: str, kind: str, fields: Payload) -> Iterator[None]:
        """Append a record of what is done in the block, before all that follows from it; if the
        block raises, nothing has happened."""
        self.append(subject, kind, fields)
        place = len(self._turn)
        try:
            yield
        except BaseException:
            del self._turn[place - 1 :]
            self._seq = self._num_flushed + len(self._turn)
            raise

    def require_room(self) -> None:
        """Raise `InsufficientStorage` while nothing can be written."""
        if self.trouble:
            raise self._refusal()

    async def has_room(self) -> None:
        """Wait until something can be written."""
        while self.trouble:
            await self._writable.wait()

    async def durable(self) -> None:
        """Wait until everything that was appended until now is on disk. Raises
        `InsufficientStorage` if it cannot be written now."""
        if self._num_written == self._seq:
            return
        self.require_room()
        assert self._loop is not None
        waiter = self._loop.create_future()
        self._waiters.append((self._seq, waiter))
        if not self._turn:
            self._hasten()
        await waiter

    async def published(self) -> None:
        """Do the same, but do not wait while nothing can be written."""
        with suppress(InsufficientStorage):
            await self.durable()

    async def close(self) -> None:
        """Write what is left, for a few seconds at most. Who still waits then, or comes after, is
        refused."""
        self._flush()
        self._hand_over()
        if not self._file.is_ours():
            self._refuse("it is another's")
        if self._watch is not None:
            self._watch.cancel()
        if self._thread is not None:
            self._batches.put(None)
            await asyncio.to_thread(self._thread.join, _CLOSE_S)
            if self._thread.is_alive():
                logger.error("the journal's last records could not be written: %s", self.trouble)
                self._refuse("it was closed")
                return
        self._refuse("it was closed")
        self._file.close()

    def _flush(self) -> None:
        if not self._turn:
            return
        assert self._loop is not None
        if self._lazy is None:
            self._lazy = self._loop.call_later(_LAZY_S, self._hand_over)
        self._num_flushed = self._turn[-1].seq
        self._ready += self._turn
        self._turn = []
        self._unwritten.append((self._num_flushed, self._loop.time()))
        self._set_watch()
        if self._waiters:
            self._hasten()

    def _hasten(self) -> None:
        """Somebody waits for what is ready: it is handed over as soon as a turn of the event loop
        has nothing else to do."""
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
        """Let the thread write what is ready."""
        self._is_gathering = False
        if self._lazy is not None:
            self._lazy.cancel()
            self._lazy = None
        if not self._ready:
            return
        self._batches.put(self._ready)
        self._ready = []
        if self._thread is None:  # until now the event loop has had the file for itself
            self._thread = threading.Thread(target=self._write_all, name="journal", daemon=True)
            self._thread.start()

    # In the thread

    def _write_all(self) -> None:
        pending: list[Record] = []
        has_failed = is_closing = False
        while not is_closing:
            wait_s = _RETRY_S if has_failed else 0.0 if self._file.has_ended else None
            is_closing |= self._gather(pending, wait_s)
            try:
                while self._file.has_ended and (has_failed or not pending):
                    self._file.trim()
                    if not has_failed:
                        break  # something else may have come
                while pending:
                    count = _num_at_once(pending)
                    self._file.write(pending[:count])
                    self._tell(self._written, pending[count - 1].seq)
                    del pending[:count]
                if has_failed:
                    self._tell(self._recovered)
                has_failed = False
            except Exception as error:  # noqa: BLE001 - who waits must hear of it
                if not has_failed:
                    logger.error("the journal cannot be written: %s", error)
                self._tell(self._refuse, str(error))
                has_failed = True
                self._file.note_ends(pending)  # what goes makes room for the rest

    def _gather(self, pending: list[Record], wait_s: float | None) -> bool:
        """Take what there is, and wait for something if there is nothing yet. True: no more will
        come."""
        try:
            batch = self._batches.get(wait_s != 0, wait_s)
            while batch is not None:
                pending += batch
                batch = self._batches.get_nowait()
        except Empty:
            return False
        return True

    def _tell(self, report: Callable[..., None], *args: object) -> None:
        assert self._loop is not None
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(report, *args)

    # What it tells

    def _written(self, seq: int) -> None:
        self._num_written = seq
        while self._unwritten and self._unwritten[0][0] <= seq:
            self._unwritten.popleft()
        if self._delay and self._left_s() > 0:
            self._delay = ""
            logger.warning("the journal is written in time again")
            self._set_watch()
            self._tell_writable()
        while self._waiters and self._waiters[0][0] <= seq:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(None)

    def _set_watch(self) -> None:
        assert self._loop is not None
        if self._watch is None and self._unwritten and not self._delay:
            self._watch = self._loop.call_later(self._left_s(), self._look)

    def _left_s(self) -> float:
        """Seconds that the oldest record which is not on disk may still wait."""
        if not self._unwritten:
            return self._max_wait_s
        assert self._loop is not None
        return self._unwritten[0][1] + self._max_wait_s - self._loop.time()

    def _look(self) -> None:
        """Refuse if the disk hangs, or is slower than what comes."""
        self._watch = None
        if self._left_s() > 0:
            self._set_watch()
            return
        self._delay = f"a record has waited for {self._max_wait_s:g} s"
        logger.error("the journal cannot be written: %s", self._delay)
        self._refuse_all()

    def _recovered(self) -> None:
        logger.warning("the journal can be written again")
        self._failure = ""
        self._tell_writable()

    def _tell_writable(self) -> None:
        self._writable.set()
        self._writable = asyncio.Event()

    def _refuse(self, reason: str) -> None:
        self._failure = reason
        self._refuse_all()

    def _refusal(self) -> ParrotError:
        if not self._file.is_ours():
            return Unavailable("another ServeCore may serve by now: this one cannot say")
        return InsufficientStorage(
            f"the journal cannot be written, so nothing is accepted: {self.trouble}"
        )

    def _refuse_all(self) -> None:
        while self._waiters:
            _, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_exception(self._refusal())


def _num_at_once(records: list[Record]) -> int:
    """How many go into one transaction."""
    size = 0
    for count, record in enumerate(records, start=1):
        size += len(record.payload)
        if size > _BYTES_PER_WRITE:
            return count
    return len(records)
