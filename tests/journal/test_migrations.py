"""A journal of an older version can be used: tests/journal/files/6d5c16d6.db, schema version 1.

The code of commit 6d5c16d6 has written it: a ServeCore with an API key, and simulated engines of
the models `a` and `b`. All processes were killed while two calls of `b` were running. The JSON file
contains the answers that clients had received."""

import asyncio
import json
import shutil
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from parrot.journal.log import Record
from parrot.journal.migrations import SCHEMA, added_records
from parrot.journal.postgres import Lease, PostgresRecords, prepare
from parrot.journal.sqlite import JournalFile
from parrot.serve.config import CoreConfig
from tests.gateway.vendors.conftest import Site
from tests.journal.test_late_engines import join
from tests.journal.test_over_http import serving
from tests.support.fake_engine import fake_engine
from tests.support.postgres import Server

OLD = Path(__file__).parent / "files" / "6d5c16d6.db"
FACTS: dict[str, Any] = json.loads(OLD.with_suffix(".json").read_text())
KEY = "key-of-alice"
CONFIG = CoreConfig(
    api_keys=(KEY,), cluster_token="token-of-the-old-journal", no_engine_timeout=0.05
)
SIZE = 2**30


def models_of(path: Path) -> tuple[int, set[str]]:
    """Return the schema version, and the models of records of kind `model`."""
    with closing(sqlite3.connect(path)) as database:
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        rows = database.execute("SELECT payload FROM records WHERE kind = 'model'").fetchall()
    return schema, {json.loads(payload)["name"] for (payload,) in rows}


async def read(site: Site, var_id: str) -> tuple[int, Any]:
    path = f"/v1/semantic_var/{var_id}"
    async with site.http.get(path, params=FACTS["session"]) as answer:
        return answer.status, await answer.json()


async def test_received_answers_are_kept_and_unfinished_work_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "journal"
    shutil.copy(OLD, path)
    caplog.set_level("INFO", "parrot.journal")
    file: Any = JournalFile(str(path), SIZE)
    headers = {"Authorization": f"Bearer {KEY}"}
    async with serving(file, fake_engine("fast", model="a"), CONFIG) as site:
        assert "migrated from schema version 1 to 2" in caplog.text
        assert "journal: restored 4 sessions" in caplog.text
        for var_id, text in FACTS["values"].items():
            status, body = await read(site, var_id)
            assert (status, body["content"]) == (200, text)
        for var_id, kind in FACTS["failed"].items():
            status, body = await read(site, var_id)
            assert (status, body["error"]["type"]) == (502, kind)
        for response_id, text in FACTS["responses"].items():
            async with site.http.get(f"/v1/responses/{response_id}", headers=headers) as answer:
                assert (await answer.json())["output"][0]["content"][0]["text"] == text
        ended = FACTS["ended"]
        async with site.http.get(f"/v1/session/{ended['session_id']}", params=ended) as answer:
            assert answer.status == 410
        (open_id,) = FACTS["open"]
        status, body = await read(site, open_id)
        assert (status, body["error"]["type"]) == (503, "no_engine")
        background = f"/v1/responses/{FACTS['background']}"
        async with site.http.get(background, headers=headers) as answer:
            assert (await answer.json())["status"] == "queued"
        await join(site, fake_engine("slow", model="b"))
        async with asyncio.timeout(20):
            while (await read(site, open_id))[0] != 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            async with site.http.get(
                background, params={"stream": "true"}, headers=headers
            ) as stream:
                assert "response.completed" in await stream.text()
    assert models_of(path) == (SCHEMA, {"a", "b"})


def test_a_migration_runs_once_and_old_versions_reject_the_file(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    shutil.copy(OLD, path)
    counts: list[int] = []
    for _ in range(2):
        file = JournalFile(str(path), SIZE)
        counts.append(len(list(file.read())))
        file.close()
    assert counts[0] == counts[1]
    assert models_of(path)[0] == SCHEMA


def test_a_damaged_file_is_truncated_before_it_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    shutil.copy(OLD, path)
    with closing(sqlite3.connect(path)) as database, database:
        (seq,) = database.execute("SELECT max(seq) FROM records WHERE kind = 'prompt'").fetchone()
        database.execute("UPDATE records SET checksum = checksum + 1 WHERE seq = ?", (seq,))
    file = JournalFile(str(path), SIZE)
    kept = list(file.read())
    file.close()
    assert 0 < len(kept) < seq
    again = JournalFile(str(path), SIZE)
    assert [record for record in again.read() if record.kind != "model"] == kept
    again.close()
    assert models_of(path) == (SCHEMA, {"a", "b"})


async def test_tables_of_postgresql_are_migrated_under_the_lease(postgres: Server) -> None:
    address = postgres.database()
    prepare(address)
    with psycopg.connect(address, autocommit=True) as server:
        server.execute("UPDATE parrot_facts SET value = 1 WHERE name = 'schema'")
        with closing(sqlite3.connect(OLD)) as database:
            rows: Sequence[Any] = database.execute(
                "SELECT seq, at, subject, kind, payload, checksum FROM records"
            ).fetchall()
        for row in rows:
            server.execute("INSERT INTO parrot_records VALUES (%s,%s,%s,%s,%s,%s)", row)
    prepare(address)  # A standby of this version changes nothing.
    lease = Lease(address)
    await lease.acquire()
    records = PostgresRecords(lease, SIZE)
    found = await asyncio.to_thread(lambda: list(records.read()))
    assert len(found) == len(rows) + 2
    assert {one.fields()["name"] for one in found if one.kind == "model"} == {"a", "b"}
    records.close()
    await lease.close()
    with psycopg.connect(address, autocommit=True) as server:
        schema = server.execute("SELECT value FROM parrot_facts WHERE name = 'schema'").fetchone()
    assert schema == (SCHEMA,)


def test_the_records_of_each_kind_of_call_contain_its_models() -> None:
    """The test uses a single record, so that no other record names the model."""
    payloads: list[tuple[str, dict[str, Any]]] = [
        ("call", {"request": {"models": ["m"]}}),
        ("graph", {"request": {"calls": [{"models": ["m"]}, {}]}}),
        ("prompt", {"options": {"models": ["m"]}}),
        ("response", {"work": {"request": {"model": "m"}}}),
    ]
    for kind, fields in payloads:
        record = Record(7, 1e9, "1", kind, json.dumps(fields).encode())
        (added,) = added_records([record], last_seq=9)
        assert (added.seq, added.fields()) == (10, {"name": "m", "since": 1_000_000_000}), kind
        known = Record(8, 1e9, "models", "model", b'{"name":"m","since":1}')
        assert added_records([record, known], last_seq=9) == []
    nothing = Record(1, 1e9, "r", "response", b'{"work":null}')
    assert added_records([nothing], last_seq=1) == []
