"""ServeCore continues its sessions from the journal after it was killed."""

import asyncio
import os
import random
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_api import GenerateRequest
from parrot.protocol.engine_client import CORE_HEADER, CoreIdentity, EngineClient
from parrot.protocol.errors import InsufficientStorage, ParrotError, StaleCore, Unavailable
from parrot.protocol.http import HttpClient
from parrot.protocol.public import SessionInfo
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program

T = TypeVar("T")
SIM = {"engine_type": "sim", "heartbeat_interval": 0.3, "instance": {"step_s": 0.01}}
NUM_PARTS = 5
HANGS_S = 60


@asynccontextmanager
async def cluster_with(path: Path | None, num_engines: int = 2) -> AsyncIterator[Cluster]:
    core = {"engine_heartbeat_timeout": 3} | ({} if path is None else {"journal": str(path)})
    with Cluster(core=core, engines=[SIM] * num_engines) as cluster:
        yield cluster


async def begin(client: ServeClient) -> Program:
    created = await client.create_session()
    return Program(client, created.session_id, created.session_auth)


async def persistently(ask: Callable[..., Awaitable[T]], *args: Any, **options: Any) -> T:
    """Repeat a request until the restarted server answers."""
    while True:
        try:
            return await ask(*args, **options)
        except Unavailable:
            await asyncio.sleep(0.05)


async def map_reduce(session: Program) -> list[str]:
    """Submit calls whose outputs a last call joins. Each is repeated until it is acknowledged.
    Returns the output variables."""
    parts = []
    for i in range(NUM_PARTS):
        key = {"idempotency_key": f"part {i}"}
        ask = session.call
        parts.append(await persistently(ask, f"Part {i}: {{{{out}}}}", 30 + 10 * i, **key))
    names = [f"p{i}" for i in range(NUM_PARTS)]
    template = "Join " + " ".join(f"{{{{{name}}}}}" for name in names) + ": {{out}}"
    whole = await persistently(
        session.call,
        template,
        40,
        variables=dict(zip(names, parts, strict=True)),
        idempotency_key="whole",
    )
    return [*parts, whole]


async def begin_reads(
    client: ServeClient,
) -> tuple[list[str], Program, dict[str, "asyncio.Task[str]"]]:
    """Start to read all variables of a `map_reduce`. Returns its values without faults, its
    session, and the reads by variable."""
    undisturbed = await begin(client)
    expected = [await undisturbed.get(v) for v in await map_reduce(undisturbed)]
    session = await begin(client)
    reads = {
        var_id: asyncio.create_task(persistently(session.get, var_id, timeout_s=None))
        for var_id in await map_reduce(session)
    }
    return expected, session, reads


@pytest.mark.parametrize("seed", range(3))
async def test_programs_get_their_values_after_servecore_is_killed(
    seed: int, tmp_path: Path
) -> None:
    draw = random.Random(seed)
    async with (
        cluster_with(tmp_path / "journal") as cluster,
        HttpClient(cluster.core_url) as http,
    ):
        client = ServeClient(http)
        expected, session, reads = await begin_reads(client)
        var_ids = list(reads)
        seen: dict[str, str] = {}
        for _ in range(2):
            await asyncio.sleep(draw.uniform(0.05, 0.6))
            cluster.kill("core")
            for var_id, read in reads.items():
                if read.done():
                    seen[var_id] = read.result()
            cluster.restart("core")
        values = await asyncio.wait_for(asyncio.gather(*reads.values()), HANGS_S)
        assert values == expected
        # Values are the same as before the restart, and so are the calls.
        for var_id, text in seen.items():
            assert await session.get(var_id) == text
        assert await map_reduce(session) == var_ids
        info = await client.session_info(session.session_id, session.session_auth)
        assert [call.state for call in info.calls] == ["done"] * (NUM_PARTS + 1)


async def _info(client: ServeClient, session: Program) -> SessionInfo:
    return await client.session_info(session.session_id, session.session_auth)


async def test_a_running_call_runs_again_without_a_reader(
    tmp_path: Path,
) -> None:
    async with (
        cluster_with(tmp_path / "journal", 1) as cluster,
        HttpClient(cluster.core_url) as http,
    ):
        client = ServeClient(http)
        session = await begin(client)
        slow = await session.call("Take your time, and read all of this: {{out}}", 200)
        read = asyncio.create_task(session.get(slow))
        while (await _info(client, session)).calls[0].state != "running":
            await asyncio.sleep(0.02)
        cluster.kill("core")
        with pytest.raises(Unavailable):
            await read
        cluster.restart("core")
        async with asyncio.timeout(HANGS_S):
            while (call := (await persistently(_info, client, session)).calls[0]).state != "done":
                await asyncio.sleep(0.05)
        assert call.attempts == 2
        # The engine has freed the contexts, but their blocks are still cached.
        assert call.cached_tokens >= call.computed_tokens > 0
        assert call.recomputed_tokens == 0


async def test_a_clean_stop_keeps_sessions(tmp_path: Path) -> None:
    async with (
        cluster_with(tmp_path / "journal", 1) as cluster,
        HttpClient(cluster.core_url) as http,
    ):
        client = ServeClient(http)
        session, ended = await begin(client), await begin(client)
        text = await session.get(var_id := await session.call("Once: {{out}}"))
        await client.delete_session(ended.session_id, ended.session_auth)
        cluster.process("core").stop()
        cluster.restart("core")
        assert await persistently(session.get, var_id) == text
        with pytest.raises(ParrotError) as gone:
            await ended.get(var_id)
        assert gone.value.status == 410


async def test_with_a_full_disk_writes_fail_and_reads_work(tmp_path: Path) -> None:
    async with (
        cluster_with(tmp_path / "journal", 1) as cluster,
        HttpClient(cluster.core_url) as http,
    ):
        client = ServeClient(http)
        session = await begin(client)
        text = await session.get(var_id := await session.call("Before: {{out}}"))
        begun = await session.call("Begun before: {{out}}", 100)
        reading = asyncio.create_task(session.get(begun))
        pid = cluster.process("core").pid
        limits = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        log_size = os.stat(tmp_path / "journal-wal").st_size
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (log_size + 1000, limits[1]))
        async with asyncio.timeout(HANGS_S):
            with suppress(InsufficientStorage):
                while True:
                    await session.call("No room for this: {{out}}" + "x" * 2000)
            with pytest.raises(InsufficientStorage):
                await client.create_session()
            with pytest.raises(InsufficientStorage):  # The value is not stored.
                await reading
            assert await session.get(var_id) == text
        resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        async with asyncio.timeout(HANGS_S):
            while True:
                try:
                    after = await session.call("There is room again: {{out}}")
                    break
                except InsufficientStorage:
                    await asyncio.sleep(0.1)
            made = await session.get(begun)
        cluster.kill("core")
        cluster.restart("core")
        assert await persistently(session.get, var_id) == text
        assert await session.get(begun) == made
        assert await persistently(session.get, after)


async def test_engines_reject_an_earlier_servecore(tmp_path: Path) -> None:
    async with cluster_with(tmp_path / "journal", 1) as cluster:
        (name,) = cluster.engine_names

        def asking(identity: CoreIdentity | None) -> HttpClient:
            headers = {} if identity is None else {CORE_HEADER: identity.header}
            return HttpClient(
                cluster.url(name), bearer_token=cluster.cluster_token, headers=headers
            )

        cluster.kill("core")
        cluster.restart("core")
        await asyncio.to_thread(cluster.wait_ready)
        async with asking(None) as http:
            await EngineClient(http).ping()
        for identity in (CoreIdentity(1, "old"), CoreIdentity(2**60, "unknown")):
            async with asking(identity) as http:
                with pytest.raises(StaleCore):
                    await EngineClient(http).generate(GenerateRequest(context_id=1))


async def test_responses_and_conversations_survive_a_restart(tmp_path: Path) -> None:
    async with (
        cluster_with(tmp_path / "journal", 1) as cluster,
        HttpClient(cluster.core_url) as http,
    ):
        (model,) = [card["id"] for card in (await http.request("GET", "/v1/models"))["data"]]

        async def respond(**fields: Any) -> Any:
            body = {"model": model, "max_output_tokens": 16} | fields
            return await http.request("POST", "/v1/responses", body=body)

        first = await respond(input="Hello", prompt_cache_key="p")
        second = await respond(input="And?", previous_response_id=first["id"])
        dropped = await respond(input="Forget me")
        await http.request("DELETE", f"/v1/responses/{dropped['id']}")
        working = await respond(input="Long", background=True, max_output_tokens=100)
        cluster.kill("core")
        cluster.restart("core")
        await asyncio.to_thread(cluster.wait_ready)

        async def kept(response: Any) -> Any:
            return await http.request("GET", f"/v1/responses/{response['id']}")

        assert await kept(first) == first
        assert await kept(second) == second
        with pytest.raises(ParrotError):
            await kept(dropped)
        async with asyncio.timeout(HANGS_S):
            while (made := await kept(working))["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.05)
        assert made["usage"]["output_tokens"] == 100
        third = await respond(input="Go on", previous_response_id=second["id"])
        items = await http.request("GET", f"/v1/responses/{third['id']}/input_items")
        assert len(items["data"]) == 5
        # The conversation continues in its old session. The regenerated response has a new one.
        sessions = (await http.request("GET", "/v1/sessions"))["sessions"]
        assert sorted(one["turns"] for one in sessions) == [1, 1, 1, 3]
