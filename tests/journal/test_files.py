"""The journal's files belong to its owner."""

import os
import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest

from parrot.journal.sqlite import JournalFile
from parrot.utils.config import ConfigError
from tests.journal.test_journal_file import SIZE, read, record

OPEN_MODE = 0o666


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_each_start_makes_all_files_private(tmp_path: Path) -> None:
    path = tmp_path / "j"
    before = JournalFile(str(path), SIZE)
    before.write([record(1)])
    log, index = Path(f"{path}-wal").read_bytes(), Path(f"{path}-shm").read_bytes()
    before.close()
    Path(f"{path}-wal").write_bytes(log)
    Path(f"{path}-shm").write_bytes(index)
    (tmp_path / "j.damaged-1").write_bytes(b"")
    files = [path, *(tmp_path / f"j{end}" for end in ("-wal", "-shm", ".damaged-1", ".reserve"))]
    for one in files:
        one.chmod(OPEN_MODE)
    after = JournalFile(str(path), SIZE)
    assert [mode(one) for one in files] == [0o600] * len(files)
    after.close()


def test_a_restored_copy_becomes_private(tmp_path: Path) -> None:
    path, copy = tmp_path / "j", tmp_path / "copy"
    file = JournalFile(str(path), SIZE)
    file.write([record(1)])
    with closing(sqlite3.connect(path)) as source, closing(sqlite3.connect(copy)) as target:
        source.backup(target)
    file.close()
    copy.chmod(0o644)
    assert read(copy) == [record(1)]
    assert mode(copy) == 0o600


def test_a_symbolic_link_is_rejected(tmp_path: Path) -> None:
    JournalFile(str(tmp_path / "real"), SIZE).close()
    for name in ("j", "other.lock"):
        (tmp_path / name).symlink_to(tmp_path / "real")
    for path in ("j", "other"):
        with pytest.raises(ConfigError, match="is a symbolic link"):
            JournalFile(str(tmp_path / path), SIZE)
    (tmp_path / "third-wal").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="third-wal is a symbolic link"):
        JournalFile(str(tmp_path / "third"), SIZE)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"pipe"):
        JournalFile(str(tmp_path / "pipe"), SIZE)
    assert read(tmp_path / "real") == []


@pytest.mark.parametrize("end", ["", ".lock", "-wal"])
def test_a_file_of_another_user_is_rejected(
    end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "j"
    if os.geteuid() != 0:
        pytest.skip("only root can give a file to another user")
    JournalFile(str(path), SIZE).close()
    foreign = Path(f"{path}{end}")
    foreign.touch(OPEN_MODE)
    os.chown(foreign, 65_534, 65_534)
    with pytest.raises(ConfigError, match=r"belongs to user 65534.*chown"):
        JournalFile(str(path), SIZE)
    os.chown(foreign, 0, 0)
    assert read(path) == []
