"""The lease of a journal: which of several processes has it, by its server's clock."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

import psycopg

from parrot.serve.journal.postgres.connection import Connection, connect

logger = logging.getLogger(__name__)

LEASE_S = 3.0
_RENEWAL_S = 1.0
_RETRY_S = 0.25
_LOOK_S = 1.0  # a standby may be told to end
_CLOSE_S = 3.0
_TAKE = """
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
_CLOCK = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


class Lease:
    """The right to write a journal, which a thread renews while this process has it. It is for
    `LEASE_S`, and the next holder's `epoch` is greater: a write that names the `epoch` in its own
    transaction cannot come after the next holder's first look. Use from one event loop, to have it
    once; close when done."""

    def __init__(self, address: str) -> None:
        """The tables are there, see `prepare`."""
        self.address = address
        self.epoch = 0
        self._lost = asyncio.Event()
        self._until = 0.0  # nobody else can have it before
        self._is_closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop = asyncio.get_running_loop()

    async def take(self) -> None:
        """Wait until it is nobody else's, and have it. Raises what the thread raises."""
        taken = self._loop.create_future()
        keep = threading.Thread(target=self._run, args=(taken,), name="lease", daemon=True)
        self._thread = keep
        keep.start()
        await taken

    async def over(self) -> None:
        """Return when somebody else has it, or has had the time to take it for as long again: while
        the server cannot be reached nobody knows."""
        while not self._lost.is_set() and (left_s := self._until + LEASE_S - _now()) > 0:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._lost.wait(), left_s)

    def is_held(self) -> bool:
        """Whether it is certain that nobody else has it yet."""
        return _now() < self._until

    def lose(self) -> None:
        """Take it for somebody else's. From any thread."""
        self._until = 0.0
        self._tell(self._lost.set)

    async def close(self) -> None:
        """Give it back, so that the next one need not wait."""
        self._is_closing.set()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, _CLOSE_S)

    # In the thread

    def _run(self, taken: "asyncio.Future[None]") -> None:
        """A defect reaches whoever waits for the lease, or ends it."""
        try:
            self._keep(taken)
        except Exception as error:
            logger.exception("the journal's lease is not renewed any more")
            self.lose()
            self._tell(partial(_settle, taken, error))

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
                        logger.error("the journal's lease cannot be asked for: %s", trouble)
                    self._is_closing.wait(_RETRY_S)
        finally:
            if connection is not None:
                self._release(connection)

    def _step(self, connection: Connection, taken: "asyncio.Future[None]") -> bool:
        """Take or renew it, and wait until that is to be done again. False: it is lost."""
        if self.epoch:
            if not self._renew(connection):
                self.lose()
                return False
        elif (wait_s := self._try(connection)) is not None:
            for _ in connection.notifies(timeout=min(wait_s, _LOOK_S), stop_after=1):
                pass
            return True
        else:
            self._tell(partial(_settle, taken))
        self._is_closing.wait(_RENEWAL_S)
        return True

    def _try(self, connection: Connection) -> float | None:
        """Take it if it is free, and return None; else the seconds until it may be."""
        before = _now()
        row = connection.execute(_TAKE, (LEASE_S,)).fetchone()
        if row is not None:
            (self.epoch,) = row
            self._until = before + LEASE_S
            return None
        row = connection.execute(_REMAINING).fetchone()
        if row is None:
            raise psycopg.DataError("the table parrot_lease is empty")
        return max(0.0, float(row[0])) + 0.01

    def _renew(self, connection: Connection) -> bool:
        """False: somebody else has it."""
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
            logger.warning("the journal's lease was not given back: %s", error)

    def _tell(self, event: Callable[[], object]) -> None:
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
