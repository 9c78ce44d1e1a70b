"""The rows of calls and variables, and their times, with a real dispatcher."""

import asyncio
from typing import Any

import pytest

from parrot.gateway.page.rows import PageRows
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.errors import EngineFailed
from tests.gateway.page.test_history import Kept
from tests.serve.execution.test_result_cache import Program, World
from tests.support.fake_engine import Script

Rows = dict[str, dict[str, Any]]
OPERATOR = Visitor(tenant=None, sees_values=True)


def session_rows(world: World, program: Program) -> Rows:
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    return dict(PageRows(world.core).session(session, sees_values=True))  # type: ignore[arg-type]


async def test_a_variable_shows_its_time_and_first_characters() -> None:
    world = World()
    await world.join()
    program = world.program()
    scope = program.scope.values()
    given = program.core.create_var(*scope, "given", "at\n once")
    late = program.core.create_var(*scope, "late", None)
    await world.clock.advance(5.0)
    program.core.set_var(*scope, late, "later " * 30)
    await world.clock.advance(5.0)
    output = program.call("one", late)
    read = program.read(output)
    await world.settle()
    await read
    rows = session_rows(world, program)
    assert rows[f"var:{given}"]["set_s"] == pytest.approx(0.0)
    assert rows[f"var:{late}"]["set_s"] == pytest.approx(5.0)
    assert rows[f"var:{output}"]["set_s"] is None
    question = next(row for row in rows.values() if row.get("name") == "q")
    assert question["set_s"] == pytest.approx(10.0)
    assert rows[f"var:{given}"]["head"] == "at once"
    assert rows[f"var:{late}"]["head"] == ("later " * 10)[:59] + "…"
    await world.core.close()


async def test_the_first_token_of_a_running_call_is_seen() -> None:
    world = World()
    engine = await world.join(script=Script(hang_after=2))
    program = world.program()
    output = program.call("one")
    assert "first_token_s" not in session_rows(world, program)[f"call:{output}"]
    stream = program.stream(output)
    await world.clock.advance(7.0)
    call = session_rows(world, program)[f"call:{output}"]
    assert call["state"] == "running"
    assert call["started_s"] <= call["first_token_s"] <= 7.0
    engine.resume.set()
    await world.clock.advance(1.0)
    await stream
    call = session_rows(world, program)[f"call:{output}"]
    assert call["started_s"] <= call["first_token_s"] <= call["finished_s"]
    await world.core.close()


async def test_a_late_viewer_does_not_invent_a_time_of_the_first_token() -> None:
    world = World()
    engine = await world.join(script=Script(hang_after=2))
    program = world.program()
    output = program.call("one")
    read = program.read(output)
    await world.clock.advance(7.0)
    assert "first_token_s" not in session_rows(world, program)[f"call:{output}"]
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    page = PageRows(world.core)
    page.variable(session, output, sees_values=True)
    await world.clock.advance(1.0)
    assert page.variable(session, output, sees_values=True)["text:0"]["text"]
    assert "first_token_s" not in session_rows(world, program)[f"call:{output}"]
    engine.resume.set()
    await world.clock.advance(1.0)
    await read
    assert session_rows(world, program)[f"call:{output}"]["state"] == "done"
    await world.core.close()


async def test_a_retried_call_lists_its_attempts() -> None:
    world = Kept()
    engine = await world.join()
    engine.scripts = [Script(error=EngineFailed(f"reason {n}")) for n in range(2)]
    rows = PageRows(world.core, world.history.context, world.history)
    program = world.program()
    output = program.call("one", sampling={"temperature": 0.25, "max_gen_length": 20})
    read = program.read(output)
    await world.clock.advance(100.0)
    await read
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    shown = rows.variable(session, output, sees_values=True)["call"]
    assert [(one["engine"], one["why_left"]) for one in shown["attempts"]] == [
        ("e0", "reason 0"),
        ("e0", "reason 1"),
        ("e0", None),
    ]
    for attempt in shown["attempts"]:
        assert attempt["queued_s"] >= 0
        assert attempt["ran_s"] >= 0
    assert shown["sampling"] == {"temperature": 0.25, "max_gen_length": 20}
    hidden = rows.variable(session, output, sees_values=False)["call"]
    assert hidden.keys() == {"func", "request_id"}
    program.end()
    await world.settle()
    kept = world.run(program).variable(output, sees_values=True)["call"]
    assert (kept["attempts"], kept["sampling"]) == (shown["attempts"], shown["sampling"])
    await world.history.close()
    await world.core.close()


async def test_at_most_8_attempts_are_listed() -> None:
    world = World()
    program = world.program()
    rows = PageRows(world.core)
    output = program.call("one")
    read = program.read(output)
    await world.settle()
    for n in range(12):
        await world.join(f"e{n}", Script(hang_after=0))
        await world.settle()
        if n < 11:
            engine = world.core.fleet.engines[n]
            engine.lost_without_crash = True
            world.core.fleet.lose(engine, "it has left")
            await world.settle()
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    attempts = rows.variable(session, output, sees_values=True)["call"]["attempts"]
    assert [one["engine"] for one in attempts] == [f"e{n}" for n in range(4, 12)]
    assert attempts[-1]["ran_s"] is None
    read.cancel()
    await asyncio.wait([read])
    await world.core.close()


async def test_a_program_that_stops_reading_a_call_is_cancelled() -> None:
    """So a program that was interrupted by Ctrl-C does not count as finished."""
    world = Kept()
    engine = await world.join(script=Script(hang_after=0))
    program = world.program()
    first = program.call("one")
    read = program.read(program.call("two", first))
    await world.settle()
    read.cancel()
    await asyncio.wait([read])
    await world.settle()
    program.end()
    await world.settle()
    assert world.run(program).row["state"] == "cancelled"

    later = world.program()
    unread = later.call("three")
    read = later.read(unread)
    await world.settle()
    read.cancel()
    await asyncio.wait([read])
    engine.resume.set()
    again = later.read(unread)
    await world.settle()
    await again
    later.call("four")
    later.end()
    await world.settle()
    assert world.run(later).row["state"] == "finished"
    await world.history.close()
    await world.core.close()


async def test_a_call_with_the_result_of_an_identical_call_names_its_run() -> None:
    world = World()
    await world.join()
    first, second = world.program(), world.program()
    output = first.call("one")
    await first.read(output)
    computed = session_rows(world, first)[f"call:{output}"]
    await world.clock.advance(3.0)
    again = second.call("one")
    await second.read(again)
    call = session_rows(world, second)[f"call:{again}"]
    assert call["reused_from"] == first.scope["session_id"]
    assert call["cached_tokens"] == computed["cached_tokens"] + computed["computed_tokens"] > 0
    assert (call["computed_tokens"], call["output_tokens"]) == (0, 0)
    assert (call["engine"], call["decode_s"]) == (None, None)
    assert call["started_s"] == call["ready_s"] == call["finished_s"]
    assert "first_token_s" not in call
    assert "reused_from" not in computed
    overview = PageRows(world.core).overview(OPERATOR)
    row = overview[f"session:{second.scope['session_id']}"]
    assert row["reused"] == 1
    assert row["prompt_tokens"] == row["cached_tokens"] == call["cached_tokens"]
    assert row["output_tokens"] == 0
    assert row["shape"] == [[0, 100, 100, "done"]]
    await world.core.close()
