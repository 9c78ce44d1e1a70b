"""Values and new work while the disk of the journal's PostgreSQL server is full, and writes whose
connection breaks. The tables are on a small disk, and the server's log is not."""

import asyncio
import json
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from parrot.journal.log import Kind
from parrot.journal.postgres import Full, Lease, PostgresRecords, prepare
from tests.gateway.vendors.conftest import Site
from tests.journal.test_full_disk import held_call, read, until_accepted
from tests.journal.test_journal_file import record
from tests.journal.test_over_http import hanging, journal_of, serving
from tests.journal.test_postgres import execute, held
from tests.nemesis.link import Link
from tests.server.test_serve_process import ask, running
from tests.support.postgres import Server, running_server
from tests.support.small_disk import SmallDisk, small_disk

SIZE = 32 * 2**20
"""Of the journal. An eighth of it is the reserve."""
RESERVE = SIZE // 8


@pytest.fixture(scope="module")
def disk(postgres: Server) -> Iterator[SmallDisk]:
    with small_disk(96 * 2**20, owner=postgres.owner) as disk:
        tables = disk.folder / "tables"
        tables.mkdir(mode=0o700)
        postgres.give(tables)
        execute(postgres.address("postgres"), f"CREATE TABLESPACE small LOCATION '{tables}'")
        yield disk


@pytest.fixture
def address(postgres: Server, disk: SmallDisk) -> Iterator[str]:
    """Create a database on the small disk."""
    address = postgres.database("small")
    yield address
    disk.clear()
    execute(postgres.address("postgres"), f"DROP DATABASE {address.rpartition('/')[2]}")
    execute(postgres.address("postgres"), "CHECKPOINT")  # removes the files


@asynccontextmanager
async def on_postgres(address: str, engine: Any = None) -> AsyncIterator[Site]:
    async with held(address, SIZE) as records, serving(records, engine) as site:  # type: ignore[arg-type]
        yield site


async def free_bytes(disk: SmallDisk) -> int:
    """Return the maximum of the free bytes within 1 s, because each attempt to fill the reserve
    uses all space for a moment."""
    found = []
    for _ in range(20):
        found.append(disk.free_bytes())
        await asyncio.sleep(0.05)
    return max(found)


async def state(site: Site) -> str:
    async with site.http.get("/ready") as ready:
        found: str = (await ready.json())["journal"]
        return found


async def until_refused(site: Site, scope: dict[str, Any]) -> list[tuple[str, str]]:
    """Create variables until one is rejected. Returns the ids and contents of the accepted ones."""
    accepted = []
    for _ in range(10_000):
        content = secrets.token_hex(2000)  # random, so it cannot be compressed
        body = scope | {"var_name": "x", "content": content}
        async with site.http.post("/v1/semantic_var", json=body) as answer:
            found = await answer.json()
            if answer.status == 507:
                assert answer.headers["Retry-After"] == "1"
                assert "pg_tblspc" not in found["error"]["message"]  # A file of the server.
                return accepted
            accepted.append((found["var_id"], content))
    raise AssertionError("the disk is not full")


async def until_full(site: Site, scope: dict[str, Any], disk: SmallDisk) -> None:
    """Append records of accepted work that need more than the reserve."""
    disk.fill()
    while await state(site) != "full":
        filler = {"text": secrets.token_hex(100_000)}  # too large for the free space in used pages
        journal_of(site).append(str(scope["session_id"]), Kind.READ, filler)
        await asyncio.sleep(0.01)


async def test_finished_work_is_written_to_the_reserve_and_new_work_is_rejected(
    address: str, disk: SmallDisk
) -> None:
    async with on_postgres(address, hanging()) as site, held_call(site) as (scope, path):
        assert await state(site) == "ok"
        disk.fill()
        accepted = await until_refused(site, scope)
        assert await state(site) == "reserve"
        assert RESERVE / 2 < await free_bytes(disk) < 2 * RESERVE
        site.engine.resume.set()
        status, _, value = await read(site, path, scope)
        assert status == 200
        disk.free(RESERVE // 2)  # the next records would need the reserve again
        await asyncio.sleep(2)
        assert (await site.send("/v1/session", {}))[0] == 507
        disk.clear()
        async with asyncio.timeout(5):
            await until_accepted(site)
        assert await state(site) == "ok"
        assert (await site.send("/v1/session", {}))[0] == 200
    async with on_postgres(address) as site:
        assert (await read(site, path, scope))[2] == value
        assert not site.engine.requests
        for var_id, content in accepted:
            status, _, kept = await read(site, f"/v1/semantic_var/{var_id}", scope)
            assert (status, kept["content"]) == (200, content)


async def test_a_value_that_is_not_stored_stays_in_memory(address: str, disk: SmallDisk) -> None:
    """The disk and the reserve are full."""
    async with on_postgres(address, hanging()) as site, held_call(site) as (scope, path):
        disk.fill()
        await until_refused(site, scope)
        await until_full(site, scope, disk)
        site.engine.resume.set()
        for _ in range(2):
            status, retry_after, _ = await read(site, path, scope)
            assert (status, retry_after) == (507, "1")
        disk.clear()
        await until_accepted(site)
        status, _, value = await read(site, path, scope)
        assert status == 200
        assert len(site.engine.requests) == 1  # The repeated reads cost no tokens.
    async with on_postgres(address) as site:
        assert (await read(site, path, scope))[2] == value
        assert not site.engine.requests


async def test_ended_sessions_free_space(address: str, disk: SmallDisk) -> None:
    """Their space is reused at once. The server itself would free it after about 60 s."""
    async with on_postgres(address) as site:
        scopes = []
        for _ in range(2):
            made = await site.post("/v1/session", {})
            scopes.append({name: made[name] for name in ("session_id", "session_auth")})
        large = {"var_name": "x", "content": secrets.token_hex(200_000)}
        for _ in range(20):
            await site.post("/v1/semantic_var", scopes[0] | large)
        execute(address, "ALTER TABLE parrot_records SET (autovacuum_enabled = off)")
        disk.fill(2**20)
        await until_refused(site, scopes[1])
        before = await free_bytes(disk)
        headers = {"Authorization": f"Bearer {scopes[0]['session_auth']}"}
        path = f"/v1/session/{scopes[0]['session_id']}"
        async with site.http.delete(path, headers=headers) as gone:
            assert gone.status == 200
        await asyncio.sleep(2)  # ServeCore tries to fill the reserve meanwhile
        for _ in range(5):
            journal_of(site).append(str(scopes[1]["session_id"]), Kind.READ, large)
            await journal_of(site).durable()
        assert await free_bytes(disk) > before - 2**20  # 2 MB were written.


async def test_a_user_that_may_not_create_tables_has_no_reserve(
    postgres: Server, caplog: pytest.LogCaptureFixture
) -> None:
    address = postgres.database()
    prepare(address)
    execute(address, "CREATE ROLE writer LOGIN PASSWORD 'w'")
    execute(address, "GRANT ALL ON ALL TABLES IN SCHEMA public TO writer")
    place = address.rpartition("@")[2]
    async with held(f"postgresql://writer:w@{place}", SIZE) as records:
        assert list(records.read()) == []
        assert not records.is_short
        assert "the journal has no reserve on its disk" in caplog.text
        records.write([record(1)])
        assert not records.use_reserve(psycopg.errors.DiskFull())
        assert records.refill()
        assert records.use_reserve(Full())  # That part of `journal_size` is not on the disk.


def test_a_process_that_loses_records_logs_them_and_fails(
    address: str, disk: SmallDisk, tmp_path: Path
) -> None:
    config = tmp_path / "core.json"
    config.write_text(json.dumps({"journal": address, "journal_size": 2**22}))
    with running("--config_path", str(config)) as (process, url):
        session = until_serving(url)
        scope = {name: session[name] for name in ("session_id", "session_auth")}
        disk.fill()
        body = scope | {"var_name": "x", "content": secrets.token_hex(2**18)}  # exceeds the reserve
        status, answer = ask(f"{url}/v1/semantic_var", body)
        assert (status, answer["error"]["type"]) == (507, "insufficient_storage")
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "records are lost, because it cannot be written" in log
    assert f"{session['session_id']}: 1" in log
    assert "Traceback" not in log


def until_serving(url: str) -> Any:
    """Wait until the process at this address holds the lease, and create a session."""
    for _ in range(200):
        status, session = ask(f"{url}/v1/session", {})
        if status == 200:
            return session
        time.sleep(0.05)
    raise AssertionError(session)


def test_nothing_acknowledged_is_lost_if_the_log_of_the_server_has_no_space(
    postgres: Server, tmp_path: Path
) -> None:
    """In that case, the server ends and does not start before it has space."""
    with (
        small_disk(12 * 2**20, owner=postgres.owner) as disk,
        running_server(disk.folder / "log") as server,
    ):
        config = tmp_path / "core.json"
        config.write_text(json.dumps({"journal": server.database(), "journal_size": 2**30}))
        with running("--config_path", str(config)) as (_, url):
            session = until_serving(url)
            scope = {name: session[name] for name in ("session_id", "session_auth")}
            known, status = {}, 200
            while status == 200:
                body = scope | {"var_name": "x", "content": secrets.token_hex(50_000)}
                status, answer = ask(f"{url}/v1/semantic_var", body)
                if status == 200:
                    known[answer["var_id"]] = body["content"]
            assert status in (503, 507), answer
            assert len(known) > 10
            while not server.has_ended():
                assert ask(f"{url}/v1/session", {})[0] in (503, 507)
                time.sleep(0.1)
            server.await_end()
            disk.grow(2**28)
            server.start()
            until_serving(url)
            query = f"session_id={scope['session_id']}&session_auth={scope['session_auth']}"
            for var_id, content in known.items():
                status, kept = ask(f"{url}/v1/semantic_var/{var_id}?{query}")
                assert (status, kept["content"]) == (200, content)


async def test_a_write_whose_connection_breaks_is_stored_once(postgres: Server) -> None:
    """The server completes the statement, but the client does not know it."""
    address = postgres.database()
    prepare(address)
    async with Link(postgres.port) as link:
        lease = Lease(address.replace(f":{postgres.port}/", f":{link.port}/"))
        await lease.acquire()
        records = PostgresRecords(lease, SIZE)
        written = [record(seq) for seq in range(1, 4)]
        with psycopg.connect(address) as blocking:
            await asyncio.to_thread(lambda: list(records.read()))
            blocking.execute("LOCK TABLE parrot_records IN EXCLUSIVE MODE")
            writing = asyncio.create_task(asyncio.to_thread(records.write, written))
            async with asyncio.timeout(20):
                while not waiting_writes(address):  # noqa: ASYNC110 - the server has no event
                    await asyncio.sleep(0.01)
                link.reset()
                while waiting_writes(address) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            assert not writing.done()
        await writing
        records.close()
        await lease.close()
    async with held(address, SIZE) as again:
        assert list(again.read()) == written


def waiting_writes(address: str) -> int:
    query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    ((count,),) = execute(address, f"{query} AND datname = current_database()")
    assert type(count) is int
    return count
