"""Engines that register, are lost and return, and calls without an engine."""

import asyncio

import pytest

from parrot.protocol.engine_api import EngineType
from parrot.protocol.errors import (
    EngineFailed,
    NoEngine,
    NotFound,
    ParrotError,
    QuotaExceeded,
    StaleCore,
    Unavailable,
)
from parrot.serve.graph.nodes import CallOptions, CompletionState
from tests.serve.execution.world import World, error_of, value
from tests.support.fake_engine import Script, fake_engine


@pytest.mark.parametrize(
    ("error", "ping_error"),
    [
        (Unavailable("connection reset"), Unavailable("connection refused")),
        (StaleCore("it belongs to another"), StaleCore("it belongs to another")),
    ],
)
async def test_a_lost_engines_completions_run_elsewhere(
    world: World, error: ParrotError, ping_error: ParrotError
) -> None:
    one = fake_engine("one", script=Script(hang_after=0))
    await world.join(one)
    hanging = [world.submit(f"job {i} ", value("x")) for i in range(3)]
    await world.settle()
    one.scripts = [Script(error=error)]
    one.ping_error = ping_error
    trigger = world.submit("more")
    await world.settle()
    assert world.dispatcher.fleet.views() == []
    assert {c.state for c in (*hanging, trigger)} == {CompletionState.QUEUED}
    await world.join(fake_engine("two"))
    for completion in (*hanging, trigger):
        await completion.output.wait()
    assert {c.stats.engine_name for c in hanging} == {"two"}
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["two"]
    assert one.is_closed


async def test_a_broken_connection_affects_only_its_own_run(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    await world.join(engine)
    innocent = [world.submit(f"job {i} ", value("x")) for i in range(8)]
    await world.settle()
    for _ in range(4):
        engine.scripts = [Script(error=Unavailable("connection reset")), Script()]
        assert await world.submit("more").output.wait()
    engine.script = Script(error=Unavailable("connection reset"))
    unlucky = await error_of(world.submit("most"))
    assert type(unlucky) is EngineFailed
    assert "engine one could not run the completion: connection reset" in unlucky.message
    engine.resume.set()
    assert [await completion.output.wait() for completion in innocent] == ["<7>"] * 8
    assert {completion.stats.attempts for completion in innocent} == {1}
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["one"]


async def test_a_silent_engine_is_lost_and_must_register_again(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    engine_id = await world.join(engine)
    completion = world.submit("a")
    await world.settle()
    await world.clock.advance(20)
    assert world.heartbeat(engine_id) == "ok"
    assert world.heartbeat(engine_id, core="another start of ServeCore") == "unknown"
    assert world.heartbeat(engine_id, core=world.dispatcher.fleet.identity.id) == "ok"
    await world.clock.advance(20)
    assert completion.state is CompletionState.RUNNING
    await world.clock.advance(11)
    assert not list(world.dispatcher.fleet)
    assert not completion.output.is_settled
    reading = asyncio.ensure_future(error_of(completion))
    await world.clock.advance(30)  # The grace period.
    assert isinstance(await reading, NoEngine)
    assert not completion.output.is_settled
    assert world.heartbeat(engine_id) == "unknown"
    engine.script = Script()
    await world.join(engine)
    assert await completion.output.wait() == "<1>"


async def test_an_engine_with_work_but_without_steps_is_lost(world: World) -> None:
    stuck = fake_engine("stuck", script=Script(hang_after=0))
    stuck_id = await world.join(stuck)
    await world.clock.advance(1)
    for _ in range(9):  # An idle engine needs no progress.
        assert world.heartbeat(stuck_id, num_steps=7) == "ok"
        await world.clock.advance(10)
    completion = world.submit("a")
    await world.settle()
    other_id = await world.join(fake_engine("other"))
    for i in range(3):
        assert world.heartbeat(stuck_id, num_steps=7 + (i > 0)) == "ok"
        assert world.heartbeat(other_id, num_steps=3) == "ok"
        await world.clock.advance(9)
    assert completion.state is CompletionState.RUNNING
    for _ in range(3):
        world.heartbeat(stuck_id, num_steps=8)
        world.heartbeat(other_id, num_steps=3)
        await world.clock.advance(9)
    assert completion.output.text == "<1>"
    assert completion.stats.engine_name == "other"
    assert world.heartbeat(stuck_id, num_steps=8) == "unknown"
    assert [view.info.engine_name for view in world.dispatcher.fleet.views()] == ["other"]


async def test_a_slow_server_does_not_lose_its_openai_engine(world: World) -> None:
    engine = fake_engine("proxy", text=True, script=Script(hang_after=0))
    engine.info = engine.info.model_copy(update={"engine_type": EngineType.OPENAI})
    engine_id = await world.join(engine)
    completion = world.submit("a")
    for _ in range(20):
        await world.clock.advance(10)
        assert world.heartbeat(engine_id, num_steps=7) == "ok"
    engine.resume.set()
    assert await completion.output.wait() == "<1>"


async def test_a_late_result_is_dropped(world: World) -> None:
    one = fake_engine("one", script=Script(text=lambda _: "late", hang_after=0))
    await world.join(one)
    completion = world.submit("a")
    await world.settle()
    two = fake_engine("two", script=Script(text=lambda _: "fresh"))
    world.engines["two"] = two
    await world.join(two)
    await world.clock.advance(29)
    world.heartbeat(1)
    await world.clock.advance(2)
    one.resume.set()
    await world.settle()
    assert await completion.output.wait() == "fresh"


async def test_a_model_that_was_never_served_fails_at_once(world: World) -> None:
    await world.join(fake_engine(model="tiny"))
    options = CallOptions(func_name="f", models=("llama", "opt"))
    waiting = world.submit("a", options=options)
    await world.clock.advance(0.01)
    error = await error_of(waiting)
    assert isinstance(error, NotFound)
    assert error.param == "models"
    assert "`llama` or `opt` is not served; available: tiny" in error.message


async def test_without_any_engine_calls_for_any_model_wait(world: World) -> None:
    waiting = world.submit("a", options=CallOptions(func_name="f", models=("llama",)))
    await world.clock.advance(20)
    await world.join(fake_engine("one", model="tiny"))
    await world.clock.advance(9)
    assert not waiting.output.is_settled
    await world.join(fake_engine("two", model="llama"))
    assert await waiting.output.wait() == "<1>"


async def test_no_engine(world: World) -> None:
    other = CallOptions(func_name="f", models=("llama",))
    await world.join(fake_engine("llama", model="llama"))
    await world.clock.advance(31)  # The engine is lost.
    await world.join(fake_engine(model="tiny"))
    waiting = world.submit("a", options=other)
    reading = asyncio.ensure_future(error_of(waiting))
    await world.clock.advance(29)
    assert not reading.done()
    late = world.submit("b", options=other)
    reading_late = asyncio.ensure_future(late.output.wait())
    world.heartbeat(1)
    await world.clock.advance(2)
    error = await reading
    assert isinstance(error, NoEngine)
    assert "llama" in error.message
    assert not reading_late.done()  # Its grace period starts later.
    reading = asyncio.ensure_future(error_of(waiting))
    for _ in range(4):
        world.heartbeat(1)
        await world.clock.advance(9)
    assert isinstance(await reading, NoEngine)  # A later reader is refused after its own wait.
    with pytest.raises(NoEngine):
        await reading_late
    llama = fake_engine("llama", model="llama")
    await world.join(llama)
    assert await late.output.wait() == "<1>"
    assert await waiting.output.wait() == "<1>"


async def test_calls_wait_for_engines_that_are_lost_all_at_once(world: World) -> None:
    """The grace period starts with the loss of the last engine, which may return in seconds."""
    engines = [fake_engine(name, script=Script(hang_after=0)) for name in ("one", "two")]
    for engine in engines:
        await world.join(engine)
    calls = [world.submit(text, options=CallOptions(func_name="f")) for text in "abc"]
    await world.settle()
    assert sum(len(engine.requests) for engine in engines) == len(calls)
    await world.clock.advance(30.5)
    assert not list(world.dispatcher.fleet)
    await world.clock.advance(29)
    assert not any(call.output.is_settled for call in calls)
    back = fake_engine("one")
    await world.join(back)
    assert [await call.output.wait() for call in calls] == ["<1>"] * 3

    await world.clock.advance(30.5)  # The engine is lost again. A call is submitted afterwards.
    assert not list(world.dispatcher.fleet)
    last = world.submit("d", options=CallOptions(func_name="f"))
    reading = asyncio.ensure_future(error_of(last))
    await world.clock.advance(30)
    assert isinstance(await reading, NoEngine)


async def test_registering_again_replaces_the_engine(world: World) -> None:
    engine = fake_engine("one", script=Script(hang_after=0))
    first = await world.join(engine)
    completion = world.submit("a")
    await world.settle()
    engine.script = Script()
    second = await world.join(engine)
    assert second != first
    assert await completion.output.wait() == "<1>"
    assert [view.id for view in world.dispatcher.fleet.views()] == [second]


async def test_too_many_engines(world: World) -> None:
    engines = [fake_engine(f"e{i}") for i in range(4)]
    for engine in engines:
        await world.join(engine)
    with pytest.raises(QuotaExceeded):
        await world.join(fake_engine("e4"))
    await world.join(engines[0])
    assert [model.model_name for model in world.dispatcher.fleet.models().models] == ["tiny"]


async def test_an_engine_without_a_readable_tokenizer_does_not_join(world: World) -> None:
    engine = fake_engine()

    async def refuse() -> None:
        raise Unavailable("loading")

    engine.tokenizer = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(Unavailable):
        await world.join(engine)
    assert engine.is_closed
    assert world.dispatcher.fleet.views() == []
