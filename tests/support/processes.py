"""Facts about processes, from /proc."""

import os
from contextlib import suppress
from pathlib import Path

import pytest

LOOPBACK = "0100007F"

needs_proc = pytest.mark.skipif(
    not Path("/proc/self/task").is_dir(), reason="looks for processes in /proc"
)


def children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError):  # The thread may have ended since.
            found += [int(child) for child in (task / "children").read_text().split()]
    return found


def is_running(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False


def own_addresses(pid: int) -> set[str]:
    """The local addresses of a process's TCP sockets, in the kernel's notation."""
    own = {os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    found: set[str] = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        for line in table.read_text().splitlines()[1:] if table.exists() else ():
            fields = line.split()
            if f"socket:[{fields[9]}]" in own:
                found.add(fields[1].partition(":")[0])
    return found
