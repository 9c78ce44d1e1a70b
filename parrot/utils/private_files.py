"""Files that nobody but this user may read: they may hold what programs sent."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_private(path: str | Path, *, is_new: bool) -> BinaryIO:
    """A file to write at its end, with mode 600; `is_new`: emptied first. What is no regular file
    (a pipe, /dev/stderr) stays as it is. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_new else os.O_APPEND)
    file = open(os.open(path, flags, 0o600), "wb" if is_new else "ab")  # noqa: SIM115 - given away
    facts = os.fstat(file.fileno())
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid():
        os.fchmod(file.fileno(), 0o600)
    return file
