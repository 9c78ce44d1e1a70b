"""The journal in a file: an SQLite database with a write-ahead log, open in one process only."""

import json
import logging
import os
import sqlite3
import time
from array import array
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path

from parrot.journal.files import database_files, locked
from parrot.journal.log import ENDED, EndedSubjects, Record, is_intact
from parrot.journal.migrations import KINDS, SCHEMA, added_records, require_known
from parrot.journal.reserve import Reserve, reserve_bytes
from parrot.utils.config import ConfigError

logger = logging.getLogger(__name__)

APPLICATION = 0x50727274  # SQLite's application id, which identifies a journal of Parrot.
_PAGE_BYTES = 4096
_LOG_BYTES = 16 * 2**20  # Bytes of the write-ahead log file that stay allocated after a checkpoint.
_MAX_EPOCH = 2**62  # A larger epoch in the file counts as damage.
_TRIMMED = 512  # Records that one `trim` removes. A larger number delays pending writes longer.
_TABLES = f"""
CREATE TABLE records (
    seq INTEGER PRIMARY KEY, at REAL NOT NULL, subject TEXT NOT NULL, kind TEXT NOT NULL,
    payload BLOB NOT NULL, checksum INTEGER NOT NULL
);
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {SCHEMA};
"""
_ROWS = "seq, at, subject, kind, payload, checksum"
ALL_RECORDS = f"SELECT {_ROWS} FROM records NOT INDEXED ORDER BY seq"
_ROW = "(?, ?, ?, ?, ?, ?)"
# Rows of one INSERT. A larger number saves statements, and each statement waits for the GIL.
_MAX_ROWS = 64


class JournalFile(EndedSubjects):
    """A `Storage` in one file. Written records survive a power failure: with `synchronous` FULL,
    SQLite syncs the write-ahead log with each transaction."""

    errors: type[Exception] = sqlite3.Error

    def __init__(self, path: str, max_bytes: int) -> None:
        """Raises `ConfigError` if the file cannot be used: it is not a journal, it has another
        schema version, another process has it open, another user owns it, it is a symbolic link,
        or its folder is missing."""
        super().__init__()
        self._path = Path(path)
        self._max_bytes = max_bytes
        num_reserved = reserve_bytes(max_bytes)
        self._max_pages = max(64, (max_bytes - num_reserved) // _PAGE_BYTES)
        self._reserve = Reserve(Path(f"{path}.reserve"), num_reserved)
        self._lock = locked(self._path)
        try:
            self._database = self._open(self._path)
            self._seqs: defaultdict[str, array[int]] = defaultdict(lambda: array("q"))
            self._ended = self._find_ended()
            self._damage, self.epoch = "", _now_ms()
            self._is_epoch_due = False  # the epoch must be written with the next records
            self._reserve.acquire()
            try:
                self._count_epoch()
            except sqlite3.DatabaseError as error:
                if not _is_damage(error):
                    raise
                self._damage = f"the table of facts is damaged: {error}"
        except (sqlite3.Error, OSError) as error:
            self._lock.close()
            advice = "; check the free space of its disk" if _is_no_room(error) else ""
            raise ConfigError(f"journal: {path}: {error}{advice}") from None
        except BaseException:
            self._lock.close()
            raise

    def is_owned(self) -> bool:
        return True  # the file lock guarantees it

    def fact(self, name: str, value: int) -> int:
        """The number that was first stored under this name; stores `value` for a new name."""
        query = "SELECT value FROM facts WHERE name = ?"
        if (row := self._database.execute(query, (name,)).fetchone()) is None:
            with self._database as database:
                database.execute("INSERT INTO facts VALUES (?, ?)", (name, value))
            return value
        (known,) = row
        return known if type(known) is int and known >= 0 else value

    def read(self) -> Iterator[Record]:
        """Yield all records of subjects that have not ended, in order. If a record is damaged, it
        and all later records are cut off. If only other parts of the file are damaged, no record
        is lost. In both cases a copy of the damaged file is kept next to the journal."""
        last = 0
        try:
            for *row, checksum in self._database.execute(ALL_RECORDS):
                record = Record(*row)
                if not is_intact(record, checksum):
                    break
                last = record.seq
                self._seqs[record.subject].append(last)
                if record.subject not in self._ended:
                    yield record
            else:
                if self._damage:
                    self._cut(last, self._damage)
                return
            reason = f"the record after {last} is damaged"
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
            reason = f"records after {last} cannot be read: {error}"
        self._cut(last, reason)

    def last_seq(self) -> int:
        (seq,) = self._database.execute("SELECT max(seq) FROM records").fetchone()
        return seq or 0

    def write(self, records: Sequence[Record]) -> None:
        """Write all records in one transaction."""
        with self._database as database:
            if self._is_epoch_due or len(records) > _MAX_ROWS:
                database.execute("BEGIN")  # A single statement is a transaction by itself.
            if self._is_epoch_due:
                self._write_epoch()
            for start in range(0, len(records), _MAX_ROWS):
                rows = [(*record, record.checksum) for record in records[start : start + _MAX_ROWS]]
                database.execute(_insert(len(rows)), list(chain.from_iterable(rows)))
        self._is_epoch_due = False
        for record in records:
            self._seqs[record.subject].append(record.seq)
        self.note_ends(records)

    @property
    def is_short(self) -> bool:
        return not self._reserve.is_held

    def use_reserve(self, error: Exception) -> bool:
        if self.is_short or not _is_no_room(error):
            return False
        self._reserve.release()
        self._limit_pages(self._max_bytes // _PAGE_BYTES)
        return True

    def refill(self) -> bool:
        (num_pages,) = self._database.execute("PRAGMA page_count").fetchone()
        (num_free,) = self._database.execute("PRAGMA freelist_count").fetchone()
        if num_pages - num_free >= self._max_pages or not self._reserve.acquire():
            return False
        self._limit_pages(self._max_pages)
        return True

    def describe(self, error: Exception) -> str:
        return str(error)

    def trim(self) -> None:
        """Remove up to 512 records of an ended subject, its `ENDED` record last."""
        subject = next(iter(self._ended))
        seqs = self._seqs[subject]
        with self._database as database:
            database.execute(
                "DELETE FROM records WHERE seq IN (SELECT value FROM json_each(?))",
                (str(seqs[:_TRIMMED].tolist()),),
            )
        del seqs[:_TRIMMED]
        if not seqs:
            del self._ended[subject], self._seqs[subject]

    def close(self) -> None:
        with suppress(sqlite3.Error):
            self._database.close()
        self._lock.close()

    def _open(self, path: Path) -> sqlite3.Connection:
        database = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        try:
            if not database.execute("SELECT count(*) FROM sqlite_schema").fetchone()[0]:
                database.executescript(f"BEGIN; {_TABLES} COMMIT;")
            self._check(database)
            database.execute("PRAGMA journal_mode = WAL")
            database.execute("PRAGMA synchronous = FULL")
            database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            database.execute(f"PRAGMA max_page_count = {self._max_pages}")
        except BaseException:
            database.close()
            raise
        return database

    def _limit_pages(self, num_pages: int) -> None:
        """Limit the file's size. It does not shrink: above the limit, only free pages are used."""
        self._database.execute(f"PRAGMA max_page_count = {max(64, num_pages)}")

    def _check(self, database: sqlite3.Connection) -> None:
        (application,) = database.execute("PRAGMA application_id").fetchone()
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise ConfigError(f"journal: {self._path} is a database, but not a journal of Parrot")
        if require_known(schema, str(self._path)) < SCHEMA:
            self._migrate(database, schema)

    def _migrate(self, database: sqlite3.Connection, schema: int) -> None:
        """Migrate the file to the current schema version, in one transaction. `read` must first cut
        a damaged file, and a full disk must first get free space. The next start then migrates the
        file."""
        kinds = json.dumps(KINDS)
        query = f"SELECT {_ROWS} FROM records WHERE kind IN (SELECT value FROM json_each(?))"
        try:
            records = []
            for *row, checksum in database.execute(query, (kinds,)):
                if not is_intact(record := Record(*row), checksum):
                    raise sqlite3.DatabaseError(f"record {record.seq} is damaged")
                records.append(record)
            (last,) = database.execute("SELECT coalesce(max(seq), 0) FROM records").fetchone()
            with database:
                database.execute("BEGIN IMMEDIATE")
                for record in added_records(records, last):
                    database.execute(_insert(1), (*record, record.checksum))
                database.execute(f"PRAGMA user_version = {SCHEMA}")
        except sqlite3.DatabaseError as error:
            if not (_is_damage(error) or _is_no_room(error)):
                raise
            logger.error("journal %s: cannot be migrated now: %s", self._path, error)
        else:
            logger.info(
                "journal %s: migrated from schema version %d to %d", self._path, schema, SCHEMA
            )

    def _count_epoch(self) -> None:
        """Take an epoch greater than all earlier ones: the Unix time in ms, or the last one plus 1.
        If the disk is full, the epoch can be written later, because the time has moved on."""
        known = self._database.execute("SELECT value FROM facts WHERE name = 'epoch'").fetchone()
        before = 0 if known is None else known[0]
        if type(before) is not int or not 0 <= before < _MAX_EPOCH:
            raise sqlite3.DatabaseError(f"the epoch is invalid: {before!r:.80}")
        epoch = max(before + 1, _now_ms())
        try:
            with self._database as database:
                database.execute("DROP INDEX IF EXISTS ended")  # Earlier versions created it.
                self.epoch = epoch
                self._write_epoch()
        except sqlite3.DatabaseError as error:
            if not _is_no_room(error):
                raise
            logger.error("journal %s: can be read, but not written: %s", self._path, error)
            self._is_epoch_due = True

    def _write_epoch(self) -> None:
        self._database.execute("INSERT OR REPLACE INTO facts VALUES ('epoch', ?)", (self.epoch,))

    def _facts(self) -> list[tuple[str, int]]:
        if not self._damage:
            with suppress(sqlite3.DatabaseError):
                return self._database.execute("SELECT name, value FROM facts").fetchall()
        return [("epoch", self.epoch)]

    def _find_ended(self) -> dict[str, None]:
        """The ended subjects, as far as the records are readable."""
        ended: dict[str, None] = {}
        ends = f"SELECT {_ROWS} FROM records NOT INDEXED WHERE kind = '{ENDED}'"
        try:
            for *row, checksum in self._database.execute(ends):
                record = Record(*row)
                if is_intact(record, checksum):
                    ended[record.subject] = None
        except sqlite3.DatabaseError as error:
            if not _is_damage(error):
                raise
        return ended

    def _cut(self, last: int, reason: str) -> None:
        """Continue in a new file with the records up to `last`, and keep the old file."""
        aside = self._path.with_name(f"{self._path.name}.damaged-{int(time.time() * 1000)}")
        logger.error(
            "journal %s: %s. The journal was cut after record %d; the old file is %s",
            self._path,
            reason,
            last,
            aside,
        )
        draft = self._path.with_name(f"{self._path.name}.new")
        for leftover in database_files(draft):
            leftover.unlink(missing_ok=True)
        (schema,) = self._database.execute("PRAGMA user_version").fetchone()
        with closing(self._open(draft)) as copy, copy:
            copy.execute("BEGIN")
            copy.execute(f"PRAGMA user_version = {schema:d}")  # It may not be migrated yet.
            copy.executemany(
                _insert(1),
                self._database.execute(
                    f"SELECT {_ROWS} FROM records NOT INDEXED WHERE seq <= ? ORDER BY seq", (last,)
                ),
            )
            copy.executemany("INSERT INTO facts VALUES (?, ?)", self._facts())
        with suppress(sqlite3.Error):
            self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._database.close()
        os.link(self._path, aside)
        _, log, index = database_files(self._path)
        if log.exists():
            log.rename(f"{aside}-wal")
        index.unlink(missing_ok=True)
        draft.rename(self._path)
        self._database = self._open(self._path)


def _insert(num_rows: int) -> str:
    return f"INSERT INTO records ({_ROWS}) VALUES {', '.join([_ROW] * num_rows)}"


def _is_damage(error: sqlite3.DatabaseError) -> bool:
    """Whether the file's content caused the error, not the disk or the statement."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)  # no code: an invalid value
    return code & 0xFF == sqlite3.SQLITE_CORRUPT


def _is_no_room(error: Exception) -> bool:
    """Whether SQLite reports that the disk or the journal is full or cannot be written."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_OK)
    return code & 0xFF in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
