"""The journal in PostgreSQL: its lease, writes of a former holder, damage, a full journal, and a
server that dies or hangs."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from parrot.journal.log import ENDED, Journal, Record
from parrot.protocol.errors import InsufficientStorage, Unavailable
from parrot.serve.config import CoreConfig
from parrot.server.standby import serve_in_turn
from parrot.utils.clock import MonotonicClock
from parrot.utils.config import ConfigError
from tests.journal.test_journal_file import record, recovered
from tests.support.postgres import PASSWORD, Server

psycopg = pytest.importorskip(
    "psycopg", reason="needs psycopg: pip install 'parrot-serve[postgres]'"
)

from parrot.journal.postgres import (  # noqa: E402  # noqa: E402
    LEASE_S,
    Full,
    Lease,
    PostgresRecords,
    Superseded,
    prepare,
)

SIZE = 2**30


@asynccontextmanager
async def taken(address: str) -> AsyncIterator[Lease]:
    prepare(address)
    lease = Lease(address)
    try:
        async with asyncio.timeout(10):
            await lease.acquire()
        yield lease
    finally:
        await lease.close()


@asynccontextmanager
async def held(address: str, size: int = SIZE) -> AsyncIterator[PostgresRecords]:
    async with taken(address) as lease:
        records = PostgresRecords(lease, size)
        try:
            yield records
        finally:
            records.close()


async def read(address: str) -> list[Record]:
    async with held(address) as records:
        return list(records.read())


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110 - threads change the condition
            await asyncio.sleep(0.02)


async def is_over(lease: Lease) -> bool:
    over = asyncio.ensure_future(lease.lost())
    await asyncio.wait((over,), timeout=0.1)
    over.cancel()
    return over.done()


def execute(address: str, statement: str) -> list[tuple[object, ...]]:
    with psycopg.connect(address, autocommit=True) as connection:
        cursor = connection.execute(statement.encode())
        return cursor.fetchall() if cursor.description else []


async def test_written_records_are_read_and_each_holder_has_a_higher_epoch(
    postgres: Server,
) -> None:
    address = postgres.database()
    written = [record(seq, size=20 * seq) for seq in range(1, 61)]
    epochs = []
    async with held(address) as records:
        assert (list(records.read()), records.last_seq()) == ([], 0)
        for begin in range(0, 60, 7):
            records.write(written[begin : begin + 7])
        records.write(written[-7:])  # like after a commit whose answer was lost
        epochs.append(records.epoch)
    for _ in range(2):
        async with held(address) as records:
            assert list(records.read()) == written
            assert records.last_seq() == 60
            assert [records.fact("first", 7), records.fact("first", 8)] == [7, 7]
            epochs.append(records.epoch)
    assert len(set(epochs)) == 3
    assert epochs == sorted(epochs)
    assert abs(epochs[0] / 1000 - time.time()) < 60  # greater than without a journal


async def test_ended_sessions_are_not_read_and_are_deleted_in_steps(postgres: Server) -> None:
    address = postgres.database()
    async with held(address) as records:
        list(records.read())
        records.write([record(seq, "old") for seq in range(1, 1200)])
        records.write([record(1200, "new"), record(1201, "old", ENDED)])
        assert [r.subject for r in records.read()] == ["new"]
        records.trim()
    async with held(address) as records:  # after a kill during trimming
        assert [r.subject for r in records.read()] == ["new"]
        while records.has_ended:
            records.trim()
        assert execute(address, "SELECT count(*) FROM parrot_records") == [(1,)]
        assert records._size == sum(len(record(1200).payload) + 128 for _ in range(1))


async def test_a_process_without_the_lease_cannot_write(postgres: Server) -> None:
    address = postgres.database()
    async with held(address) as old:
        list(old.read())
        old.write([record(1), record(2, "ended"), record(3, "ended", ENDED)])
        execute(address, "UPDATE parrot_lease SET expires = '-infinity'")
        async with held(address) as new:
            assert [r.seq for r in new.read()] == [1]
            for change in (lambda: old.write([record(4)]), old.trim):
                with pytest.raises(Superseded):
                    change()
            await asyncio.wait_for(old._lease.lost(), 1)
            assert not old.is_owned()
            assert new.is_owned()
            new.write([record(4, "new")])
            assert new.last_seq() == 4
    assert [r.subject for r in await read(address)] == ["1", "new"]


async def test_a_running_commit_is_read_by_the_successor(postgres: Server) -> None:
    """The next holder waits for all running writes of the previous epoch."""
    address = postgres.database()
    async with taken(address) as old:
        execute(address, "UPDATE parrot_lease SET expires = '-infinity'")
        with psycopg.connect(address) as writing:
            found = writing.execute(
                "SELECT FROM parrot_lease WHERE epoch = %s FOR KEY SHARE", (old.epoch,)
            )
            assert found.rowcount == 1
            new = Lease(address)
            taking = asyncio.create_task(new.acquire())
            await asyncio.wait((taking,), timeout=0.5)
            assert not taking.done()
            writing.commit()
            await asyncio.wait_for(taking, 5)
            assert new.epoch > old.epoch
        await new.close()


async def test_a_lease_is_released_at_once_or_expires(
    postgres: Server,
) -> None:
    address = postgres.database()
    prepare(address)
    first, second = Lease(address), Lease(address)
    await first.acquire()
    taking = asyncio.create_task(second.acquire())
    await asyncio.wait((taking,), timeout=LEASE_S + 1)
    assert not taking.done()  # the lease is renewed
    start = time.monotonic()
    await first.close()
    await asyncio.wait_for(taking, LEASE_S - 0.1)
    second._is_closing.set()  # like a killed process, it does not release the lease
    second._until = 0.0
    async with taken(address):
        assert time.monotonic() - start > LEASE_S - 0.1
    await second.close()


async def test_a_defect_of_the_lease_thread_is_reported(
    postgres: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Lease, connection: object) -> bool:
        raise ArithmeticError("a defect")

    address = postgres.database()
    async with taken(address) as lease:
        monkeypatch.setattr(Lease, "_renew", broken)
        await asyncio.wait_for(lease.lost(), 20)
        assert not lease.is_held()
    monkeypatch.undo()
    monkeypatch.setattr(Lease, "_try_acquire", broken)
    with pytest.raises(ArithmeticError, match="a defect"):
        async with taken(address):
            pass
    monkeypatch.undo()
    async with taken(address):  # the thread has released its lease
        pass


async def test_damage_loses_only_later_records(postgres: Server) -> None:
    address = postgres.database()
    async with held(address) as records:
        list(records.read())
        records.write([record(seq) for seq in range(1, 30)])
    execute(address, "UPDATE parrot_records SET payload = 'no' WHERE seq = 20")
    async with held(address) as records:
        assert list(records.read()) == [record(seq) for seq in range(1, 20)]
        assert records.last_seq() == 19
        records.write([record(20)])
    assert await read(address) == [record(seq) for seq in range(1, 21)]
    ((aside,),) = execute(address, "SELECT relname FROM pg_class WHERE relname LIKE '%damaged%'")
    assert execute(address, f"SELECT min(seq), max(seq) FROM {aside}") == [(20, 29)]


async def test_a_full_journal_rejects_work_until_a_session_ends(postgres: Server) -> None:
    address = postgres.database()
    async with held(address, 2**20) as records:
        journal = Journal(records, MonotonicClock())
        journal.read(lambda record: None)
        count = 0
        while not journal.trouble:
            count += 1
            journal.append(f"{count % 2}", "call", {"text": "x" * 10_000})
            with suppress(InsufficientStorage):
                await journal.durable()
        assert 90 < count < 110
        await journal.published()  # earlier results are published
        with pytest.raises(Full):
            records.write([record(10**6, size=2**20)])
        journal.end("0")
        await recovered(journal)
        await journal.close()
    assert {r.subject for r in await read(address)} == {"1"}


async def test_rejected_writes_cause_507_and_are_retried(
    postgres: Server,
) -> None:
    address = postgres.database()
    async with held(address) as records:
        journal = Journal(records, MonotonicClock())
        journal.read(lambda record: None)
        execute(address, "ALTER TABLE parrot_records RENAME TO elsewhere")
        journal.append("1", "call", {})
        with pytest.raises(InsufficientStorage, match="its database has rejected a record"):
            await journal.durable()
        await journal.published()
        execute(address, "ALTER TABLE elsewhere RENAME TO parrot_records")
        await recovered(journal)
        await journal.durable()
        await journal.close()
    assert len(await read(address)) == 1


@pytest.mark.parametrize("how", ["killed", "hangs"])
async def test_unwritten_values_are_not_returned_after_the_lease_may_have_expired(
    how: str, postgres: Server
) -> None:
    address = postgres.database()
    async with held(address) as records:
        journal = Journal(records, MonotonicClock(), max_wait_s=1.0)
        journal.read(lambda record: None)
        journal.append("1", "call", {})
        await journal.durable()
        if how == "killed":
            await asyncio.to_thread(postgres.kill)
        else:
            postgres.signal(signal.SIGSTOP)
        try:
            await journal.published()  # all is written
            journal.append("1", "call", {})
            with pytest.raises(InsufficientStorage):
                await journal.durable()
            await until(lambda: not records.is_owned())
            assert not await is_over(records._lease)  # the server may be back soon
            for ask in (journal.durable, journal.published):
                with pytest.raises(Unavailable):
                    await ask()
        finally:
            if how == "killed":
                await asyncio.to_thread(postgres.start)
            else:
                postgres.signal(signal.SIGCONT)
        # No other process has taken the lease.
        await until(lambda: not journal.trouble and records.is_owned())
        await journal.durable()
        await journal.close()
    assert len(await read(address)) == 2


async def test_a_restart_of_the_server_between_two_writes_is_not_noticed(
    postgres: Server,
) -> None:
    address = postgres.database()
    async with held(address) as records:
        list(records.read())
        records.write([record(1)])
        await asyncio.to_thread(postgres.kill)
        await asyncio.to_thread(postgres.start)
        records.write([record(2)])
    assert await read(address) == [record(1), record(2)]


async def test_the_error_for_other_versions_contains_no_password(
    postgres: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    address = postgres.database()
    prepare(address)
    execute(address, "UPDATE parrot_facts SET value = 99 WHERE name = 'schema'")
    missing = postgres.address("no_such_database")
    refused = {
        address: "schema version 99",
        missing: "does not exist",
        missing.replace("admin", "nobody"): "authentication failed",
        f"postgresql://admin:{PASSWORD}@:x:y/z": "must be an address like",
        "postgresql://admin:secret@127.0.0.1:1/x": "refused",
    }
    for bad, reason in refused.items():
        with pytest.raises(ConfigError, match=reason) as error:
            await serve_in_turn(CoreConfig(journal=bad))
        shown = f"{error.value}{caplog.text}"
        assert PASSWORD not in shown
        assert PASSWORD.replace(" ", "%20") not in shown
    monkeypatch.setitem(sys.modules, "psycopg", None)
    for module in [name for name in sys.modules if name.startswith("parrot.journal.post")]:
        monkeypatch.delitem(sys.modules, module)
    with pytest.raises(ConfigError, match=r"pip install -e '.*\[postgres\]'"):
        await serve_in_turn(CoreConfig(journal=address))


async def test_a_lease_starts_at_the_time_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The server may have started the lease at the time of the request, and may already have given
    it to another process."""
    now = 100.0

    class SlowServer:
        rowcount = 1

        def execute(self, *_: object) -> "SlowServer":
            nonlocal now
            now += 2.0
            return self

        def fetchone(self) -> tuple[int]:
            return (7,)

    monkeypatch.setattr("parrot.journal.postgres._now", lambda: now)
    lease, server = Lease("postgresql://nowhere"), SlowServer()
    assert lease._try_acquire(server) is None  # type: ignore[arg-type]
    assert lease.is_held()
    now = 100.0 + LEASE_S
    assert not lease.is_held()
    assert lease._renew(server)  # type: ignore[arg-type]
    now = 100.0 + 2 * LEASE_S - 0.1
    assert lease.is_held()
    now = 100.0 + 2 * LEASE_S
    assert not lease.is_held()
