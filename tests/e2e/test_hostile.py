"""Faulty, hostile and impatient clients get typed errors from real servers, which then still
work."""

import asyncio
import io
from typing import Any

import aiohttp
import pytest

from parrot.cluster import Cluster
from parrot.protocol.engine_client import EngineClient
from parrot.protocol.errors import (
    AlreadySet,
    AuthenticationFailed,
    Cancelled,
    CyclicGraph,
    InvalidRequest,
    NotFound,
    ParrotError,
    PromptTooLong,
    QuotaExceeded,
    SessionGone,
    TimedOut,
    UnsupportedField,
    ValidationFailed,
)
from parrot.protocol.http import HttpClient
from parrot.protocol.public import CallParameter, SemanticCallRequest
from parrot.protocol.sampling import SamplingConfig
from parrot.protocol.serve_client import ServeClient
from tests.e2e.programs import Program, program

HANGS_S = 60  # An operation that takes longer counts as hung.

HOSTILE_BODIES = [
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b"12",
    b"\xff\xfe\x00",
    b'{"a": NaN}',
    b'{"a": Infinity}',
    b'{"a": 1e999}',
    b'{"session_id": "\\ud800"}',
    b"[" * 100_000 + b"]" * 100_000,
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"session_id": ' + b"9" * 5000 + b"}",
    b'{"session_id": -1, "session_auth": 5, "template": {}, "parameters": 3}',
    b"x" * 50_000_000,
]
CORE_POSTS = [
    "/v1/session",
    "/v1/semantic_call",
    "/v1/py_native_call",
    "/v1/semantic_var",
    "/v1/semantic_var/nope",
    "/v1/semantic_var/nope/cancel",
    "/v1/request/1/cancel",
    "/register_engine",
    "/engine_heartbeat",
    "/engine_leave",
]
ENGINE_POSTS = ["/fill", "/generate", "/generate_stream", "/follow", "/free_context"]


async def post_raw(url: str, raw: bytes, token: str | None) -> tuple[int, Any]:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.post(url, data=io.BytesIO(raw), timeout=aiohttp.ClientTimeout(30)) as response,
    ):
        return response.status, await response.json()


@pytest.mark.parametrize("raw", HOSTILE_BODIES, ids=lambda raw: raw[:20].decode("latin-1"))
async def test_hostile_bodies_are_rejected_everywhere(sim_cluster: Cluster, raw: bytes) -> None:
    engine_url = sim_cluster.url(sim_cluster.engine_names[0])
    urls = [sim_cluster.core_url + path for path in CORE_POSTS]
    urls += [engine_url + path for path in ENGINE_POSTS]
    if len(raw) > 2**20:
        urls = [urls[1], engine_url + "/generate"]
    for url in urls:
        status, answer = await post_raw(url, raw, sim_cluster.cluster_token)
        # `null` counts as an empty body. It is valid if all fields of a route are optional.
        assert 400 <= status < 500 or (raw == b"null" and status == 200), (url, status, answer)
        if status != 200:
            assert set(answer["error"]) >= {"type", "message"}


async def test_the_servers_still_serve_afterwards(client: ServeClient) -> None:
    async with program(client) as session:
        assert await session.get(await session.call("Hello {{out}}"))


async def test_every_scoped_route_rejects_a_wrong_session_auth(
    client: ServeClient, sim_cluster: Cluster
) -> None:
    async with program(client) as victim, program(client) as attacker:
        var_id = await client.create_var(victim.session_id, victim.session_auth, "secret", "42")
        scope = {"session_id": victim.session_id, "session_auth": attacker.session_auth}
        query = {key: str(value) for key, value in scope.items()}
        call = {"template": "{{a}} {{b}}", "parameters": [{"name": "b", "is_output": True}]}
        native = {"func_name": "f", "func_source": "def f(): pass", "parameters": []}
        requests: list[tuple[str, str, dict[str, Any], dict[str, str]]] = [
            ("GET", f"/v1/session/{victim.session_id}", {}, query),
            ("DELETE", f"/v1/session/{victim.session_id}", {}, query),
            ("POST", "/v1/semantic_call", scope | call, {}),
            ("POST", "/v1/py_native_call", scope | native, {}),
            ("POST", "/v1/semantic_var", scope | {"var_name": "x"}, {}),
            ("GET", "/v1/semantic_var", {}, query),
            ("POST", f"/v1/semantic_var/{var_id}", scope | {"content": "x"}, {}),
            ("GET", f"/v1/semantic_var/{var_id}", {}, query | {"criteria": "latency"}),
            ("GET", f"/v1/semantic_var/{var_id}/stream", {}, query | {"criteria": "latency"}),
            ("POST", f"/v1/semantic_var/{var_id}/cancel", scope, {}),
            ("POST", "/v1/semantic_vars/first", scope | {"var_ids": [var_id]}, {}),
            ("POST", "/v1/request/0/cancel", scope, {}),
        ]
        async with HttpClient(sim_cluster.core_url) as http:
            for method, path, *given in requests:
                body, params = map(dict, given)
                with pytest.raises(NotFound):
                    await http.request(method, path, body=body or None, params=params)
                body.pop("session_auth", None)
                params.pop("session_auth", None)
                with pytest.raises(AuthenticationFailed):
                    await http.request(method, path, body=body or None, params=params)
        with pytest.raises(NotFound):  # another session's variable
            await attacker.get(var_id)
        with pytest.raises(NotFound):
            await attacker.call("{{x}} {{out}}", variables={"x": var_id})
        assert await victim.get(var_id) == "42"


async def test_each_mistake_gets_its_documented_error(client: ServeClient) -> None:
    async with program(client) as session:
        with pytest.raises(NotFound):
            await session.get("no-such-variable")
        with pytest.raises(InvalidRequest, match="unbound"):
            await session.call("{{unbound}} {{out}}")
        value = await client.create_var(session.session_id, session.session_auth, "v", "text")
        with pytest.raises(AlreadySet):
            await client.set_var(session.session_id, session.session_auth, value, "again")
        empty = await client.create_var(session.session_id, session.session_auth, "never")
        with pytest.raises(TimedOut):
            await session.get(empty, timeout_s=0.2)
        too_long = await session.call("{{x}} {{out}}", inputs={"x": "word " * 100_000})
        with pytest.raises(PromptTooLong):
            await session.get(too_long)
        with pytest.raises(NotFound, match="nobody-serves-this"):
            await session.call("{{out}}".join(["a", "b"]), models=["nobody-serves-this"])
        with pytest.raises(ValidationFailed):
            await session.get(value, timeout_s=-1.0)


async def test_a_cycle_is_rejected_and_changes_nothing(client: ServeClient) -> None:
    async with program(client) as session:
        scope = (session.session_id, session.session_auth)
        a, b = [await client.create_var(*scope, name) for name in ("a", "b")]

        def call(source: str, target: str) -> SemanticCallRequest:
            return SemanticCallRequest(
                session_id=scope[0],
                session_auth=scope[1],
                template="Go: {{x}} {{y}}",
                parameters=[
                    CallParameter(name="x", var_id=source),
                    CallParameter(
                        name="y",
                        is_output=True,
                        var_id=target,
                        sampling_config=SamplingConfig(max_gen_length=4),
                    ),
                ],
            )

        await client.semantic_call(call(a, b))
        with pytest.raises(CyclicGraph, match=r"a.*b|b.*a"):
            await client.semantic_call(call(b, a))
        await client.set_var(*scope, a, "so a is still free")
        assert await session.get(b)


async def test_fields_that_the_engine_lacks_are_rejected_by_name(client: ServeClient) -> None:
    async with program(client) as session:
        response = await client.semantic_call(
            SemanticCallRequest(
                session_id=session.session_id,
                session_auth=session.session_auth,
                template="Go: {{out}}",
                parameters=[
                    CallParameter(
                        name="out", is_output=True, sampling_config=SamplingConfig(best_of=3)
                    )
                ],
            )
        )
        with pytest.raises(UnsupportedField, match="best_of"):
            await session.get(response.param_info[0].var_id)


async def running_jobs(cluster: Cluster) -> int:
    async with HttpClient(
        cluster.url(cluster.engine_names[0]), bearer_token=cluster.cluster_token
    ) as http:
        return (await EngineClient(http).ping()).num_total_jobs


async def assert_engine_goes_quiet(cluster: Cluster) -> None:
    """Check that the work ends long before it would end by itself."""
    async with asyncio.timeout(HANGS_S):
        while await running_jobs(cluster):
            await asyncio.sleep(0.02)


async def start_long_read(session: Program, cluster: Cluster) -> tuple[str, asyncio.Task[str]]:
    var_id = await session.call("Go on for ever: {{out}}", max_gen_length=5000)
    read = asyncio.create_task(session.get(var_id, timeout_s=None))
    async with asyncio.timeout(HANGS_S):
        while not await running_jobs(cluster):
            await asyncio.sleep(0.02)
    return var_id, read


async def test_a_reader_that_disconnects_stops_the_work(
    client: ServeClient, sim_cluster: Cluster
) -> None:
    async with program(client) as session:
        _, read = await start_long_read(session, sim_cluster)
        read.cancel()
        await assert_engine_goes_quiet(sim_cluster)


async def test_cancel_and_delete_end_reads_and_work(
    client: ServeClient, sim_cluster: Cluster
) -> None:
    async with program(client) as session:
        var_id, read = await start_long_read(session, sim_cluster)
        await session.cancel(var_id)
        with pytest.raises(Cancelled):
            await asyncio.wait_for(read, HANGS_S)
        await assert_engine_goes_quiet(sim_cluster)

    created = await client.create_session()
    doomed = Program(client, created.session_id, created.session_auth)
    _, read = await start_long_read(doomed, sim_cluster)
    await client.delete_session(doomed.session_id, doomed.session_auth)
    with pytest.raises((SessionGone, Cancelled)):
        await asyncio.wait_for(read, HANGS_S)
    await assert_engine_goes_quiet(sim_cluster)
    with pytest.raises(SessionGone):
        await client.session_info(doomed.session_id, doomed.session_auth)
    with pytest.raises(NotFound):
        await client.session_info(10**9, doomed.session_auth)


async def test_limits_of_the_config_are_enforced() -> None:
    core = {
        "max_sessions_num": 2,
        "session_life_span": 1.0,
        "global_scheduler": {"max_queue_size": 4},
        "api_keys": ["sesame"],
    }
    slow = {"engine_type": "sim", "tasks_capacity": 1, "instance": {"step_s": 0.05}}
    with Cluster(core=core, engines=[slow]) as cluster:
        async with HttpClient(cluster.core_url) as http:
            client = ServeClient(http)
            for key in (None, "wrong"):
                with pytest.raises(AuthenticationFailed):
                    await client.create_session(api_key=key)
            sessions = [await client.create_session(api_key="sesame") for _ in range(2)]
            with pytest.raises(QuotaExceeded):
                await client.create_session(api_key="sesame")
            session = Program(client, sessions[0].session_id, sessions[0].session_auth)

            parts = {f"x{i}": await session.call(f"Number {i}: {{{{out}}}}", 4) for i in range(7)}
            template = " ".join(f"{{{{{name}}}}}" for name in parts) + " {{out}}"
            joined = await session.call(template, 4, variables=parts)
            read = asyncio.create_task(session.get(joined))
            await until_one_runs(session)  # six more are queued, since a read needs all of them
            with pytest.raises(QuotaExceeded, match="max_queue_size"):
                await session.call("One too many: {{out}}", 4)
            assert await read

            await asyncio.sleep(2.0)
            with pytest.raises(SessionGone):
                await session.call("Too late {{out}}")
            await client.create_session(api_key="sesame")


async def until_one_runs(session: Program) -> None:
    while True:
        info = await session.client.session_info(session.session_id, session.session_auth)
        if any(call.state == "running" for call in info.calls):
            return
        await asyncio.sleep(0.01)


async def test_values_with_placeholders_stay_text(client: ServeClient) -> None:
    async with program(client) as session:
        tricky = await client.create_var(
            session.session_id, session.session_auth, "v", "{{out}} {{x}} {{nothing}}"
        )
        first = await session.call("{{x}} {{out}}", variables={"x": tricky})
        second = await session.call("{{x}} {{out}}", inputs={"x": "{{out}} {{x}} {{nothing}}"})
        assert await session.get(first) == await session.get(second)
        assert await session.get(tricky) == "{{out}} {{x}} {{nothing}}"


async def test_all_errors_have_a_type(client: ServeClient) -> None:
    """Errors of unknown paths and methods also have an error type of Parrot."""
    async with program(client) as session:
        http = client._http
        for method, path in (("GET", "/v1/nothing"), ("PUT", "/v1/session"), ("GET", "/x" * 500)):
            with pytest.raises(ParrotError) as caught:
                await http.request(method, path)
            assert caught.value.status in (404, 405)
        assert session.session_id >= 0
