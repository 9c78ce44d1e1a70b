"""The usage by tenant and the events on the page, with a real dispatcher."""

from parrot.gateway.page.rows import PageRows
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.errors import EngineFailed
from parrot.serve.tenants.table import id_of_key
from parrot.serve.views import count_fields, session_counts, task_fields, task_view
from tests.serve.execution.test_result_cache import World
from tests.support.fake_engine import Script

OPERATOR = Visitor(tenant=None, sees_values=True)


async def test_usage_is_reported_by_tenant_and_function() -> None:
    world = World()
    await world.join("e0")
    program = world.program()
    for question in ("one", "two"):
        read = program.read(program.call(question, func_name="ask"))
        await world.settle()
        await read
    (row,) = PageRows(world.core).usage(OPERATOR).values()
    assert (row["tenant"], row["function"], row["calls"]) == ("public", "ask", 2)
    assert row["prompt"] > 0
    assert row["generation"] > 0
    assert row["service_s"] > 0
    assert PageRows(world.core).usage(Visitor("somebody else", sees_values=True)) == {}
    await world.core.close()


async def test_events_name_engines_calls_and_sessions() -> None:
    world = World()
    page = PageRows(world.core)  # another instance may round the time of an event differently
    await world.join("e0")
    engine = world.engines["e0"]
    engine.scripts = [Script(error=EngineFailed("a kernel failed"))]
    program, other = world.program("mine"), world.program("other")
    output = program.call("one", func_name="ask")
    read = program.read(output)
    await world.settle()
    await read
    lost = world.core.fleet.engines.get(0)
    assert lost is not None
    world.core.fleet.lose(lost, "no heartbeat for 30 s")
    other.end()
    rows = page.events(OPERATOR)
    assert [row["kind"] for row in rows.values()] == [
        "engine joined",
        "call retried",
        "engine lost",
    ]
    _, retried, gone = rows.values()
    assert retried["text"] == "ask: a kernel failed"
    assert (retried["engine"], retried["session"], retried["var"]) == ("e0", 0, output)
    assert retried["has_view"]
    assert gone["text"] == "no heartbeat for 30 s"

    await world.clock.advance(100_000.0)
    rows = page.events(OPERATOR)
    expired = list(rows.values())[-1]
    assert (expired["kind"], expired["session"]) == ("session expired", 0)
    assert not expired["has_view"]
    own = page.events(Visitor(id_of_key("mine"), sees_values=True))
    assert own == {
        key: row | ({"text": ""} if row["kind"] == "engine lost" else {})
        for key, row in rows.items()
    }
    blind = page.events(Visitor(None, sees_values=False))
    assert [row["text"] for row in blind.values()][1:3] == ["ask", "no heartbeat for 30 s"]
    others = page.events(Visitor(id_of_key("other"), sees_values=True))
    assert {row["kind"] for row in others.values()} == {"engine joined", "engine lost"}
    await world.core.close()


async def test_the_last_calls_and_variables_of_a_large_session_are_shown() -> None:
    world = World()
    program = world.program()
    for n in range(1100):
        program.call(f"question {n}")
    for n in range(3500):
        program.core.create_var(*program.scope.values(), f"x{n}", None)
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    rows = PageRows(world.core).session(session, sees_values=True)
    ids = [row["request_id"] for key, row in rows.items() if key.startswith("call:")]
    assert ids == list(session.graph.calls)[-1024:]
    assert rows["session"]["calls"] == 1100
    names = [row["name"] for key, row in rows.items() if key.startswith("var:")]
    assert len(names) == 4096
    assert names[-1] == "x3499"
    await world.core.close()


async def test_the_fields_of_rows_are_those_of_the_api() -> None:
    world = World()
    await world.join("e0")
    program = world.program()
    read = program.read(program.call("one"))
    await world.settle()
    await read
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    (call,) = session.graph.calls.values()
    (task,) = call.tasks
    assert task_fields(task, 0.0) == task_view(task, 0.0).model_dump(mode="json")
    assert count_fields(session) == session_counts(session).model_dump(mode="json")
    await world.core.close()
