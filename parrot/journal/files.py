"""The files of a journal on a disk: their names, their lock, and their owner."""

import fcntl
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from parrot.utils.config import ConfigError

MODE = 0o600  # Prompts and session secrets are for the owner only.


def database_files(path: Path) -> tuple[Path, Path, Path]:
    """A database, its write-ahead log, and the log's index."""
    return path, Path(f"{path}-wal"), Path(f"{path}-shm")


def locked(path: Path) -> BinaryIO:
    """Lock the journal for this process, and make all its files private. A missing file is created.
    Raises `ConfigError` if another process has it open, and as `_opened` does."""
    try:
        os.close(_opened(path))
        lock = open(_opened(Path(f"{path}.lock")), "wb")  # noqa: SIM115 - the caller closes it
    except OSError as error:
        raise ConfigError(f"journal: {path}: {error.strerror}") from None
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        lock.close()
        raise ConfigError(f"journal: another ServeCore has {path} open") from None
    try:
        for name in _present(path):
            with suppress(FileNotFoundError):
                os.close(_opened(name, flags=0))
    except OSError as error:
        lock.close()
        raise ConfigError(f"journal: {path}: {error.strerror}") from None
    except ConfigError:
        lock.close()
        raise
    return lock


def _present(path: Path) -> Iterator[Path]:
    """All files next to the journal that may hold its records."""
    _, log, index = database_files(path)
    yield from (log, index, Path(f"{path}.reserve"))
    yield from path.parent.glob(f"{path.name}.damaged-*")
    yield from path.parent.glob(f"{path.name}.new*")


def _opened(path: Path, flags: int = os.O_CREAT) -> int:
    """Open a file of this process's user, with mode 0600 from now on. Raises `ConfigError` for
    anything else: its owner could read the records, or replace them."""
    if path.is_symlink():
        raise ConfigError(f"journal: {path} is a symbolic link; set the path of the file itself")
    file = os.open(path, os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | flags, MODE)
    try:
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(f"journal: {path} is not a regular file")
        if found.st_uid != os.geteuid():
            raise ConfigError(
                f"journal: {path} belongs to user {found.st_uid}, but ServeCore runs as user "
                f"{os.geteuid()}; change its owner with chown, or set another path"
            )
        if stat.S_IMODE(found.st_mode) != MODE:
            os.fchmod(file, MODE)
    except BaseException:
        os.close(file)
        raise
    return file
