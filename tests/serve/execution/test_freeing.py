"""Contexts are freed, evicted and expire, and their ids are sent to the engines."""

from parrot.protocol.errors import Cancelled, InternalError, Unavailable
from tests.serve.execution.world import World, value
from tests.support.fake_engine import Script, fake_engine


async def test_runs_that_fork_an_unfinished_context_survive_its_cancellation(
    world: World,
) -> None:
    engine = fake_engine(script=Script(hang_after=0))
    await world.join(engine)
    first = world.submit("Shared beginning. ", value("one"))
    second = world.submit("Shared beginning. ", value("two"), session=2)
    await world.settle()
    shared = engine.requests[0].fills[0].context_id
    assert engine.requests[1].fills[0].parent_context_id == shared
    engine.script = Script()
    world.dispatcher.cancel(first, Cancelled("enough"))
    world.dispatcher.check_integrity()
    engine.resume.set()
    assert await second.output.wait() == "<21>"
    assert second.stats.attempts == 1
    third = world.submit("Shared beginning. ", value("three"), session=3)
    await third.output.wait()
    assert (
        engine.requests[2].fills[0].parent_context_id == -1
    )  # The cancelled context may not be computed.
    list(world.dispatcher.release_session(2))
    await world.clock.advance(0.1)
    assert shared in engine.freed


async def test_releasing_a_session_frees_its_contexts_in_one_request(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    mine = [world.submit("T: ", value(str(i))) for i in range(5)]
    other = world.submit("T: ", value("x"), session=2)
    for completion in [*mine, other]:
        await completion.output.wait()
    list(world.dispatcher.release_session(1))
    await world.settle()
    assert len(engine.freed) == 5
    assert engine.free_batches == 1
    list(world.dispatcher.release_session(2))
    await world.clock.advance(0.1)
    assert len(engine.contexts) == 1  # The tenant's constant prefix.
    await world.clock.advance(20)
    for _ in range(30):
        world.heartbeat(0)
        await world.clock.advance(20)
    assert engine.contexts == {}  # The constant prefix has expired.


async def test_frees_are_sent_until_the_engine_acknowledges_them(world: World) -> None:
    engine = fake_engine()
    engine_id = await world.join(engine)
    await world.submit("T: ", value("x")).output.wait()
    engine.free_error = Unavailable("busy")
    list(world.dispatcher.release_session(1))
    for _ in range(20):
        await world.clock.advance(10)
        world.heartbeat(engine_id)
    assert 20 < engine.free_batches < 60
    assert engine.freed == []
    engine.free_error = None
    await world.clock.advance(10)
    assert len(engine.freed) == 1
    freed = engine.free_batches
    await world.clock.advance(10)
    assert engine.free_batches == freed


async def test_a_free_that_fails_is_sent_again(world: World) -> None:
    engine = fake_engine()
    await world.join(engine)
    await world.submit("T: ", value("x")).output.wait()
    engine.free_error = InternalError("hiccup")
    list(world.dispatcher.release_session(1))
    await world.settle()
    assert engine.free_batches == 1
    engine.free_error = None
    await world.clock.advance(0.1)
    assert len(engine.freed) == 1


async def test_constant_prefixes_expire_one_after_the_other(world: World) -> None:
    """Only time passes, and the engine sends heartbeats."""
    engine = fake_engine()
    await world.join(engine)

    async def spend(seconds: int) -> None:
        for _ in range(0, seconds, 10):
            await world.clock.advance(10)
            world.heartbeat(0)
        await world.settle()

    for number, constant in enumerate(("First. ", "Second. ", "Third. ")):
        await world.submit(constant, value("x"), session=number).output.wait()
        list(world.dispatcher.release_session(number))
        await spend(20)
    shared = [request.fills[0].context_id for request in engine.requests]
    await spend(530)
    for number in range(3):
        assert not set(shared[number:]) & set(engine.freed)
        await spend(20)
        assert shared[number] in engine.freed


async def test_contexts_are_evicted_when_the_engine_is_full(world: World) -> None:
    engine = fake_engine(tokens_capacity=100)
    await world.join(engine)
    for i in range(10):
        await world.submit(f"{i}" * 20, value("y" * 10), session=i).output.wait()
    await world.clock.advance(0.1)
    assert len(engine.freed) > 10
    assert sum(map(len, engine.contexts.values())) <= 300
    (view,) = world.dispatcher.fleet.views()
    assert view.num_tokens <= 100
