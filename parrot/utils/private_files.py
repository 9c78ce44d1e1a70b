"""Files that only this user can read, because they may contain programs' data."""

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_private(path: str | Path, *, is_new: bool) -> BinaryIO:
    """Open a file for appending, with mode 600. `is_new`: truncate it first. Pipes and devices such
    as /dev/stderr keep their mode. Raises `OSError`."""
    flags = os.O_WRONLY | os.O_CREAT | (os.O_TRUNC if is_new else os.O_APPEND)
    file = open(os.open(path, flags, 0o600), "wb" if is_new else "ab")  # noqa: SIM115 - given away
    facts = os.fstat(file.fileno())
    if stat.S_ISREG(facts.st_mode) and facts.st_uid == os.getuid():
        os.fchmod(file.fileno(), 0o600)
    return file
