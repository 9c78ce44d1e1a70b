"""The history of finished runs: the contents of a record, and the limits of the history."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.gateway.page.finished import FinishedRun
from parrot.gateway.page.history import History
from parrot.gateway.page.visitors import Visitor
from parrot.protocol.errors import EngineFailed
from parrot.serve.config import CoreConfig, HistoryConfig
from parrot.serve.core import ServeCore
from tests.serve.execution.test_result_cache import Program, World
from tests.support.fake_engine import Script
from tests.support.manual_clock import ManualClock

OPERATOR = Visitor(tenant=None, sees_values=True)


class Kept(World):
    """A core with a history."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self.core.config = self.core.config.model_copy(update={"history": HistoryConfig(**config)})
        self.history = History(self.core)

    def run(self, program: Program) -> FinishedRun:
        run = self.history.find(program.scope["session_id"])
        assert run is not None
        return run


@pytest.fixture
async def world() -> AsyncIterator[Kept]:
    world = Kept()
    yield world
    world.history.check_integrity()
    await world.history.close()
    await world.core.close()


async def test_a_finished_run_has_the_rows_of_a_live_session(world: Kept) -> None:
    await world.join()
    program = world.program()
    first = program.call("one", func_name="ask")
    second = program.call("two", first, func_name="join")
    unread = program.call("three", func_name="unread", on_demand=True)
    read = program.read(second)
    await world.settle()
    value = await read
    program.end()
    run = world.run(program)
    assert run.row["state"] == "finished"
    assert run.row["ended_at"] >= run.row["created_at"]
    assert (run.row["calls"], run.row["done"], run.row["failed"]) == (3, 2, 0)
    assert run.row["cancelled"] == 0
    assert run.row["functions"] == ["ask", "join", "unread"]
    rows = run.view(sees_values=True)
    assert {rows[f"call:{var}"]["state"] for var in (first, second)} == {"done"}
    assert rows[f"call:{second}"]["inputs"][-1] == first
    assert rows[f"call:{unread}"]["state"] == "idle"
    assert rows[f"var:{unread}"]["state"] == "empty"
    assert "errors" not in rows[f"var:{unread}"]
    shown = run.variable(second, sees_values=True)
    assert shown["text:0"]["text"] == value
    assert shown["call"]["func"] == "join"
    assert {"var": first, "name": "out"} in shown["call"]["prompt"]
    hidden = run.variable(second, sees_values=False)
    assert hidden.keys() == {"var", "call"}
    assert "prompt" not in hidden["call"]


async def test_a_failed_run_is_not_stopped(world: Kept) -> None:
    engine = await world.join()
    engine.scripts = [Script(error=EngineFailed("a kernel failed")) for _ in range(8)]
    program = world.program()
    first = program.call("one")
    read = program.read(program.call("two", first))
    await world.clock.advance(100.0)
    await asyncio.wait([read], timeout=5)
    assert read.exception() is not None
    program.end()
    run = world.run(program)
    assert (run.row["state"], run.row["failed"]) == ("failed", 2)
    assert "a kernel failed" in str(run.view(sees_values=True)[f"var:{first}"]["errors"])


async def test_a_stopped_run_has_not_failed(world: Kept) -> None:
    program = world.program()  # Without an engine the calls stay queued.
    first = program.call("one")
    second = program.call("two", first)
    read = program.read(second)
    await world.settle()
    program.core.cancel_var(*program.scope.values(), first)
    await asyncio.wait([read], timeout=5)
    program.end()
    run = world.run(program)
    assert (run.row["state"], run.row["failed"], run.row["cancelled"]) == ("cancelled", 0, 2)
    assert {run.view(sees_values=True)[f"call:{var}"]["state"] for var in (first, second)} == {
        "cancelled"
    }


async def test_a_run_that_is_ended_while_a_reader_waits_is_cancelled(world: Kept) -> None:
    program = world.program()
    output = program.call("one")
    read = program.read(output)
    await world.settle()
    program.end()
    await asyncio.wait([read], timeout=5)
    run = world.run(program)
    assert run.row["state"] == "cancelled"
    assert run.view(sees_values=True)[f"call:{output}"]["state"] == "cancelled"


async def test_a_session_without_calls_and_a_shutdown_leave_no_run(world: Kept) -> None:
    empty, live = world.program(), world.program()
    live.call("one")
    empty.end()
    assert len(world.history) == 0
    world.core.shut_down()
    assert len(world.history) == 0


async def test_a_disabled_history_is_not_called() -> None:
    world = Kept(max_runs=0)
    assert world.core.keepers == []
    await world.core.close()


async def test_a_run_keeps_the_last_texts_that_fit() -> None:
    world = Kept(size=2**20)
    program = world.program()
    names = [
        program.core.create_var(*program.scope.values(), f"x{n}", f"{n}" * 30_000) for n in range(9)
    ]
    program.call("one", *names)
    program.end()
    run = world.run(program)
    texts = [run.variable(name, sees_values=True) for name in names]
    assert ["text:0" in rows for rows in texts] == [False] * 5 + [True] * 4
    assert texts[0]["var"]["is_left_out"]
    assert "is_left_out" not in run.variable(names[0], sees_values=False)["var"]
    assert run.size < 2**20 / 4
    world.history.check_integrity()
    await world.core.close()


async def test_an_old_run_is_deleted_without_a_request(world: Kept) -> None:
    for wait_s in (3600.0, 0.0):
        program = world.program()
        program.call("one")
        program.end()
        await world.clock.advance(wait_s)
    assert len(world.history) == 2
    await world.clock.advance(86_400.0 - 3600.0 + 2.0)
    assert [run.id for run in world.history] == [program.scope["session_id"]]
    await world.clock.advance(3600.0)
    assert len(world.history) == 0


def finished(number: int, tenant: str, num_bytes: int, kind: str = "program") -> FinishedRun:
    row = {"id": number, "kind": kind, "ended_at": 2e9}
    return FinishedRun(tenant, row, b"{}", b"{}", (b"x" * num_bytes,))


async def test_many_runs_of_one_tenant_displace_no_other_tenant() -> None:
    world = Kept(max_runs=10)
    for number in range(4):
        world.history.add(finished(number, "quiet", 10))
    for number in range(10, 40):
        world.history.add(finished(number, "loud", 10, "conversation"))
    world.history.add(finished(99, "loud", 10))
    kept = [run.id for run in world.history]
    assert kept == [0, 1, 2, 3, 35, 36, 37, 38, 39, 99]
    assert world.history.overview(Visitor("quiet", sees_values=True)).keys() == {
        f"session:{number}" for number in range(4)
    }
    assert len(world.history.overview(OPERATOR)) == 10
    await world.history.close()
    await world.core.close()


async def test_many_ends_of_one_tenant_displace_no_other_tenant_before_a_reader_comes() -> None:
    world = Kept(max_runs=10)
    quiet = [world.program("quiet") for _ in range(3)]
    loud = [world.program("loud") for _ in range(40)]
    for program in (*quiet, *loud):
        program.call("one")
    for program in (*quiet, *loud):
        program.end()
    kept = [run.id for run in world.history]
    ids = [program.scope["session_id"] for program in (*quiet, *loud[-7:])]
    assert kept == ids
    assert all(len(run.view(sees_values=True)) > 1 for run in world.history)
    world.history.check_integrity()
    await world.history.close()
    await world.core.close()


async def test_a_run_is_recorded_within_seconds_without_a_visitor(world: Kept) -> None:
    program = world.program()
    session = world.core.sessions.find(program.scope["session_id"])
    assert session is not None
    program.call("one")
    program.end()
    assert session.graph.calls  # Not taken, because a later session may displace it.
    await world.clock.advance(6.0)
    assert not session.graph.calls
    assert world.run(program).row["state"] == "finished"


runs = st.lists(
    st.tuples(
        st.sampled_from(["a", "b", "c"]),
        st.integers(0, 40_000),
        st.sampled_from(["program", "conversation"]),
        st.integers(0, 20),  # the number of a run that is deleted afterwards
    ),
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(runs)
def test_no_limit_is_exceeded(added: list[tuple[str, int, str, int]]) -> None:
    async def scenario() -> None:
        config = CoreConfig(history=HistoryConfig(max_runs=8, size=2**17))
        core = ServeCore(config, clock=ManualClock())
        history = History(core)
        for number, (tenant, num_bytes, kind, deleted) in enumerate(added):
            run = finished(number, tenant, num_bytes, kind)
            history.add(run)
            history.check_integrity()
            assert number in history  # The newest run always fits.
            if deleted < number:
                history.delete(deleted)
                history.check_integrity()
        await history.close()
        await core.close()

    asyncio.run(scenario())


@given(st.text(), st.text())
def test_a_record_restores_the_same_run(value: str, prompt: str) -> None:
    strings = tuple(text.encode("utf-8", "replace") for text in (value, prompt))
    run = FinishedRun("a", {"id": 1}, b'{"var:x":{"chars":1}}', b'{"x":{"text":0}}', strings)
    again = FinishedRun.of_fields(orjson.loads(orjson.dumps(run.fields())))
    assert again == run


async def test_a_failed_run_is_an_event(world: Kept) -> None:
    engine = await world.join()
    failed, finished = world.program(), world.program()
    read = finished.read(finished.call("two"))
    await world.settle()
    await read
    engine.scripts = [Script(error=EngineFailed("a kernel failed")) for _ in range(8)]
    read = failed.read(failed.call("one"))
    await world.clock.advance(100.0)
    await asyncio.wait([read], timeout=5)
    assert read.exception() is not None
    for program in (failed, finished):
        program.end()
    (event,) = world.history.failures(Visitor(None, sees_values=True)).values()
    assert (event["kind"], event["session"]) == ("run failed", failed.scope["session_id"])
    assert "a kernel failed" in event["text"]
    (event,) = world.history.failures(Visitor(None, sees_values=False)).values()
    assert event["text"] == ""
    assert not world.history.failures(Visitor("other", sees_values=True))
