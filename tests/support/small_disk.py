"""A disk of a few megabytes that tests can fill."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = ["mount", "-t", "tmpfs", "-o"]


class SmallDisk:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._filler = folder / "filler"

    def free_bytes(self) -> int:
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize

    def fill(self, left_bytes: int = 0) -> None:
        """Write to a file until `left_bytes` are free. A second call appends to the file."""
        with self._filler.open("ab", buffering=0) as file:
            while (num_bytes := self.free_bytes() - left_bytes) > 0:
                file.write(bytes(min(num_bytes, 2**20)))

    def free(self, num_bytes: int) -> None:
        """Remove this many bytes from the end of that file."""
        os.truncate(self._filler, self._filler.stat().st_size - num_bytes)

    def grow(self, num_bytes: int) -> None:
        """Set the size of the file system."""
        options = f"remount,size={num_bytes}"
        subprocess.run(["mount", "-o", options, self.folder], check=True)

    def clear(self) -> None:
        """Remove that file, if there is one."""
        self._filler.unlink(missing_ok=True)


@contextmanager
def small_disk(num_bytes: int, owner: str | None = None) -> Iterator[SmallDisk]:
    """Yield a small file system. Skips the test if none can be mounted."""
    folder = Path(tempfile.mkdtemp(prefix="parrot-disk-"))
    try:
        done = subprocess.run([*_MOUNT, f"size={num_bytes}", "none", folder], capture_output=True)
        if done.returncode != 0:
            pytest.skip("needs the right to mount a file system")
        try:
            if owner is not None:
                shutil.chown(folder, owner, owner)
            yield SmallDisk(folder)
        finally:
            subprocess.run(["umount", "--lazy", folder], check=True)
    finally:
        folder.rmdir()
