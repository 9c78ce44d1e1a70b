"""Checks, copies, restores and compacts a journal file, for `parrot journal`."""

import os
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from parrot.journal.files import MODE, database_files, locked
from parrot.journal.log import ENDED, Record, is_intact
from parrot.journal.migrations import require_known
from parrot.journal.sqlite import ALL_RECORDS, APPLICATION
from parrot.utils.config import ConfigError


class Findings(NamedTuple):
    """The result of a check. `damage`: what is wrong; empty if nothing is."""

    schema: int
    num_bytes: int
    num_free_bytes: int  # Inside of the file, for later records.
    kinds: Counter[str]  # Records by kind.
    num_live: int  # Subjects, such as sessions and responses, that have not ended.
    num_ended: int  # Subjects whose records will be removed.
    first_at: float | None  # Unix time of the first record.
    last_at: float | None
    damage: list[str]


def check(path: Path) -> Findings:
    """Read the whole file, also while ServeCore uses it. Raises `ConfigError` if it is no journal
    or cannot be read at all."""
    with _reading(path) as database:
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        (num_pages,) = database.execute("PRAGMA page_count").fetchone()
        (num_free,) = database.execute("PRAGMA freelist_count").fetchone()
        (page_size,) = database.execute("PRAGMA page_size").fetchone()
        damage = [
            str(row[0]) for row in database.execute("PRAGMA integrity_check(20)") if row[0] != "ok"
        ]
        kinds, live, ended = Counter[str](), set[str](), set[str]()
        first = last = None
        try:
            for *row, checksum in database.execute(ALL_RECORDS):
                record = Record(*row)
                if not is_intact(record, checksum):
                    damage.append(f"record {record.seq} has a wrong checksum")
                    continue
                kinds[record.kind] += 1
                (ended if record.kind == ENDED else live).add(record.subject)
                first, last = record.at if first is None else first, record.at
        except sqlite3.DatabaseError as error:
            damage.append(f"records cannot be read: {error}")
    return Findings(
        require_known(schema, str(path)),
        num_pages * page_size,
        num_free * page_size,
        kinds,
        len(live - ended),
        len(ended),
        first,
        last,
        damage,
    )


def backup(path: Path, copy: Path) -> Findings:
    """Copy the journal as it is at one moment, also while ServeCore uses it. The copy is private.
    Raises `ConfigError` if `copy` exists, or if the copy is damaged."""
    with _reading(path) as database:
        _create(copy)
        with closing(sqlite3.connect(copy)) as target:
            database.backup(target)
            target.execute("PRAGMA journal_mode = DELETE")  # One file, without a log.
    _sync(copy)
    findings = check(copy)
    if findings.damage:
        raise ConfigError(f"{copy}: the copy is damaged: {findings.damage[0]}")
    return findings


def restore(copy: Path, path: Path) -> Path | None:
    """Put a copy in the place of the journal while ServeCore is stopped. Returns where the replaced
    journal is now; None: there was none. Raises `ConfigError` if ServeCore has the journal open, or
    if the copy is damaged."""
    findings = check(copy)
    if findings.damage:
        raise ConfigError(f"{copy}: it is damaged: {findings.damage[0]}")
    was_there = path.exists()
    with closing(locked(path)):
        aside = path.with_name(f"{path.name}.replaced-{time.time_ns() // 1_000_000}")
        draft = path.with_name(f"{path.name}.restoring")
        draft.unlink(missing_ok=True)
        backup(copy, draft)
        for file, suffix in zip(database_files(path), ("", "-wal", "-shm"), strict=True):
            if file.exists():
                file.rename(f"{aside}{suffix}") if was_there else file.unlink()
        draft.rename(path)
        _sync(path.parent)
    return aside if was_there else None


def compact(path: Path) -> tuple[int, int]:
    """Remove the records of ended subjects, and shrink the file, while ServeCore is stopped.
    Returns its bytes before and after. Raises `ConfigError` if ServeCore has it open."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no journal")
    with closing(locked(path)):
        findings = check(path)
        if findings.damage:
            raise ConfigError(f"{path}: it is damaged: {findings.damage[0]}")
        before = _size(path)
        with closing(sqlite3.connect(path, isolation_level=None)) as database:
            database.execute(
                "DELETE FROM records WHERE subject IN "
                "(SELECT subject FROM records NOT INDEXED WHERE kind = ?)",
                (ENDED,),
            )
            database.execute("VACUUM")
            database.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return before, _size(path)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """The journal, for reading. SQLite's errors become `ConfigError`."""
    if not path.is_file():
        raise ConfigError(f"{path}: there is no journal")
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as database:
            (application,) = database.execute("PRAGMA application_id").fetchone()
            if application != APPLICATION:
                raise ConfigError(f"{path}: is a database, but not a journal of Parrot")
            yield database
    except (sqlite3.Error, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _create(path: Path) -> None:
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE))
    except FileExistsError:
        raise ConfigError(f"{path}: exists already; name a new file") from None


def _sync(path: Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in database_files(path)[:2] if file.exists())
