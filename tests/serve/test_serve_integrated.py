"""ServeCore with its real dispatcher and engines inside the process."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from parrot.protocol.engine_api import RegisterRequest
from parrot.protocol.errors import Cancelled, NoEngine, SessionGone
from parrot.protocol.public import (
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.serve.config import CoreConfig
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.utils.clock import MonotonicClock
from tests.support.fake_engine import FakeEngine, Script, fake_engine
from tests.support.requests import given, made, taken, var_ids


class Cluster:
    def __init__(self) -> None:
        config = CoreConfig(engine_heartbeat_timeout=0.3)
        clock = MonotonicClock()
        self.engine: FakeEngine = fake_engine("e0")
        dispatcher = Dispatcher(config, clock, lambda info: self.engine)
        self.core = ServeCore(config, clock=clock, dispatcher=dispatcher)
        self.scope: dict[str, Any] = self.core.create_session(SessionCreateRequest()).model_dump()

    async def join(self) -> None:
        await self.core.register_engine(RegisterRequest(engine_config=self.engine.info))

    def call(self, template: str, *parameters: dict[str, Any], **fields: Any) -> dict[str, str]:
        body = self.scope | {"template": template, "parameters": list(parameters)} | fields
        return var_ids(self.core.submit_call(SemanticCallRequest.model_validate(body)))

    def request(self, **fields: Any) -> VarGetRequest:
        return VarGetRequest.model_validate(self.scope | fields)

    async def read(self, var_id: str, **fields: Any) -> str:
        async with asyncio.timeout(5):
            return (await self.core.read(self.request(**fields), var_id)).content


@pytest.fixture
async def cluster() -> AsyncIterator[Cluster]:
    cluster = Cluster()
    yield cluster
    await asyncio.sleep(0)
    cluster.core.check_integrity()
    await cluster.core.close()


async def test_map_a_native_join_and_reduce(cluster: Cluster) -> None:
    await cluster.join()
    parts = [
        cluster.call("Part {{n}}: {{out}}", given("n", str(n)), made("out"))["out"]
        for n in range(5)
    ]
    body = cluster.scope | {
        "func_name": "join",
        "func_source": "def join(a, b, c, d, e, out):\n    out.set('|'.join([a, b, c, d, e]))",
        "parameters": [
            *(taken(name, part) for name, part in zip("abcde", parts, strict=True)),
            made("out"),
        ],
    }
    joined = var_ids(cluster.core.submit_native(NativeCallRequest.model_validate(body)))["out"]
    final = cluster.call("Sum {{all}}: {{out}}", taken("all", joined), made("out"))["out"]
    value = await cluster.read(final, criteria="latency")
    assert value == f"<{len('Sum |') - 1 + 5 * len('<8>') + 4 + len(': ')}>"
    info = cluster.core.session_info(*cluster.scope.values())
    assert {call.state for call in info.calls} == {"done"}
    assert len({call.task_group for call in info.calls[:5]}) == 1
    assert {call.criteria for call in info.calls[:5]} == {"throughput"}
    assert [call.engine for call in info.calls] == ["e0"] * 5 + [None, "e0"]
    assert len(info.edges) == 6


async def test_two_outputs_and_a_stateful_successor_share_one_context(cluster: Cluster) -> None:
    await cluster.join()
    body = cluster.scope | {
        "template": "Joke: {{joke}} Why: {{why}}",
        "parameters": [made("joke"), made("why")],
    }
    first = cluster.core.submit_call(SemanticCallRequest.model_validate(body))
    follow = cluster.call(" Again: {{more}}", made("more"), successor_of=first.request_id)["more"]
    await cluster.read(follow)
    joke = await cluster.read(var_ids(first)["joke"])
    why = await cluster.read(var_ids(first)["why"])
    assert cluster.engine.prompts[-1] == f"Joke: {joke} Why: {why} Again: "


async def test_a_new_read_after_an_abandoned_one(cluster: Cluster) -> None:
    """The work stops, its context is kept, and a new reader gets the whole text."""
    await cluster.join()
    cluster.engine.scripts = [Script(text=lambda prompt: "abcdefghi", hang_after=1)]
    cluster.engine.script = Script(text=lambda prompt: "defghi")
    out = cluster.call("Say {{out}}", made("out"))["out"]
    stream = cluster.core.stream(cluster.request(), out)
    assert await anext(stream) == "abc"
    await stream.aclose()
    await asyncio.sleep(0.01)
    assert cluster.engine.num_aborted == 1
    cluster.core.check_integrity()
    again = cluster.core.stream(cluster.request(), out)
    assert "".join([text async for text in again]) == "abcdefghi"
    first, second = cluster.engine.requests
    assert cluster.engine.prompts == ["Say ", "Say abc"]
    assert [piece.parent_context_id for piece in second.fills] == [first.context_id]


async def test_cancel_stops_the_engine_and_everything_after(cluster: Cluster) -> None:
    await cluster.join()
    cluster.engine.script = Script(hang_after=0)
    out = cluster.call("Say {{out}}", made("out"))["out"]
    after = cluster.call("Then {{x}} {{out}}", taken("x", out), made("out"))["out"]
    reading = asyncio.ensure_future(cluster.read(after))
    await asyncio.sleep(0.02)
    cluster.core.cancel_var(*cluster.scope.values(), out)
    with pytest.raises(Cancelled):
        await reading
    await asyncio.sleep(0.01)
    assert cluster.engine.num_aborted == 1


async def test_deleting_a_session_frees_its_contexts(cluster: Cluster) -> None:
    await cluster.join()
    cluster.engine.scripts = [Script(), Script(hang_after=1)]
    done = cluster.call("One {{x}}{{out}}", given("x", "1"), made("out"))["out"]
    await cluster.read(done)
    hanging = cluster.call("Two {{x}}{{out}}", given("x", "1"), made("out"))["out"]
    reading = asyncio.ensure_future(cluster.read(hanging))
    await asyncio.sleep(0.02)
    cluster.core.delete_session(*cluster.scope.values())
    with pytest.raises(SessionGone):
        await reading
    await asyncio.sleep(0.05)
    cluster.core.check_integrity()
    kept = set(cluster.engine.contexts) - set(cluster.engine.freed)
    assert len(kept) <= 2  # the tenant's constant prefixes


async def test_without_an_engine_every_dependent_read_ends_with_no_engine(
    cluster: Cluster,
) -> None:
    outs = [cluster.call("Say {{out}}", made("out"))["out"] for _ in range(3)]
    total = cluster.call(
        "{{a}}{{b}}{{c}} {{out}}",
        *(taken(name, out) for name, out in zip("abc", outs, strict=True)),
        made("out"),
    )["out"]
    with pytest.raises(NoEngine):
        await cluster.read(total)


async def test_an_engine_that_registers_in_time_serves_waiting_calls(cluster: Cluster) -> None:
    out = cluster.call("Say {{out}}", made("out"))["out"]
    reading = asyncio.ensure_future(cluster.read(out))
    await asyncio.sleep(0.05)
    await cluster.join()
    assert await reading == "<4>"
