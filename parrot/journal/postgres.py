"""The journal in PostgreSQL: its lease, which one process holds, and its records."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict

from parrot.journal.log import ENDED, EndedSubjects, Record, is_intact
from parrot.journal.migrations import KINDS, SCHEMA, added_records, require_known
from parrot.journal.postgres_reserve import TableReserve
from parrot.journal.reserve import reserve_bytes
from parrot.utils.config import ConfigError

Connection = psycopg.Connection[tuple[Any, ...]]

# A lost server is noticed within about 5 s, independent of the operating system's defaults.
_OPTIONS: dict[str, Any] = {
    "application_name": "parrot",
    "connect_timeout": 5,
    "keepalives_idle": 2,
    "keepalives_interval": 1,
    "keepalives_count": 3,
    "tcp_user_timeout": 5000,
}
# `read committed`: a statement that waited for the lease's row sees its new version.
# `synchronous_commit`: acknowledged records are on disk.
_SETTINGS = """
SET default_transaction_isolation = 'read committed';
SELECT set_config('synchronous_commit', 'on', false)
WHERE current_setting('synchronous_commit') = 'off';
"""
_ONE_AT_A_TIME = 0x50727274
_TABLES = f"""
CREATE TABLE parrot_records (
    seq bigint PRIMARY KEY, at double precision NOT NULL, subject text NOT NULL, kind text NOT NULL,
    payload bytea NOT NULL, checksum bigint NOT NULL
);
CREATE INDEX parrot_records_subject ON parrot_records (subject, seq);
CREATE INDEX parrot_records_ended ON parrot_records (subject) WHERE kind = 'ended';
CREATE TABLE parrot_facts (name text PRIMARY KEY, value bigint NOT NULL);
INSERT INTO parrot_facts VALUES ('schema', {SCHEMA});
CREATE TABLE parrot_lease (epoch bigint PRIMARY KEY, expires timestamptz NOT NULL);
INSERT INTO parrot_lease VALUES (0, '-infinity');
""".encode()


def connect(address: str) -> Connection:
    """A connection in autocommit mode. Raises `psycopg.Error`."""
    options = _OPTIONS | conninfo_to_dict(address)
    connection = psycopg.connect(**options, autocommit=True)
    try:
        connection.execute(_SETTINGS)
    except BaseException:
        connection.close()
        raise
    return connection


def prepare(address: str) -> None:
    """Create missing tables. Raises `ConfigError` if the server cannot be reached or the tables
    have another schema version."""
    try:
        conninfo_to_dict(address)
    except psycopg.Error:  # Its message may contain the password.
        raise ConfigError(
            "journal: must be an address like postgresql://USER:PASSWORD@HOST:PORT/DATABASE"
        ) from None
    try:
        with connect(address) as connection, connection.transaction():
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_ONE_AT_A_TIME,))
            if connection.execute("SELECT to_regclass('parrot_facts')").fetchone() == (None,):
                connection.execute(_TABLES)
            schema = connection.execute("SELECT value FROM parrot_facts WHERE name = 'schema'")
            found = schema.fetchone()
            require_known(None if found is None else found[0], "the database")
    except psycopg.Error as error:
        raise ConfigError(f"journal: {error}") from None


logger = logging.getLogger(__name__)

LEASE_S = 3.0  # Seconds that a lease is valid. A standby takes over this long after a crash.
_RENEWAL_S = 1.0  # Seconds between renewals.
_RETRY_S = 0.25  # Seconds before the next attempt after a database error.
_POLL_S = 1.0  # Longest wait of a standby in seconds, so that it notices `close`.
_CLOSE_S = 3.0  # Seconds that `close` waits for the thread.
_ACQUIRE = """
UPDATE parrot_lease
SET epoch = greatest(epoch + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint),
    expires = clock_timestamp() + make_interval(secs => %s)
WHERE expires < clock_timestamp() RETURNING epoch
"""
_RENEW = """
UPDATE parrot_lease SET expires = clock_timestamp() + make_interval(secs => %s) WHERE epoch = %s
"""
_REMAINING = "SELECT extract(epoch FROM expires - clock_timestamp())::float8 FROM parrot_lease"
_RELEASE = "UPDATE parrot_lease SET expires = '-infinity' WHERE epoch = %s"
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # It also counts a machine's sleep.


class Lease:
    """The right to write a journal for `LEASE_S`, which a thread renews. Each holder has a greater
    `epoch`. A write checks the epoch in its own transaction, so a former holder cannot write after
    the next holder's first read. Use an instance once, from one event loop; close it when done."""

    def __init__(self, address: str) -> None:
        """The tables must exist: see `prepare`."""
        self.address = address
        self.epoch = 0
        self._lost = asyncio.Event()
        self._until = 0.0  # until this time no other process can hold the lease
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    async def acquire(self) -> None:
        """Wait until the lease is free, and acquire it. Raises the errors of the thread."""
        taken = self._loop.create_future()
        keep = threading.Thread(target=self._run, args=(taken,), name="lease", daemon=True)
        self._thread = keep
        keep.start()
        await taken

    async def lost(self) -> None:
        """Return when another process holds the lease, or may hold it: if the server cannot be
        reached, this is assumed `LEASE_S` after the lease has expired."""
        while not self._lost.is_set() and (left_s := self._until + LEASE_S - _now()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), left_s)

    def is_held(self) -> bool:
        """Whether it is certain that no other process holds the lease."""
        return _now() < self._until

    def lose(self) -> None:
        """Treat the lease as lost. Thread-safe."""
        self._until = 0.0
        self._report(self._lost.set)

    async def close(self) -> None:
        """Release the lease, so that the next holder need not wait for its expiry."""
        self._is_closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    # In the lease thread

    def _run(self, taken: "asyncio.Future[None]") -> None:
        """Run `_keep`. An unexpected error fails `acquire`, or marks the lease as lost."""
        try:
            self._keep(taken)
        except Exception as error:
            logger.exception("the journal's lease is no longer renewed")
            self.lose()
            self._report(partial(_settle, taken, error))

    def _keep(self, taken: "asyncio.Future[None]") -> None:
        connection: Connection | None = None
        trouble = ""
        try:
            while not self._is_closing.is_set():
                try:
                    if connection is None or connection.closed:
                        connection = connect(self.address)
                        connection.execute("LISTEN parrot_lease")
                    if not self._step(connection, taken):
                        break
                    trouble = ""
                except psycopg.Error as error:
                    if not trouble:
                        trouble = str(error)
                        logger.error("the journal's lease cannot be acquired: %s", trouble)
                    self._is_closing.wait(_RETRY_S)
        finally:
            if connection is not None:
                self._release(connection)

    def _step(self, connection: Connection, taken: "asyncio.Future[None]") -> bool:
        """Acquire or renew the lease, and wait until the next step. False: the lease is lost."""
        if self.epoch:
            if not self._renew(connection):
                self.lose()
                return False
        elif (wait_s := self._try_acquire(connection)) is not None:
            for _ in connection.notifies(timeout=min(wait_s, _POLL_S), stop_after=1):
                pass
            return True
        else:
            self._report(partial(_settle, taken))
        self._is_closing.wait(_RENEWAL_S)
        return True

    def _try_acquire(self, connection: Connection) -> float | None:
        """Acquire the lease and return None. If it is not free, return the seconds it is valid."""
        before = _now()
        row = connection.execute(_ACQUIRE, (LEASE_S,)).fetchone()
        if row is not None:
            (self.epoch,) = row
            self._until = before + LEASE_S
            return None
        row = connection.execute(_REMAINING).fetchone()
        if row is None:
            raise psycopg.DataError("the table parrot_lease is empty")
        return max(0.0, float(row[0])) + 0.01

    def _renew(self, connection: Connection) -> bool:
        """Renew the lease. False: another process holds it."""
        before = _now()
        if connection.execute(_RENEW, (LEASE_S, self.epoch)).rowcount == 0:
            return False
        self._until = before + LEASE_S
        return True

    def _release(self, connection: Connection) -> None:
        try:
            with connection:
                if self.is_held():
                    self._until = 0.0
                    connection.execute(_RELEASE, (self.epoch,))
                    connection.execute("NOTIFY parrot_lease")
        except psycopg.Error as error:
            logger.warning("the journal's lease was not released: %s", error)

    def _report(self, event: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(event)


def _settle(waiter: "asyncio.Future[None]", error: Exception | None = None) -> None:
    if waiter.done():
        return
    if error is None:
        waiter.set_result(None)
    else:
        waiter.set_exception(error)


def _now() -> float:
    return time.clock_gettime(_CLOCK)


_TRIMMED = 512  # Records that one `trim` removes. A larger number delays pending writes longer.
_OVERHEAD = 128  # Estimated bytes of a record without its payload.
_REFILL_S = 1.0  # Shortest time in seconds between two attempts to fill the reserve.
_REFILL_PART = 20  # Attempts take at most this part of the time.
_READ = 1000  # Records that are fetched at once.
# Each statement is its own transaction and has an effect only if `held` has a row. A process that
# takes the lease changes the epoch, and first waits for all transactions that have locked the row.
_LOCKED = "SELECT FROM parrot_lease WHERE epoch = %s FOR KEY SHARE"
_HELD = f"held AS ({_LOCKED})"
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
_SCHEMA_OF = "SELECT value FROM parrot_facts WHERE name = 'schema'"
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


class Superseded(psycopg.OperationalError):
    """Another process holds the journal's lease."""


class Full(Exception):
    """The journal has reached its maximum size."""


class PostgresRecords(EndedSubjects):
    """A `Storage` that changes nothing after the lease was lost. A broken connection is replaced
    at the next call."""

    errors: type[Exception] = psycopg.Error

    def __init__(self, lease: Lease, max_bytes: int) -> None:
        """`max_bytes` limits the payloads plus about 128 bytes per record. The server's own
        overhead is not counted."""
        super().__init__()
        self._lease = lease
        self.epoch = lease.epoch
        self.is_owned = lease.is_held
        self._max_bytes = max_bytes
        self._usual_limit = self._limit = max_bytes - reserve_bytes(max_bytes)
        self._reserve = TableReserve(reserve_bytes(max_bytes))
        self._refill_at = 0.0  # Time of the next try to fill the reserve, on the monotonic clock.
        self._must_vacuum = False  # Whether VACUUM must free the space of removed records.
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
        self._migrate(server)
        self._measure(server)
        last, is_damaged = 0, False
        with server.transaction(), server.cursor("parrot_read") as cursor:
            cursor.itersize = _READ
            cursor.execute(f"{_RECORDS} ORDER BY seq".encode())
            for *row, checksum in cursor:
                record = Record(*row)
                if is_damaged := not is_intact(record, checksum):
                    break
                last = record.seq
                if record.subject not in self._ended:
                    yield record
        if is_damaged:
            self._cut(server, last)
        self._acquire_reserve()

    def last_seq(self) -> int:
        row = self._server().execute("SELECT max(seq) FROM parrot_records").fetchone()
        return 0 if row is None or row[0] is None else int(row[0])

    def write(self, records: Sequence[Record]) -> None:
        """Write the records. Records may repeat if a broken connection left their fate unknown.
        Raises `Superseded`, and `Full` if they would exceed `max_bytes`."""
        size = sum(len(record.payload) + _OVERHEAD for record in records)
        if self._size + size > self._limit:
            raise Full(f"it is full: {self._size} of at most {self._limit} bytes are used")
        columns = zip(*[(*record, record.checksum) for record in records], strict=True)
        self._change(_WRITE, [list(column) for column in columns])
        self._size += size
        self.note_ends(records)

    @property
    def is_short(self) -> bool:
        return self._limit > self._usual_limit or not self._reserve.is_held

    def use_reserve(self, error: Exception) -> bool:
        if self.is_short or not isinstance(error, (Full, psycopg.errors.DiskFull)):
            return False
        self._limit = self._max_bytes
        try:
            with self._locked() as server:
                self._reserve.release(server)
        except psycopg.Error as failure:
            logger.error("the journal's reserve cannot be released: %s", failure)
            return isinstance(error, Full)
        return True

    def refill(self) -> bool:
        began = time.monotonic()
        if began < self._refill_at:
            return False
        self._vacuum()
        if self._size >= self._usual_limit:
            return False
        is_held = self._acquire_reserve()
        if is_held:
            self._limit = self._usual_limit
        else:  # The attempt has filled the disk.
            now = time.monotonic()
            self._refill_at = now + max(_REFILL_S, _REFILL_PART * (now - began))
        return is_held

    def describe(self, error: Exception) -> str:
        if isinstance(error, psycopg.errors.DiskFull):
            return "the disk of its database is full"
        if isinstance(error, psycopg.OperationalError):
            return "its database does not answer"
        if isinstance(error, psycopg.Error):
            return "its database has rejected a record"
        return str(error)

    def trim(self) -> None:
        """Raises `Superseded`."""
        subject = next(iter(self._ended))
        _, count, size = self._change(_TRIM, [subject])
        self._size -= size
        self._must_vacuum = True
        if count < _TRIMMED:
            del self._ended[subject]

    def close(self) -> None:
        if self._connection is not None:
            with suppress(psycopg.Error):
                self._connection.close()

    def _server(self) -> Connection:
        if self._connection is None or self._connection.closed:
            self._connection = connect(self._lease.address)
            self._reserve.look(self._connection)  # A server that has crashed has emptied it.
        return self._connection

    @contextmanager
    def _locked(self) -> Iterator[Connection]:
        """A transaction, while which no other process can acquire the lease. Raises `Superseded`
        if another one holds it."""
        server = self._server()
        with server.transaction():
            if server.execute(_LOCKED.encode(), (self.epoch,)).rowcount == 0:
                self._lease.lose()
                raise Superseded("another ServeCore has taken over")
            yield server

    def _acquire_reserve(self) -> bool:
        with self._locked() as server:
            return self._reserve.acquire(server)

    def _vacuum(self) -> None:
        """Let new records use the space of removed ones, which autovacuum does only once per
        minute."""
        if self._must_vacuum:
            try:
                self._server().execute("VACUUM parrot_records")
                self._must_vacuum = False
            except psycopg.errors.DiskFull as error:  # Its map of free space may need a page.
                logger.warning("the space of deleted sessions cannot be used yet: %s", error)

    def _change(self, statement: bytes, arguments: Sequence[Any]) -> tuple[Any, ...]:
        """The statement's row. Its first column counts the held leases. Raises `Superseded`."""
        values = (self.epoch, *arguments)
        try:
            row = self._server().execute(statement, values).fetchone()
        except psycopg.OperationalError:
            if self._connection is not None and not self._connection.closed:
                raise
            row = self._server().execute(statement, values).fetchone()  # The server has restarted.
        assert row is not None
        if not row[0]:
            self._lease.lose()
            raise Superseded("another ServeCore has taken over")
        return row

    def _migrate(self, server: Connection) -> None:
        """Bring the tables to the present version, in one transaction that checks the lease."""
        with self._locked():
            (schema,) = server.execute(_SCHEMA_OF).fetchone() or (None,)
            if schema == SCHEMA:
                return
            rows = server.execute(f"{_RECORDS} WHERE kind = ANY(%s)".encode(), (list(KINDS),))
            found = [(Record(*row), checksum) for *row, checksum in rows]
            records = [record for record, checksum in found if is_intact(record, checksum)]
            last = self.last_seq()
            for record in added_records(records, last):
                values = (*record, record.checksum)
                server.execute("INSERT INTO parrot_records VALUES (%s,%s,%s,%s,%s,%s)", values)
            server.execute("UPDATE parrot_facts SET value = %s WHERE name = 'schema'", (SCHEMA,))
        logger.info("journal: migrated from schema version %d to %d", schema, SCHEMA)

    def _measure(self, server: Connection) -> None:
        size = server.execute(_SIZE.encode()).fetchone()
        assert size is not None
        (self._size,) = size
        ends = server.execute(f"{_RECORDS} WHERE kind = '{ENDED}'".encode())
        self._ended = {
            record.subject: None
            for *row, checksum in ends
            if is_intact(record := Record(*row), checksum)
        }

    def _cut(self, server: Connection, last: int) -> None:
        """Move the records after `last` to another table."""

        aside = f"parrot_records_damaged_{time.time_ns() // 1_000_000}"
        logger.error(
            "journal: the record after %d is damaged. It and later ones were moved to the table %s",
            last,
            aside,
        )
        server.execute(_CUT.format(aside=aside, last=last, epoch=self.epoch).encode())
        self._measure(server)
