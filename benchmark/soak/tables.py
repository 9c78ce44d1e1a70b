"""The sizes of all containers in a process's objects, and its memory."""

import gc
import sys
from array import array
from collections import Counter
from collections.abc import Iterator, Sized
from pathlib import Path
from typing import Any

_MIB = 2**20
_PAGE = 4096
_MAX_RATIO, _MAX_MORE = 1.05, 200
_NO_TABLES = (str, bytes, bytearray, array, tuple, type)


def table_sizes(prefix: str = "parrot.") -> Counter[str]:
    """Counts for all objects whose class is in a module with the prefix. The key "CLASS" counts the
    objects of a class. The key "CLASS.ATTRIBUTE" counts the entries of the containers in that
    attribute. Garbage is collected first."""
    gc.collect()
    found: Counter[str] = Counter()
    for one in gc.get_objects():
        kind = type(one)
        if not str(getattr(kind, "__module__", "")).startswith(prefix):
            continue
        name = f"{kind.__module__.removeprefix(prefix)}.{kind.__qualname__}"
        found[name] += 1
        for attribute, value in _attributes(one, kind):
            if isinstance(value, Sized) and not isinstance(value, _NO_TABLES):
                found[f"{name}.{attribute}"] += _len(value)
    return found


def _attributes(one: object, kind: type) -> Iterator[tuple[str, Any]]:
    yield from list(getattr(one, "__dict__", {}).items())
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(one, name):
                yield name, getattr(one, name)


def _len(value: Sized) -> int:
    try:
        return len(value)
    except Exception:  # noqa: BLE001 - a half-initialised object
        return 0


def grown(before: Counter[str], after: Counter[str]) -> dict[str, tuple[int, int]]:
    """The tables that have grown by more than usual fluctuations, largest growth first."""
    found = {
        name: (before[name], after[name])
        for name in after
        if after[name] > _MAX_RATIO * before[name] + _MAX_MORE
    }
    return dict(sorted(found.items(), key=lambda item: item[1][0] - item[1][1]))


def resident_mib() -> float:
    """The resident memory of this process (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE / _MIB


def allocated_blocks() -> int:
    """The number of memory blocks that the interpreter has allocated."""
    return sys.getallocatedblocks()
