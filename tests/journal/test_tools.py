"""`parrot journal check|backup|restore|compact`."""

import os
import sqlite3
import stat
import threading
from contextlib import closing
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from parrot.cli.app import app
from parrot.journal.log import ENDED
from parrot.journal.sqlite import JournalFile
from tests.journal.test_journal_file import SIZE, filled, read, record


def journal(*args: object) -> Result:
    return CliRunner().invoke(app, ["journal", *map(str, args)])


def test_a_check_counts_records_and_finds_damage(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path)
    result = journal("check", path)
    assert result.exit_code == 0, result.output
    assert "schema version 2" in result.output
    assert "60 records: call 60" in result.output
    assert "1 live and 0 ended" in result.output
    with closing(sqlite3.connect(path)) as database, database:
        database.execute("UPDATE records SET payload = x'00' WHERE seq = 7")
    before = path.read_bytes()
    result = journal("check", path)
    assert result.exit_code == 1
    assert "record 7 has a wrong checksum" in result.output
    assert path.read_bytes() == before  # A check changes nothing.


def test_a_backup_during_writes_is_consistent(tmp_path: Path) -> None:
    path = tmp_path / "j"
    file = JournalFile(str(path), SIZE)
    stop, written = threading.Event(), threading.Event()
    last = 0

    def write() -> None:
        nonlocal last
        while not stop.is_set():
            file.write([record(last + 1, size=2000), record(last + 2)])
            last += 2
            written.set()

    writer = threading.Thread(target=write)
    writer.start()
    assert written.wait(20)
    for number in range(5):
        written.clear()
        assert written.wait(20)  # the writer continues between the backups
        before = last
        result = journal("backup", path, tmp_path / f"copy{number}")
        assert result.exit_code == 0, result.output
        found = read(tmp_path / f"copy{number}")
        assert len(found) >= before
        assert len(found) % 2 == 0  # no transaction is split
        assert [one.seq for one in found] == list(range(1, len(found) + 1))
    stop.set()
    writer.join()
    file.close()
    assert stat.S_IMODE(os.stat(tmp_path / "copy0").st_mode) == 0o600
    assert journal("backup", path, tmp_path / "copy0").exit_code == 1  # Nothing is overwritten.


def test_a_restore_replaces_the_journal_and_keeps_the_old_one(tmp_path: Path) -> None:
    path, copy = tmp_path / "j", tmp_path / "copy"
    filled(path, 10)
    assert journal("backup", path, copy).exit_code == 0
    copy.chmod(0o644)
    file = JournalFile(str(path), SIZE)
    file.write([record(11)])
    result = journal("restore", copy, path)
    assert (result.exit_code, "has" in result.output) == (1, True)  # ServeCore has it open.
    file.close()
    assert journal("restore", copy, path).exit_code == 0
    assert [one.seq for one in read(path)] == list(range(1, 11))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (aside,) = tmp_path.glob("j.replaced-*")
    assert len(read(aside)) == 11
    assert journal("restore", copy, tmp_path / "new").exit_code == 0
    assert len(read(tmp_path / "new")) == 10


def test_a_damaged_copy_is_not_restored(tmp_path: Path) -> None:
    path, copy = tmp_path / "j", tmp_path / "copy"
    filled(path, 10)
    filled(copy, 10)
    with closing(sqlite3.connect(copy)) as database, database:
        database.execute("UPDATE records SET at = 0 WHERE seq = 3")
    result = journal("restore", copy, path)
    assert result.exit_code == 1
    assert "record 3" in result.output
    assert len(read(path)) == 10


def test_compacting_removes_ended_sessions_and_shrinks_the_file(tmp_path: Path) -> None:
    path = tmp_path / "j"
    filled(path, 400, size=4000)
    file = JournalFile(str(path), SIZE)
    file.write([record(401, "1", ENDED), record(402, "2")])
    assert journal("compact", path).exit_code == 1  # ServeCore has it open.
    file.close()
    before = path.stat().st_size
    assert journal("compact", path).exit_code == 0
    assert path.stat().st_size < before / 10
    assert [(one.seq, one.subject) for one in read(path)] == [(402, "2")]


@pytest.mark.parametrize("command", ["check", "compact"])
def test_a_missing_or_foreign_file_is_rejected(command: str, tmp_path: Path) -> None:
    assert "there is no journal" in journal(command, tmp_path / "none").output
    assert not (tmp_path / "none").exists()
    with closing(sqlite3.connect(tmp_path / "other")) as database:
        database.execute("CREATE TABLE t (x)")
    result = journal(command, tmp_path / "other")
    assert result.exit_code == 1
    assert "not a journal" in result.output
