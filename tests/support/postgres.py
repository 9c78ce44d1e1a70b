"""A PostgreSQL server for the tests, as Debian installs it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.nemesis.database import PASSWORD, running_database
from tests.nemesis.database import Database as Server

__all__ = ["PASSWORD", "Server", "running_server"]


@contextmanager
def running_server(log_folder: Path | None = None) -> Iterator[Server]:
    """Start a server. Skips the test if PostgreSQL is not installed. `log_folder`: see `Server`."""
    try:
        running = running_database(log_folder)
        server = running.__enter__()
    except LookupError as missing:
        pytest.skip(str(missing))
    try:
        yield server
    finally:
        running.__exit__(None, None, None)
