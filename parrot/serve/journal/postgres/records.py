"""The journal's records in a PostgreSQL database."""

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import psycopg

from parrot.serve.journal.postgres.connection import Connection, connect
from parrot.serve.journal.postgres.lease import Lease
from parrot.serve.journal.record import ENDED, Record
from parrot.serve.journal.storage import NotedEnds, is_whole

logger = logging.getLogger(__name__)

_TRIMMED = 512  # records that are removed at once
_OVERHEAD = 128  # bytes of a record besides its payload, about
_READ = 1000  # records that are fetched at once
# What a statement does is done in its own transaction, and only while `held` has a row: who takes
# the lease changes the epoch, and waits for all who look at it.
_HELD = "held AS (SELECT FROM parrot_lease WHERE epoch = %s FOR KEY SHARE)"
_WRITE = f"""
WITH {_HELD}, written AS (
    INSERT INTO parrot_records
    SELECT new.* FROM held, unnest(
        %s::bigint[], %s::float8[], %s::text[], %s::text[], %s::bytea[], %s::bigint[]
    ) AS new
    ON CONFLICT (seq) DO NOTHING
)
SELECT count(*) FROM held
""".encode()
_TRIM = f"""
WITH {_HELD}, gone AS (
    DELETE FROM parrot_records WHERE seq IN (
        SELECT seq FROM held, parrot_records WHERE subject = %s ORDER BY seq LIMIT {_TRIMMED}
    ) RETURNING octet_length(payload) + {_OVERHEAD} AS size
)
SELECT (SELECT count(*) FROM held), count(*), coalesce(sum(size), 0)::bigint FROM gone
""".encode()
_RECORDS = "SELECT seq, at, subject, kind, payload, checksum FROM parrot_records"
_SIZE = f"SELECT coalesce(sum(octet_length(payload) + {_OVERHEAD}), 0)::bigint FROM parrot_records"
_CUT = """
DO $$ BEGIN
    PERFORM FROM parrot_lease WHERE epoch = {epoch} FOR KEY SHARE;
    IF NOT FOUND THEN RAISE 'another ServeCore has taken over'; END IF;
END $$;
CREATE TABLE {aside} AS SELECT * FROM parrot_records WHERE seq > {last};
DELETE FROM parrot_records WHERE seq > {last};
"""


class Superseded(Exception):
    """Another process has the journal."""


class Full(Exception):
    """The journal has no room for more."""


class PostgresRecords(NotedEnds):
    """A `Storage`, for as long as the lease is held: not the smallest change is made after that. A
    connection that broke is made anew with the next call."""

    errors: type[Exception] = psycopg.Error

    def __init__(self, lease: Lease, max_bytes: int) -> None:
        """`max_bytes` of payloads, and something for each record: what the server needs besides is
        not counted."""
        super().__init__()
        self._lease = lease
        self.epoch = lease.epoch
        self.is_ours = lease.is_held
        self._max_bytes = max_bytes
        self._size = 0
        self._connection: Connection | None = None

    def fact(self, name: str, value: int) -> int:
        server = self._server()
        insertion = "INSERT INTO parrot_facts VALUES (%s, %s) ON CONFLICT DO NOTHING"
        server.execute(insertion, (name, value))
        known = server.execute("SELECT value FROM parrot_facts WHERE name = %s", (name,)).fetchone()
        assert known is not None
        return int(known[0])

    def read(self) -> Iterator[Record]:
        server = self._server()
        self._measure(server)
        last, is_damaged = 0, False
        with server.transaction(), server.cursor("parrot_read") as cursor:
            cursor.itersize = _READ
            cursor.execute(f"{_RECORDS} ORDER BY seq".encode())
            for *row, checksum in cursor:
                record = Record(*row)
                if is_damaged := not is_whole(record, checksum):
                    break
                last = record.seq
                if record.subject not in self._ended:
                    yield record
        if is_damaged:
            self._cut(server, last)

    def last_seq(self) -> int:
        row = self._server().execute("SELECT max(seq) FROM parrot_records").fetchone()
        return 0 if row is None or row[0] is None else int(row[0])

    def write(self, records: Sequence[Record]) -> None:
        """Write; records that a broken connection left in doubt may come again. Raises
        `Superseded`, and `Full` beyond the bound."""
        size = sum(len(record.payload) + _OVERHEAD for record in records)
        if self._size + size > self._max_bytes:
            raise Full(f"it has {self._size} bytes, and at most {self._max_bytes}")
        columns = zip(*[(*record, record.checksum) for record in records], strict=True)
        self._change(_WRITE, [list(column) for column in columns])
        self._size += size
        self.note_ends(records)

    def trim(self) -> None:
        """Raises `Superseded`."""
        subject = next(iter(self._ended))
        _, count, size = self._change(_TRIM, [subject])
        self._size -= size
        if count < _TRIMMED:
            del self._ended[subject]

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()

    def _server(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._lease.address)
        return self._connection

    def _change(self, statement: bytes, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The statement's row, which begins with how many leases were held."""
        values = (self.epoch, *arguments)
        try:
            row = self._server().execute(statement, values).fetchone()
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.closed:
                raise
            row = self._server().execute(statement, values).fetchone()  # the server was restarted
        assert row is not None
        if not row[0]:
            self._lease.lose()
            raise Superseded("another ServeCore has taken over")
        return row

    def _measure(self, server: Connection) -> None:
        size = server.execute(_SIZE.encode()).fetchone()
        assert size is not None
        (self._size,) = size
        ends = server.execute(f"{_RECORDS} WHERE kind = '{ENDED}'".encode())
        self._ended = {
            record.subject: None
            for *row, checksum in ends
            if is_whole(record := Record(*row), checksum)
        }

    def _cut(self, server: Connection, last: int) -> None:
        """Put the records behind `last` aside."""
        aside = f"parrot_records_damaged_{time.time_ns() // 1_000_000}"
        logger.error(
            "journal: the record behind %d is damaged. What follows is cut; see %s", last, aside
        )
        server.execute(_CUT.format(aside=aside, last=last, epoch=self.epoch).encode())
        self._measure(server)
