"""Finished runs in the journal: a restart keeps them, within the new limits."""

import asyncio
import json
from typing import Any

import pytest

from parrot.journal.log import ENDED
from parrot.serve.config import CoreConfig, HistoryConfig
from tests.gateway.vendors.conftest import Site
from tests.journal.replayed import MemoryFile
from tests.journal.test_over_http import CALL, journal_of, program, serving


async def finished_run(site: Site, **fields: Any) -> tuple[int, str, str]:
    """Run and end a session with one call. Returns its id, the output of the call, and its
    value."""
    async with program(site) as scope:
        call = await site.post("/v1/semantic_call", scope | CALL | fields)
        output = call["param_info"][-1]["var_id"]
        async with site.http.get(f"/v1/semantic_var/{output}", params=scope) as answer:
            value = (await answer.json())["content"]
        path = f"/v1/session/{scope['session_id']}"
        async with site.http.delete(path, params=scope) as answer:
            assert answer.status == 200
    await journal_of(site).durable()
    return scope["session_id"], output, value


async def rows_of(site: Site, view: str) -> dict[str, Any]:
    """Return the rows of a view of the page, or no rows if there is no such view."""
    async with site.http.get(f"/ui/api/{view}") as answer:
        if answer.status == 404:
            return {}
        assert answer.status == 200, await answer.text()
        async with asyncio.timeout(20):
            async for line in answer.content:
                if line.startswith(b"data: "):
                    rows: dict[str, Any] = json.loads(line.removeprefix(b"data: "))["rows"]
                    return rows
    raise AssertionError("the view has no rows")


def open_runs(file: MemoryFile) -> set[str]:
    """Return the runs in the journal that are not deleted."""
    ended = {record.subject for record in file.records if record.kind == ENDED}
    return {record.subject for record in file.records if record.kind == "run"} - ended


async def test_a_restart_keeps_a_run_until_it_is_deleted() -> None:
    file, config = MemoryFile(), CoreConfig(insecure=True)
    async with serving(file, config=config) as site:
        run, output, value = await finished_run(site)
        before = await rows_of(site, f"sessions/{run}"), await rows_of(site, "overview")
    async with serving(MemoryFile(file.records), config=config) as site:
        assert (await rows_of(site, f"sessions/{run}")) == before[0]
        overview = await rows_of(site, "overview")
        assert overview[f"session:{run}"] == before[1][f"session:{run}"]
        shown = await rows_of(site, f"sessions/{run}/vars/{output}")
        assert shown["text:0"]["text"] == value
        async with site.http.post(f"/ui/api/runs/{run}/delete", json={}) as answer:
            assert answer.status == 200
    file = MemoryFile(file.records)
    async with serving(file, config=config) as site:
        await site.http.post(f"/ui/api/runs/{run}/delete", json={})
        assert open_runs(file) == set()
    async with serving(MemoryFile(file.records), config=config) as site:
        assert await rows_of(site, f"sessions/{run}") == {}


async def test_a_restart_keeps_a_run_that_was_not_read() -> None:
    file, config = MemoryFile(), CoreConfig(insecure=True)
    async with serving(file, config=config) as site:
        run, _, _ = await finished_run(site)
    async with serving(MemoryFile(file.records), config=config) as site:
        assert f"session:{run}" in await rows_of(site, "overview")


@pytest.mark.parametrize(
    ("config", "kept"),
    [
        (CoreConfig(insecure=True, history=HistoryConfig(max_runs=2)), 2),
        (CoreConfig(insecure=True, history=HistoryConfig(max_runs=0)), 0),
        (CoreConfig(insecure=True, page=False), 0),
        (CoreConfig(api_keys=("k1",), cluster_token="t"), 0),  # The tenant has no key now.
    ],
    ids=["two", "none", "no page", "keys"],
)
async def test_new_limits_apply_to_old_runs(config: CoreConfig, kept: int) -> None:
    file = MemoryFile()
    async with serving(file, config=CoreConfig(insecure=True)) as site:
        runs = [(await finished_run(site))[0] for _ in range(3)]
    assert len(open_runs(file)) == 3
    file = MemoryFile(file.records)
    async with serving(file, config=config) as site:
        await journal_of(site).durable()
    assert open_runs(file) == {f"run {run}" for run in runs[3 - kept :]}


async def test_open_sessions_at_a_shutdown_are_not_runs() -> None:
    file = MemoryFile()
    async with serving(file) as site, program(site) as scope:
        await site.post("/v1/semantic_call", scope | CALL)
    assert open_runs(file) == set()
