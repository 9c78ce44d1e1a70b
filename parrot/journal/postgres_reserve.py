"""Disk space of a PostgreSQL server that is kept for the records of accepted work."""

import logging
from typing import Any

import psycopg

logger = logging.getLogger(__name__)

_NAME = "parrot_reserve"
_PAGE_BYTES = 8192
_ROW_BITS = 15_000  # Four rows fill a page.
# Columns of other types get a second table for long values, and emptying that needs a page.
_CREATE = f"CREATE UNLOGGED TABLE IF NOT EXISTS {_NAME} (bits bit({_ROW_BITS}) NOT NULL)".encode()
_SIZE = f"SELECT coalesce(pg_relation_size(to_regclass('{_NAME}')), 0)".encode()
_EMPTY = f"TRUNCATE {_NAME}".encode()
_FILL = f"""
INSERT INTO {_NAME} SELECT repeat('10', {_ROW_BITS // 2})::bit({_ROW_BITS})
FROM generate_series(1, %s)
""".encode()


class TableReserve:
    """A table that is filled with bits. `release` empties it, which returns its space to the disk
    at once, and writes only a few bytes to the server's log. The table is not logged: after a crash
    the server empties it before it needs space for its recovery."""

    def __init__(self, num_bytes: int) -> None:
        self._num_rows = max(1, 4 * num_bytes // _PAGE_BYTES)
        self.is_held = False

    def acquire(self, server: psycopg.Connection[tuple[Any, ...]]) -> bool:
        """Fill the table, in a transaction of the caller. Returns False if the disk has less than
        twice the space for it: with less, the next records would need the reserve again at once.
        A user that may not create the table has no reserve, and need not wait for it."""
        if not self.is_held:
            try:
                with server.transaction():
                    self.look(server)
                    if not self.is_held:
                        server.execute(_CREATE)
                        self._fill(server)
            except psycopg.errors.DiskFull:
                return False
            except psycopg.errors.InsufficientPrivilege as error:
                logger.warning("the journal has no reserve on its disk: %s", error)
            self.is_held = True
        return True

    def release(self, server: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Empty the table, in a transaction of the caller. The space is free when it ends."""
        self.is_held = False
        server.execute(_EMPTY)

    def look(self, server: psycopg.Connection[tuple[Any, ...]]) -> None:
        """Find out whether the table is filled."""
        row = server.execute(_SIZE).fetchone()
        self.is_held = row is not None and row[0] >= self._num_rows // 4 * _PAGE_BYTES

    def _fill(self, server: psycopg.Connection[tuple[Any, ...]]) -> None:
        for num_rows in (2 * self._num_rows, self._num_rows):
            server.execute(_EMPTY)
            server.execute(_FILL, (num_rows,))
