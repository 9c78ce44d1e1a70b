"""Every operation of ServeCore on virtual time, with an engine that the test controls."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from parrot.protocol.errors import (
    AuthenticationFailed,
    Cancelled,
    EngineFailed,
    InvalidRequest,
    NoEngine,
    NotFound,
    QueueFull,
    QuotaExceeded,
    SessionGone,
    TimedOut,
    Unavailable,
)
from parrot.protocol.public import (
    FirstVarsRequest,
    NativeCallRequest,
    SemanticCallRequest,
    SessionCreateRequest,
    VarGetRequest,
)
from parrot.serve.readers import READ_GRACE_S, WAKE_DELAY_S
from parrot.utils.tasks import at_once
from tests.support.held_world import BROKEN, HeldWorld
from tests.support.requests import made, taken, var_ids


@pytest.fixture
async def world() -> AsyncIterator[HeldWorld]:
    world = await HeldWorld.open()
    yield world
    await world.close()


async def test_a_read_activates_waits_and_gets_the_value(world: HeldWorld) -> None:
    y = world.call("y", world.call("x"))
    reading = world.read(y, criteria="latency")
    await world.settle()
    assert world.running == ["x"]
    await world.finish("x")
    await world.finish("y", "the value")
    assert await reading == "the value"
    assert await world.read(y) == "the value"


async def test_an_error_reaches_every_reader_now_and_later(world: HeldWorld) -> None:
    y = world.call("y", world.call("x"))
    readers = [world.read(y) for _ in range(3)]
    await world.settle()
    await world.fail(world.running[0], BROKEN)
    for reader in [*readers, world.read(y)]:
        with pytest.raises(EngineFailed, match="needs `x`, which failed: it broke"):
            await reader


async def test_a_timeout_ends_the_read_and_then_the_work(world: HeldWorld) -> None:
    y = world.call("y")
    reading = world.read(y, timeout=5)
    await world.clock.advance(4.9)
    assert not reading.done()
    await world.clock.advance(0.2)
    with pytest.raises(TimedOut, match="`y`"):
        await reading
    assert world.running == ["y"]  # for a grace period, because programs poll
    await world.clock.advance(READ_GRACE_S)
    assert world.running == []
    reading = world.read(y)
    await world.settle()
    await world.finish(world.running[0], "after all")
    assert await reading == "after all"


async def _timed_out(world: HeldWorld, var_id: str) -> str:
    """Return the error message of a read that times out after 1 s."""
    reading = world.read(var_id, timeout=1)
    await world.clock.advance(1.1)
    with pytest.raises(TimedOut) as caught:
        await reading
    return caught.value.message


async def test_the_error_of_a_timeout_names_the_cause_of_the_wait() -> None:
    world = await HeldWorld.open(tasks_capacity=0)
    x = world.variable("x")
    assert await _timed_out(world, x) == (
        "`x` was not ready after 1 s: nothing has set it, and it is not the output of a call"
    )
    behind_x = world.call("behind", world.call("near", x, func_name="ask"))
    assert "the call `ask` needs `x`, which was never set" in await _timed_out(world, behind_x)
    early = world.call("early", models=["nobody"], func_name="early")
    assert (await _timed_out(world, early)).endswith("no engine is registered")
    await world.join()
    assert "no engine serves model `nobody` now; available: tiny" in await _timed_out(world, early)
    running = world.call("y", func_name="tell")
    assert "the call `tell` is running on engine fake" in await _timed_out(world, running)
    behind = world.call("z", running)
    assert "the call `tell` is running on engine fake" in await _timed_out(world, behind)
    race = FirstVarsRequest(**world.scope, var_ids=[running, x], k=1, timeout=1)
    reading = asyncio.ensure_future(world.core.first(race))
    await world.clock.advance(1.1)
    with pytest.raises(TimedOut, match=r"0 of 1 variables were ready after 1 s\. `y`: "):
        await reading
    await world.close()


async def test_a_timeout_in_the_queue_says_so() -> None:
    world = await HeldWorld.open(tasks_capacity=1)
    world.call("busy", output_criteria="latency")
    await world.settle()
    queued = world.call("y", func_name="tell")
    assert "the call `tell` is in the queue for an engine" in await _timed_out(world, queued)
    await world.close()


async def test_a_model_that_is_not_served_is_rejected_at_the_call(world: HeldWorld) -> None:
    with pytest.raises(NotFound, match="`gpt-4` is not served; available: tiny") as caught:
        world.call("y", models=["gpt-4"])
    assert caught.value.param == "models"
    assert world.call("y", models=["gpt-4", "tiny"])


async def test_calls_wait_for_a_model_that_may_still_register() -> None:
    world = await HeldWorld.open(tasks_capacity=0, prices={"priced": {"input": 1.0}})
    assert world.call("early", models=["gpt-4"])
    await world.join()
    for model in ("priced", "tiny"):
        assert world.call(model, models=[model])
    await world.close()


async def test_polling_does_not_start_the_work_again(world: HeldWorld) -> None:
    y = world.call("y")
    for _ in range(5):
        reading = world.read(y, timeout=1)
        await world.clock.advance(1)
        with pytest.raises(TimedOut):
            await reading
    assert world.engine.aborted_names == []
    reading = world.read(y, timeout=1)
    await world.settle()
    await world.finish(world.running[0], "done")
    assert await reading == "done"


async def test_the_timeout_is_a_deadline_for_the_scheduler() -> None:
    world = await HeldWorld.open(tasks_capacity=1)
    busy = world.call("busy", output_criteria="latency")
    await world.settle()
    calls = {name: world.call(name) for name in ("early", "late")}
    patient = world.read(calls["early"])
    urgent = world.read(calls["late"], timeout=1.0)
    await world.settle()
    assert world.running == ["busy"]
    await world.finish("busy")
    assert world.running == ["late"]
    for reading in (world.read(busy), patient, urgent):
        reading.cancel()
    await world.close()


async def test_a_cancelled_reader_cancels_its_work(world: HeldWorld) -> None:
    y = world.call("y", world.call("x"))
    reading, other = world.read(y), world.read(y)
    await world.settle()
    reading.cancel()
    await world.settle()
    assert world.running == ["x"]
    other.cancel()
    await world.settle()
    assert world.running == []


async def test_a_read_without_a_producer_ends_with_the_session(world: HeldWorld) -> None:
    empty = world.variable()
    y = world.call("y", empty)
    readings = [world.read(empty), world.read(y)]
    await world.clock.advance(59)
    assert not any(reading.done() for reading in readings)
    await world.clock.advance(2)
    for reading in readings:
        with pytest.raises(SessionGone, match="expired"):
            await reading
    with pytest.raises(SessionGone):
        world.variable()
    await world.clock.advance(1)
    assert world.engine.contexts == {}


async def test_a_read_with_its_own_timeout_outlives_the_life_span(world: HeldWorld) -> None:
    reading = world.read(world.variable(), timeout=300)
    await world.clock.advance(299)
    assert not reading.done()
    await world.clock.advance(1)
    with pytest.raises(TimedOut):
        await reading
    await world.clock.advance(61)
    with pytest.raises(SessionGone):
        world.variable()


async def test_long_work_keeps_its_session(world: HeldWorld) -> None:
    y = world.call("y", world.call("x"))
    reading = world.read(y)
    for _ in range(2):
        await world.clock.advance(500)
        await world.finish(world.running[0], "slow")
    assert await reading == "slow"


async def test_deleting_a_session_ends_its_reads_and_work(world: HeldWorld) -> None:
    y = world.call("y")
    reading = world.read(y)
    await world.settle()
    session_id, auth = world.scope.values()
    world.core.delete_session(session_id, auth)
    with pytest.raises(SessionGone, match="deleted"):
        await reading
    await world.clock.advance(1)
    assert world.running == []
    assert world.engine.aborted_names == ["y"]
    assert world.engine.contexts == {}
    with pytest.raises(SessionGone):
        world.core.session_info(session_id, auth)


async def test_a_session_that_ends_while_it_is_listed_is_reported_as_ended(
    world: HeldWorld,
) -> None:
    for number in range(1100):
        world.variable(f"x{number}")
    session_id, auth = world.scope.values()
    steps = world.core.session_steps(session_id, auth)
    next(steps)
    listing = asyncio.ensure_future(world.core.list_vars(session_id, auth))
    await asyncio.sleep(0)
    world.core.delete_session(session_id, auth)
    with pytest.raises(SessionGone, match="ended"):
        at_once(steps)
    with pytest.raises(SessionGone, match="deleted"):
        await listing


async def test_a_session_is_not_reported_as_ended_when_the_service_stops(world: HeldWorld) -> None:
    for number in range(1100):
        world.variable(f"x{number}")
    steps = world.core.session_steps(*world.scope.values())
    next(steps)
    world.core.shut_down()
    with pytest.raises(Unavailable, match="shutting down"):
        at_once(steps)


async def test_a_deleted_session_does_not_expire_as_well(
    world: HeldWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world.core.delete_session(*world.scope.values())
    await world.clock.advance(120)
    assert not caplog.records
    assert (
        'parrot_session_e2e_seconds_count{app="unnamed"} 1.0'
        in b"".join(world.core.metrics()).decode()
    )


async def test_a_stream_gives_all_text_to_early_and_late_readers(world: HeldWorld) -> None:
    y = world.call("y")
    early = world.core.stream(world.request(), y)
    first = asyncio.ensure_future(anext(early))
    await world.settle()
    world.stream("y", "one ")
    assert await first == "one "
    world.stream("y", "two ")
    late = world.core.stream(world.request(), y)
    assert await anext(late) == "one two "
    await world.finish("y", "one two three")
    assert [delta async for delta in early] == ["two three"]
    assert [delta async for delta in late] == ["three"]
    after = world.core.stream(world.request(), y)
    assert [delta async for delta in after] == ["one two three"]


async def test_a_stream_ends_with_its_error_or_timeout(world: HeldWorld) -> None:
    y, z = world.call("y"), world.call("z")
    failing = asyncio.ensure_future(anext(world.core.stream(world.request(), y)))
    slow = asyncio.ensure_future(anext(world.core.stream(world.request(timeout=3), z)))
    await world.settle()
    await world.fail("y", BROKEN)
    with pytest.raises(EngineFailed):
        await failing
    await world.clock.advance(3)
    with pytest.raises(TimedOut):
        await slow
    with pytest.raises(NotFound):
        world.core.stream(world.request(), "nowhere")


async def test_a_closed_stream_cancels_its_work(world: HeldWorld) -> None:
    y = world.call("y")
    stream = world.core.stream(world.request(), y)
    first = asyncio.ensure_future(anext(stream))
    await world.settle()
    world.stream("y", "text")
    assert await first == "text"
    await stream.aclose()
    await world.settle()
    assert world.running == []
    assert world.engine.aborted_names == ["y"]


async def test_cancel(world: HeldWorld) -> None:
    x = world.call("x")
    y = world.call("y", x)
    reading = world.read(y)
    await world.settle()
    world.core.cancel_var(*world.scope.values(), x)
    with pytest.raises(Cancelled):
        await reading
    session_id, auth = world.scope.values()
    info = world.core.session_info(session_id, auth)
    assert [call.state for call in info.calls] == ["cancelled", "failed"]
    world.core.cancel_call(session_id, auth, info.calls[0].request_id)
    with pytest.raises(NotFound):
        world.core.cancel_call(session_id, auth, 999)


async def test_native_functions_are_nodes_of_the_graph(world: HeldWorld) -> None:
    x = world.call("x")
    body = world.scope | {
        "func_name": "shout",
        "func_source": "def shout(a, out):\n    out.set(a.upper())",
        "parameters": [taken("a", x), made("out")],
    }
    shouted = var_ids(world.core.submit_native(NativeCallRequest.model_validate(body)))["out"]
    y = world.call("y", shouted)
    reading, shouting = world.read(y), world.read(shouted)
    await world.settle()
    await world.finish(world.running[0], "hello")
    assert await shouting == "HELLO"
    await world.settle()
    await world.finish(world.running[0], "end")
    assert await reading == "end"
    info = world.core.session_info(*world.scope.values())
    assert [(call.kind, call.func_name, call.state) for call in info.calls] == [
        ("semantic", "call_1", "done"),
        ("native", "shout", "done"),
        ("semantic", "call_3", "done"),
    ]
    assert [(edge.source, edge.target, edge.variable) for edge in info.edges] == [
        (x, shouted, "x"),
        (shouted, y, "out"),
    ]
    bad = NativeCallRequest.model_validate(body | {"func_name": "not a name"})
    with pytest.raises(InvalidRequest):
        world.core.submit_native(bad)


async def test_a_native_call_can_be_cancelled(world: HeldWorld) -> None:
    body = world.scope | {
        "func_name": "spin",
        "func_source": "def spin(out):\n    while True:\n        pass",
        "parameters": [made("out")],
        "timeout": 60,
        "output_criteria": "latency",
    }
    response = world.core.submit_native(NativeCallRequest.model_validate(body))
    reading = world.read(var_ids(response)["out"])
    await world.settle()
    world.core.cancel_call(*world.scope.values(), response.request_id)
    with pytest.raises(Cancelled):
        await reading


async def test_session_info_shows_all_calls_and_variables(world: HeldWorld) -> None:
    x = world.call("x", func_name="first")
    y = world.call("y", x, func_name="second")
    await world.clock.advance(1)
    reading = world.read(y, criteria="TTFT")
    await world.clock.advance(1)
    await world.finish(world.running[0])
    await world.clock.advance(1)
    await world.finish(world.running[0])
    await reading
    info = world.core.session_info(*world.scope.values())
    assert info.age_s == 3
    assert info.expires_in_s == 60
    first, second = info.calls
    assert (first.func_name, first.criteria, first.depth) == ("first", "latency", 1)
    assert (second.func_name, second.criteria, second.depth) == ("second", "TTFT", 0)
    times = (second.submitted_s, second.activated_s, second.ready_s, second.finished_s)
    assert times == (0, 1, 2, 3)
    variables = (await world.core.list_vars(*world.scope.values())).vars
    assert [(v.var_name, v.state, v.consumers) for v in variables] == [
        ("x", "ready", [second.request_id]),
        ("y", "ready", []),
    ]


async def test_nothing_of_a_session_is_reachable_from_another(world: HeldWorld) -> None:
    secret = world.variable("secret", "42")
    stranger = world.core.create_session(SessionCreateRequest())
    theirs = VarGetRequest(**stranger.model_dump())
    with pytest.raises(NotFound):
        await world.core.read(theirs, secret)
    request = SemanticCallRequest.model_validate(
        stranger.model_dump()
        | {"template": "{{a}}{{b}}", "parameters": [taken("a", secret), made("b")]}
    )
    with pytest.raises(NotFound):
        world.core.submit_call(request)
    mixed = VarGetRequest(session_id=world.scope["session_id"], session_auth=stranger.session_auth)
    with pytest.raises(NotFound):
        await world.core.read(mixed, secret)


async def test_limits_are_enforced() -> None:
    world = await HeldWorld.open(max_sessions_num=1)
    with pytest.raises(QuotaExceeded):
        world.core.create_session(SessionCreateRequest())
    world.core.delete_session(*world.scope.values())
    world.core.create_session(SessionCreateRequest())
    await world.core.close()


async def test_a_full_queue_rejects_new_calls_and_reads_and_fails_nothing() -> None:
    world = await HeldWorld.open(tasks_capacity=1, global_scheduler={"max_queue_size": 2})
    world.call("first", output_criteria="latency")
    await world.settle()
    late = world.call("late", idempotency_key="k")
    world.call("a", output_criteria="latency")
    busy = world.call("b", output_criteria="latency")
    with pytest.raises(QueueFull, match="try again"):
        world.call("c")
    with pytest.raises(QueueFull):
        await world.read(late)
    with pytest.raises(QueueFull):
        world.core.stream(world.request(), late)
    assert world.call("late", idempotency_key="k") == late  # the call was accepted before
    reading = world.read(busy)  # the call already runs
    await world.settle()
    await world.finish("first")
    await world.finish("a")
    await world.finish("b", "done")
    assert await reading == "done"
    again = world.read(late)
    await world.settle()
    await world.finish("late", "at last")
    assert await again == "at last"
    world.core.check_integrity()
    await world.core.close()


async def test_one_read_may_need_more_than_the_queue_size() -> None:
    world = await HeldWorld.open(tasks_capacity=1, global_scheduler={"max_queue_size": 4})
    reading = world.read(world.call("sum", *[world.call(f"part{n}") for n in range(20)]))
    await world.settle()
    assert (world.core.num_queued, len(world.running)) == (19, 1)
    with pytest.raises(QueueFull):
        world.call("more")
    for _ in range(20):
        await world.finish(world.running[0])
    await world.finish("sum", "joined")
    assert await reading == "joined"
    await world.core.close()


async def test_api_keys_guard_sessions_and_separate_tenants() -> None:
    world = await HeldWorld.open(api_keys=("one", "two"))
    with pytest.raises(AuthenticationFailed):
        world.core.create_session(SessionCreateRequest())
    with pytest.raises(AuthenticationFailed):
        world.core.create_session(SessionCreateRequest(api_key="three"))
    world.call("x", output_criteria="latency")
    other = world.core.create_session(SessionCreateRequest(api_key="two"))
    world.scope = other.model_dump()
    world.call("x", output_criteria="latency")
    await world.settle()
    tenants = {held.request.tenant for held in world.engine.held}
    assert len(tenants) == 2
    assert not tenants & {"one", "two"}
    await world.core.close()


async def test_closing_ends_open_reads(world: HeldWorld) -> None:
    reading = world.read(world.call("y"))
    await world.settle()
    world.core.shut_down()
    with pytest.raises(Unavailable):
        await reading
    with pytest.raises(Unavailable):
        world.core.create_session(SessionCreateRequest())
    with pytest.raises(Unavailable):
        world.core.readiness(sees_engines=False)


async def test_metrics() -> None:
    world = await HeldWorld.open(tasks_capacity=0)
    with pytest.raises(NoEngine):
        world.core.readiness(sees_engines=False)
    await world.join()
    assert len(world.core.readiness(sees_engines=True).engines) == 1
    reading = world.read(world.call("y"))
    await world.settle()
    await world.finish("y")
    assert await reading
    await world.clock.advance(0.5)
    world.variable()
    text = b"".join(world.core.metrics()).decode()
    for line in (
        "parrot_sessions 1.0",
        'parrot_variables{state="ready"} 1.0',
        'parrot_variables{state="empty"} 1.0',
        'parrot_calls_total{kind="semantic",state="done"} 1.0',
        'parrot_call_queue_seconds_bucket{function="unnamed",le="+Inf"} 1.0',
        'parrot_engine_up{engine="fake",model_name="tiny"} 1.0',
        'parrot_engine_heartbeat_age_seconds{engine="fake",model_name="tiny"} 0.5',
    ):
        assert line in text, text
    await world.close()


async def test_a_blocked_program_has_its_other_calls_started_at_once(world: HeldWorld) -> None:
    x, y = world.call("x"), world.call("y")
    reading = world.read(x, blocked=True)
    await world.settle()
    assert world.running == ["x", "y"]
    z = world.call("z")  # submitted by another thread, which may still set its criteria
    await world.settle()
    assert world.running == ["x", "y"]
    await world.finish("x")
    await reading
    reading = world.read(y)
    await world.settle()
    assert world.running == ["y"]
    await world.clock.advance(WAKE_DELAY_S)
    assert world.running == ["y", "z"]
    await world.finish("y")
    await world.finish("z")
    assert await world.read(z, blocked=True) == "<z>"
    assert await reading == "<y>"


async def test_a_read_that_does_not_block_keeps_the_delay(world: HeldWorld) -> None:
    world.call("y")
    reading = world.read(world.call("x"))
    await world.settle()
    await world.clock.advance(0.9 * WAKE_DELAY_S)
    assert world.running == ["x"]
    await world.clock.advance(0.9 * WAKE_DELAY_S)
    assert world.running == ["x", "y"]
    await world.finish("x")
    await world.finish("y")
    await reading


async def test_one_thousand_reads_leave_nothing_behind(world: HeldWorld) -> None:
    """No readers, timers and callbacks remain."""
    y = world.call("y", world.call("x"))
    for _ in range(20):
        readings = [world.read(y, timeout=50) for _ in range(50)]
        await world.settle()
        for reading in readings:
            reading.cancel()
        await world.settle()
    await world.clock.advance(2 * WAKE_DELAY_S)
    assert world.running == []  # abandoned calls do not run in the background
    session = world.core.sessions.find(world.scope["session_id"])
    assert session is not None
    assert not session.timed_reads
    node = session.graph.variable(y)
    assert not node.readers
    assert not node._watchers
    assert len(world.core._timers) == 1  # the session's expiry


async def test_request_ids_do_not_reveal_the_number_in_other_sessions() -> None:
    world = await HeldWorld.open()

    def first_id() -> int:
        world.enter()
        world.call("out")
        session = world.core.sessions.find(world.scope["session_id"])
        assert session is not None
        return min(session.graph.calls)

    assert len({first_id() for _ in range(3)}) == 1
    await world.close()
