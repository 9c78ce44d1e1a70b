"""The rows of the list of runs, with a real dispatcher and over HTTP."""

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from parrot.gateway.page.rows import PageRows
from parrot.gateway.page.visitors import Visitor
from parrot.gateway.vendors.endpoint import client_name
from parrot.protocol.errors import EngineFailed
from parrot.serve.config import CoreConfig, TokenPrices
from parrot.serve.core import ServeCore
from parrot.serve.execution.dispatcher import Dispatcher
from parrot.serve.tenants.table import TenantTable, id_of_key
from tests.gateway.page.test_history import Kept
from tests.gateway.vendors.conftest import MODEL, serve
from tests.serve.execution.test_result_cache import World
from tests.support.fake_engine import Script, fake_engine

OPERATOR = Visitor(tenant=None, sees_values=True)
BLIND = Visitor(tenant=None, sees_values=False)


def runs(core: ServeCore, visitor: Visitor = OPERATOR) -> list[dict[str, Any]]:
    rows = PageRows(core).overview(visitor)
    return [dict(row) for key, row in rows.items() if key.startswith("session:")]


async def configured(config: CoreConfig) -> World:
    """A world whose core has this configuration."""
    world = World()
    await world.core.close()
    dispatcher = Dispatcher(config, world.clock, lambda info: world.engines[info.engine_name])
    world.core = ServeCore(config, clock=world.clock, dispatcher=dispatcher)
    return world


async def test_a_run_shows_its_last_request_and_the_cause_of_its_failure() -> None:
    world = World()
    engine = await world.join()
    program = world.program()
    first = program.call("what is\n  a parrot? " + "x" * 100, func_name="ask")
    read = program.read(first)
    await world.settle()
    await read
    (row,) = runs(world.core)
    assert row["words"] == "Ask what is a parrot? " + "x" * 57 + "…"
    assert "busy_s" not in row
    assert (row["kind"], row["func_name"], row["tenant"]) == ("program", "ask", "public")
    assert "error" not in row

    engine.scripts = [Script(error=EngineFailed("a kernel failed")) for _ in range(8)]
    second = program.call("two", program.call("one", func_name="draft"), func_name="join")
    read = program.read(second)
    await world.clock.advance(100.0)
    await asyncio.wait([read], timeout=5)
    assert read.exception() is not None
    (row,) = runs(world.core)
    assert (row["failed"], row["func_name"]) == (2, "join")
    assert "a kernel failed" in row["error"]
    (blind,) = runs(world.core, BLIND)
    assert row.keys() - blind.keys() == {"words", "error"}
    assert blind["func_name"] == "join"
    await world.core.close()


async def test_a_stopped_call_does_not_fail_its_run() -> None:
    world = World()
    program = world.program()
    output = program.call("one")
    read = program.read(output)
    await world.settle()
    program.core.cancel_var(*program.scope.values(), output)
    await asyncio.wait([read], timeout=5)
    (row,) = runs(world.core)
    assert (row["cancelled"], row["failed"]) == (1, 0)
    assert "error" not in row
    await world.core.close()


async def test_a_program_that_continues_a_conversation_is_an_agent() -> None:
    world = Kept()
    await world.join()
    program = world.program()
    first = program.call("one")
    (request_id,) = {call.request_id for call in program.infos()}
    last = program.call("two", successor_of=request_id)
    reads = [program.read(first), program.read(last)]
    await world.settle()
    await asyncio.gather(*reads)
    (row,) = runs(world.core)
    assert row["kind"] == "agent"
    program.end()
    assert world.run(program).row["kind"] == "agent"
    await world.history.close()
    await world.core.close()


async def test_the_cost_of_a_run_is_that_of_its_calls() -> None:
    prices = TokenPrices(input=2e6, cached=0.0, output=0.0)
    world = await configured(CoreConfig(prices={"*": prices}))
    await world.join()
    program = world.program()
    reads = [program.read(program.call(question)) for question in ("one", "two")]
    await world.settle()
    await asyncio.gather(*reads)
    (row,) = runs(world.core)
    computed = sum(call.computed_tokens for call in program.infos())
    assert row["cost"] == pytest.approx(2 * computed)
    await world.core.close()


async def test_the_shape_of_a_run_has_at_most_24_bars_in_4_lanes() -> None:
    world = Kept()
    engine = await world.join()
    program = world.program()
    assert runs(world.core)[0]["shape"] == []
    first = program.call("first")
    read = program.read(first)
    await world.settle()
    await read
    engine.script = Script(hang_after=0)
    await world.clock.advance(9.0)
    reads = [program.read(program.call(f"number {n}")) for n in range(60)]
    await world.settle()
    (row,) = runs(world.core)
    shape = row["shape"]
    assert 2 <= len(shape) <= 24
    assert shape[0][:2] == [0, 0]
    assert {lane for lane, *_ in shape} == {0, 1, 2, 3}
    assert all(0 <= start <= end <= 100 for _, start, end, _ in shape)
    assert [bar[2:] for bar in shape[1:]] == [[100, "running"]] * (len(shape) - 1)
    engine.resume.set()
    await world.settle()
    await asyncio.gather(*reads)
    program.end()
    await world.settle()
    assert {state for *_, state in world.run(program).row["shape"]} == {"done"}
    await world.history.close()
    await world.core.close()


@pytest.mark.parametrize(
    ("user_agent", "name"),
    [
        ("AsyncOpenAI/Python 1.99.1", "openai"),
        ("OpenAI/JS 5.1.0", "openai"),
        ("claude-cli/1.0.60 (external, cli)", "claude-code"),
        ("codex_cli_rs/0.1 (Debian)", "codex"),
        ("curl/8.5.0", "curl"),
        ("", ""),
        ("<b>/1", ""),
        ("x" * 5000, "x" * 64),
    ],
)
def test_a_client_is_named_by_its_user_agent(user_agent: str, name: str) -> None:
    assert client_name(user_agent) == name


async def test_requests_of_a_client_have_its_name_and_their_last_message() -> None:
    async with serve(CoreConfig(), fake_engine("e0", model=MODEL)) as site:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "Name three\nbirds."}]}
        agent = {"User-Agent": "OpenAI/Python 1.99.1"}
        await site.post("/v1/chat/completions", chat, headers=agent)
        await site.post("/v1/chat/completions", chat | {"prompt_cache_key": "mine"})
        plain = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4}
        await site.post("/v1/completions", plain, headers={"User-Agent": "curl/8.5.0"})
        claude = {"User-Agent": "claude-cli/1.0.60"}
        await site.post("/v1/messages", chat | {"max_tokens": 4}, headers=claude)
        codex = {"User-Agent": "codex_exec/0.1"}
        await site.post("/v1/responses", {"model": MODEL, "input": "Hello"}, headers=codex)
        rows = {row["app"]: row for row in runs(site.core)}
        assert {app: row["functions"] for app, row in rows.items()} == {
            "openai": ["chat"],
            "mine": ["chat"],
            "curl": ["completion"],
            "claude-code": ["messages"],
            "codex": ["responses"],
        }
        assert all(row["busy_s"] >= 0.0 for row in rows.values())
        assert {row["kind"] for row in rows.values()} == {"API"}
        assert rows["openai"]["words"] == rows["mine"]["words"] == "Name three birds."
        assert rows["curl"]["words"] == "Once upon a time"
        assert rows["openai"]["apps"] == []


def test_a_tenant_without_a_name_has_no_digest_of_its_key() -> None:
    opened = TenantTable(CoreConfig())
    assert opened.name_of("public") == "public"
    assert opened.name_of(id_of_key("sk-1")) == "key “any”"
    assert opened.name_of("other") == "key “any”"
    closed = TenantTable(CoreConfig(api_keys=("k1", "k2")))
    assert closed.name_of(closed.of_key("k2").id) == "key 2"
    assert closed.name_of("alice") == "alice"


async def test_the_usage_of_a_tenant_has_the_name_that_its_runs_have() -> None:
    world = World()
    await world.join()
    program = world.program("sk-1")
    read = program.read(program.call("one"))
    await world.settle()
    await read
    page = PageRows(world.core)
    (usage,) = page.usage(OPERATOR).values()
    (row,) = runs(world.core)
    assert usage["tenant"] == row["tenant"] == "key “any”"
    await world.core.close()


async def test_a_tenant_sees_no_address_and_no_load_of_engines() -> None:
    world = World()
    await world.join()
    other, mine = world.program("other"), world.program("mine")
    page = PageRows(world.core)
    own = Visitor(id_of_key("mine"), sees_values=True)
    engine = world.engines["e0"]
    engine.script = Script(hang_after=0)
    reads = [other.read(other.call("one"))]
    await world.settle()
    (row,) = [row for key, row in page.overview(own).items() if key.startswith("engine:")]
    assert row.keys() == {
        "engine_id",
        "engine_name",
        "engine_type",
        "model",
        "default_sampling",
        "is_draining",
    }
    lost = world.core.fleet.engines[0]
    world.core.fleet.lose(lost, "no heartbeat")
    await world.settle()
    assert page.overview(OPERATOR)["service"]["queued"] == 1
    assert page.overview(own)["service"]["queued"] == 0
    reads.append(mine.read(mine.call("two")))
    await world.settle()
    assert page.overview(own)["service"]["queued"] == 1
    await world.join()
    engine.resume.set()
    await world.settle()
    await asyncio.gather(*reads)
    decisions = [r for key, r in page.placement(own).items() if key.startswith("decision:")]
    assert len(decisions) == 1
    assert "compared" not in decisions[0]
    assert all(
        "compared" in row
        for key, row in page.placement(OPERATOR).items()
        if key.startswith("decision:")
    )
    await world.core.close()


async def test_the_use_of_a_tenants_limits_is_that_of_its_most_used_one(tmp_path: Path) -> None:
    limits = {"variables": 100, "tokens_per_minute": 1000, "calls_in_flight": 4}
    path = tmp_path / "keys.json"
    keys = [
        {"id": name, "sha256": sha256(name.encode()).hexdigest(), "limits": own}
        for name, own in (("alice", limits), ("bob", {}))
    ]
    path.write_text(json.dumps({"keys": keys}))
    world = await configured(CoreConfig(keys_file=str(path)))
    engine = await world.join(script=Script(hang_after=0))
    program = world.program("alice")
    page = PageRows(world.core)
    assert page.usage(OPERATOR) == {"limit:alice": {"tenant": "alice", "limit_share": 0.0}}
    for number in range(10):
        program.core.create_var(*program.scope.values(), f"x{number}", "text")
    assert page.usage(OPERATOR)["limit:alice"]["limit_share"] == 0.1
    read = program.read(program.call("one"))
    await world.settle()
    assert page.usage(OPERATOR)["limit:alice"]["limit_share"] == 0.25
    assert page.usage(Visitor("bob", sees_values=True)) == {}
    assert page.usage(Visitor("alice", sees_values=True)).keys() == {"limit:alice"}
    engine.resume.set()
    await world.settle()
    await read
    await world.core.close()
