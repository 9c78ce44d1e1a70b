"""The free memory of the host."""

import os
from pathlib import Path

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def available_memory() -> int:
    """Bytes that this process can have without swapping, also if it is one of a group with a limit;
    half of all memory where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    left = _left_in_group(_CONTROL_GROUP)
    return free << 10 if left is None else min(free << 10, left)


def _left_in_group(folder: Path) -> int | None:
    """Bytes that a control group may still take, the files that it has read aside; None if it has
    no limit, or does not say."""
    try:
        limit, used = (int((folder / f"memory.{n}").read_text()) for n in ("max", "current"))
        stat = (folder / "memory.stat").read_text().split()
    except (OSError, ValueError):
        return None
    is_there = "inactive_file" in stat
    cached = int(stat[stat.index("inactive_file") + 1]) if is_there else 0
    return max(0, limit - used + cached)
