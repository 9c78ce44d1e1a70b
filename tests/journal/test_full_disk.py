"""Values, responses and new work while the disk or the journal is full, over HTTP."""

import asyncio
import os
import resource
import signal
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from parrot.journal.reserve import MAX_BYTES
from parrot.journal.sqlite import JournalFile
from tests.gateway.page.test_page_http import watching
from tests.gateway.vendors.conftest import Site
from tests.journal.replayed import MemoryFile
from tests.journal.test_over_http import (
    CALL,
    RESPONSES,
    HeldFile,
    begun_in_the_background,
    full,
    hanging,
    journal_of,
    program,
    serving,
)
from tests.server.test_serve_process import ask, running
from tests.support.fake_engine import fake_engine

SIZE = 2 * 2**20
"""Of a small journal. An eighth of it is the reserve."""


async def read(site: Site, path: str, scope: dict[str, Any]) -> tuple[int, str | None, Any]:
    """Return the status, the header `Retry-After` and the body."""
    async with site.http.get(path, params=scope) as answer:
        return answer.status, answer.headers.get("Retry-After"), await answer.json()


async def until_accepted(site: Site) -> None:
    async with asyncio.timeout(20):
        await journal_of(site).writable()


@asynccontextmanager
async def held_call(site: Site) -> AsyncIterator[tuple[dict[str, Any], str]]:
    """Start a call that the engine does not finish. Returns its program and the path of its
    value."""
    async with program(site) as scope:
        call = await site.post("/v1/semantic_call", scope | CALL | {"output_criteria": "latency"})
        while not site.engine.requests:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0.001)
        await journal_of(site).durable()
        yield scope, f"/v1/semantic_var/{call['param_info'][-1]['var_id']}"


async def test_a_new_value_is_returned_only_after_it_was_stored() -> None:
    file = HeldFile()
    async with serving(file, hanging()) as site, held_call(site) as (scope, path):
        await full(site, file)
        site.engine.resume.set()
        for _ in range(2):
            status, retry_after, body = await read(site, path, scope)
            assert (status, retry_after) == (507, "1")
            assert body["error"]["type"] == "insufficient_storage"
        async with site.http.get(f"{path}/stream", params=scope) as stream:
            events = await stream.text()
        assert "event: done" not in events
        assert "insufficient_storage" in events
        async with site.http.get("/ready") as ready:
            assert (await ready.json())["journal"] == "full"
        before = file.records.copy()  # the journal if ServeCore is killed now
        file.full = False
        await until_accepted(site)
        status, _, value = await read(site, path, scope)
        assert status == 200
        assert len(site.engine.requests) == 1  # The repeated reads cost no tokens.
        async with site.http.get("/ready") as ready:
            assert (await ready.json())["journal"] == "ok"
    async with serving(MemoryFile(file.records)) as site:
        assert (await read(site, path, scope))[2] == value
        assert not site.engine.requests
    async with serving(MemoryFile(before)) as site:  # no client has the value: run again
        assert (await read(site, path, scope))[0] == 200
        assert len(site.engine.requests) == 1


async def test_the_page_shows_a_new_value_only_after_it_was_stored() -> None:
    file = HeldFile()
    async with serving(file, hanging()) as site, held_call(site) as (scope, path):
        run, var_id = f"sessions/{scope['session_id']}", path.rpartition("/")[2]
        async with watching(site, run) as calls, watching(site, f"{run}/vars/{var_id}") as value:
            await calls.until(f"var:{var_id}", state="empty")
            await value.until("var", state="empty")
            await full(site, file)
            site.engine.resume.set()
            shown = [
                asyncio.create_task(calls.until(f"var:{var_id}", state="ready")),
                asyncio.create_task(value.until("var", state="ready")),
            ]
            assert (await read(site, path, scope))[0] == 507
            assert not (await asyncio.wait(shown, timeout=0.5))[0]
            file.full = False
            await asyncio.gather(*shown)
            assert (await read(site, path, scope))[0] == 200


async def test_stored_values_are_read_while_the_disk_is_full() -> None:
    """This includes a session that has another value that is not stored."""
    file = HeldFile()
    async with serving(file, hanging()) as site, held_call(site) as (scope, path):
        given = {"var_name": "x", "content": "text"}
        var_id = (await site.post("/v1/semantic_var", scope | given))["var_id"]
        await full(site, file)
        site.engine.resume.set()
        assert (await read(site, path, scope))[0] == 507
        status, _, value = await read(site, f"/v1/semantic_var/{var_id}", scope)
        assert (status, value["content"]) == (200, "text")
        file.full = False


async def test_a_background_response_has_ended_when_its_end_was_stored() -> None:
    file = HeldFile()
    async with serving(file, hanging()) as site:
        began = await begun_in_the_background(site)
        path = f"{RESPONSES}/{began['id']}"
        await journal_of(site).durable()
        await full(site, file)
        site.engine.resume.set()
        async with asyncio.timeout(20):
            while (await read(site, path, {}))[0] == 200:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        status, retry_after, _ = await read(site, path, {})
        assert (status, retry_after) == (507, "1")
        async with site.http.get(path, params={"stream": "true"}) as stream:
            assert "response.completed" not in await stream.text()
        records = file.records.copy()
        file.full = False
        await until_accepted(site)
        assert (await read(site, path, {}))[2]["status"] == "completed"
    async with serving(MemoryFile(records), fake_engine("e1", model="another")) as site:
        assert (await read(site, path, {}))[2]["status"] in ("queued", "in_progress")


async def test_finished_work_is_written_to_the_reserve_and_new_work_is_rejected(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    assert JournalFile(str(path), SIZE).close() is None
    file: Any = JournalFile(str(path), SIZE)
    async with serving(file, hanging()) as site, held_call(site) as (scope, value_path):
        other = await site.post("/v1/session", {})
        filler = {"var_name": "x", "content": "y" * 50_000} | {
            name: other[name] for name in ("session_id", "session_auth")
        }
        count = 0
        while (await site.send("/v1/semantic_var", filler))[0] == 200:
            count += 1
        assert 20 < count < 60
        async with site.http.get("/ready") as ready:
            assert (await ready.json())["journal"] == "reserve"
        assert os.stat(f"{path}.reserve").st_size == 0
        site.engine.resume.set()
        status, _, value = await read(site, value_path, scope)
        assert status == 200
        assert (await site.send("/v1/session", {}))[0] == 507
        headers = {"Authorization": f"Bearer {other['session_auth']}"}
        async with site.http.delete(f"/v1/session/{other['session_id']}", headers=headers) as gone:
            assert gone.status == 200
        await until_accepted(site)
        assert (await site.send("/v1/session", {}))[0] == 200
        assert os.stat(f"{path}.reserve").st_size == SIZE // 8
    again: Any = JournalFile(str(path), SIZE)
    async with serving(again) as site:
        assert (await read(site, value_path, scope))[2] == value
        assert not site.engine.requests


def test_the_reserve_is_allocated_and_belongs_to_the_owner(tmp_path: Path) -> None:
    JournalFile(str(tmp_path / "j"), 2**30).close()
    found = os.stat(tmp_path / "j.reserve")
    assert found.st_size == MAX_BYTES
    assert found.st_blocks * 512 >= MAX_BYTES
    assert stat.S_IMODE(found.st_mode) == 0o600


def test_a_process_that_loses_records_logs_them_and_fails(tmp_path: Path) -> None:
    config = tmp_path / "core.json"
    config.write_text('{"journal": "%s"}' % (tmp_path / "journal"))
    with running("--config_path", str(config)) as (process, url):
        _, session = ask(f"{url}/v1/session", {})
        scope = {name: session[name] for name in ("session_id", "session_auth")}
        created = ask(f"{url}/v1/semantic_var", scope | {"var_name": "x"})[1]
        limit = (tmp_path / "journal-wal").stat().st_size
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        status, _ = ask(
            f"{url}/v1/semantic_var/{created['var_id']}", scope | {"content": "y" * 100_000}
        )
        assert status == 507
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 1
    assert "records are lost, because it cannot be written" in log
    assert f"{session['session_id']}: 1" in log
    assert "Traceback" not in log
