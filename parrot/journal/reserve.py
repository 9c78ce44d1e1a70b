"""Disk space next to the journal that is kept for the records of accepted work."""

import logging
import os
from contextlib import suppress
from pathlib import Path

from parrot.journal.files import MODE

logger = logging.getLogger(__name__)

MAX_BYTES = 16 * 2**20
_PART = 8  # The reserve is at most this part of the journal's maximum size.


def reserve_bytes(journal_bytes: int) -> int:
    """The size of the reserve of a journal with this maximum size."""
    return min(MAX_BYTES, journal_bytes // _PART)


class Reserve:
    """A preallocated file. `release` returns its space to the disk, for other files to use."""

    def __init__(self, path: Path, num_bytes: int) -> None:
        self._path = path
        self._num_bytes = num_bytes
        self.is_held = False

    def acquire(self) -> bool:
        """Allocate the file. Returns False if the disk has less than twice the space for it: with
        less, the next records would need the reserve again at once."""
        if not self.is_held:
            try:
                self.is_held = self._is_allocated() or (self._has_room() and self._allocate())
            except OSError as error:
                logger.warning("%s: cannot be allocated: %s", self._path, error)
                self.release()
        return self.is_held

    def release(self) -> None:
        self.is_held = False
        with suppress(OSError):
            os.truncate(self._path, 0)

    def _is_allocated(self) -> bool:
        """Whether an earlier process has left the whole file."""
        with suppress(FileNotFoundError):
            return self._path.stat().st_blocks * 512 >= self._num_bytes
        return False

    def _has_room(self) -> bool:
        disk = os.statvfs(self._path.parent)
        return disk.f_bavail * disk.f_frsize >= 2 * self._num_bytes

    def _allocate(self) -> bool:
        file = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, MODE)
        try:
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(file, 0, self._num_bytes)
            else:  # macOS
                os.pwrite(file, bytes(self._num_bytes), 0)
        finally:
            os.close(file)
        return True
