"""A PostgreSQL server of the tests' own, as Debian installs it."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.nemesis.database import PASSWORD, running_database
from tests.nemesis.database import Database as Server

__all__ = ["PASSWORD", "Server", "running_server"]


@contextmanager
def running_server() -> Iterator[Server]:
    """Skips the test where there is none."""
    try:
        running = running_database()
        server = running.__enter__()
    except LookupError as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        running.__exit__(None, None, None)
