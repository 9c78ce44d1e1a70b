"""A call fails after it has crashed several engines, but only if it may be the cause."""

import pytest

from parrot.protocol.errors import Cancelled, EngineFailed, Unavailable
from parrot.protocol.transport import Unreachable
from parrot.serve.graph.nodes import CompletionState
from tests.serve.execution.world import World, error_of
from tests.support.fake_engine import FakeEngine, Script, fake_engine


@pytest.mark.parametrize("registers_early", [True, False])
async def test_a_call_is_not_blamed_for_engines_lost_while_servecore_was_stalled(
    world: World, registers_early: bool
) -> None:
    """Engines stop their work when ServeCore does not answer, and register again."""
    engine = fake_engine("one", script=Script(text=lambda _: "ab", hang_after=0))
    for number in range(5):
        if number == 0 or not registers_early:
            await world.join(engine)
        if number == 0:
            completion = world.submit("Go")
        await world.settle()
        assert len(engine.requests) == number + 1
        if registers_early:  # The engine's registration is handled before the timer.
            world.clock._now += 31.0
            await world.join(engine)
        else:
            await world.clock.stand_still(31.0)
            assert not list(world.dispatcher.fleet)
    engine.script.hang_after = None
    engine.resume.set()
    if not registers_early:
        await world.join(engine)
    await world.settle()
    assert await completion.output.wait() == "ab"


@pytest.mark.parametrize("is_same", [True, False])
async def test_a_call_is_not_blamed_for_an_engine_that_registers_again(
    world: World, is_same: bool
) -> None:
    """With the same incarnation, only its network was cut. With another one, its process died."""
    engine = fake_engine("one", script=Script(text=lambda _: "ab", hang_after=0))
    await world.join(engine)
    completion = world.submit("Go")
    for number in range(5):
        await world.clock.advance(1)
        assert len(engine.requests) == (number + 1 if is_same else min(number + 1, 3))
        if not is_same:
            engine.info = engine.info.model_copy(update={"incarnation": str(number)})
        await world.join(engine)
    if is_same:
        engine.script.hang_after = None
        engine.resume.set()
        assert await completion.output.wait() == "ab"
    else:
        assert isinstance(await error_of(completion), EngineFailed)


async def test_a_call_is_not_blamed_for_engines_that_were_silent_before_it_started(
    world: World,
) -> None:
    """The network to all engines fails, so each is lost when its lease expires."""
    names = ("one", "two", "three", "four")
    engines = [fake_engine(n, script=Script(text=lambda _: "ab", hang_after=0)) for n in names]
    for engine in engines:
        await world.join(engine)
        await world.clock.advance(1)
    completion = world.submit("Go")
    await world.clock.advance(28)
    assert [engine.is_closed for engine in engines] == [True] * 3 + [False]
    await world.join(fake_engine("five", script=Script(text=lambda _: "ab")))
    await world.clock.advance(1)
    assert [len(engine.requests) for engine in engines] == [1] * 4
    assert await completion.output.wait() == "ab"


def crashing(name: str) -> FakeEngine:
    """An engine whose process dies when it receives a request."""
    engine = fake_engine(name, script=Script(hang_after=0))

    def crash(_: str) -> str:
        engine.ping_error = Unavailable("gone")
        raise Unavailable("the connection broke")

    engine.scripts = [Script(text=crash)]
    return engine


async def test_a_completion_that_crashes_engines_fails(world: World) -> None:
    killer = world.submit("kill")
    for i in range(3):
        await world.join(crashing(f"e{i}"))
        await world.clock.advance(1)
    assert type(await error_of(killer)) is EngineFailed
    assert killer.stats.attempts == 3
    assert world.dispatcher.fleet.views() == []


@pytest.mark.parametrize("is_reached", [True, False])
async def test_a_call_is_not_blamed_for_unreachable_engines(world: World, is_reached: bool) -> None:
    """The engines died together. With two concurrent calls, the call whose connection is not yet
    established is not blamed either."""
    first, second = world.submit("a"), world.submit("b")
    for i in range(3 if is_reached else 5):
        engine = crashing(f"e{i}")
        if not is_reached:
            engine.ping_error = Unavailable("gone")
            engine.scripts = [Script(error=Unreachable("nobody listens"))]
        await world.join(engine)
        await world.clock.advance(1)
        assert world.dispatcher.fleet.views() == []
    await world.join(fake_engine("good", script=Script(text=lambda _: "ab")))
    if is_reached:
        assert type(await error_of(first)) is EngineFailed
        assert type(await error_of(second)) is EngineFailed
    else:
        assert [await call.output.wait() for call in (first, second)] == ["ab", "ab"]


async def test_an_unreachable_engine_is_not_one_of_the_crashes_that_end_a_call(
    world: World,
) -> None:
    completion = world.submit("Go")
    dead = fake_engine("dead", script=Script(error=Unreachable("connection refused")))
    dead.ping_error = Unavailable("gone")
    for engine in (dead, crashing("e1"), crashing("e2")):
        await world.join(engine)
        await world.clock.advance(1)
    await world.join(fake_engine("good", script=Script(text=lambda _: "ab")))
    assert await completion.output.wait() == "ab"


async def test_a_call_is_not_blamed_for_engines_that_died_together(world: World) -> None:
    """Behind a proxy, a connection to a dead engine is accepted and then broken."""
    names = ("one", "two", "three", "four")
    engines = [fake_engine(n, script=Script(hang_after=0)) for n in names]
    for engine in engines:
        await world.join(engine)
    completion = world.submit("Go")
    await world.settle()
    for engine in engines:
        engine.ping_error = Unavailable("gone")
        engine.script = Script(error=Unavailable("the connection broke"))
    world.lose(0)
    await world.clock.advance(1)
    assert [len(engine.requests) for engine in engines] == [1, 0, 0, 0]
    await world.join(fake_engine("good", script=Script(text=lambda _: "ab")))
    assert await completion.output.wait() == "ab"


async def test_the_last_attempt_waits_until_dying_engines_are_dead(world: World) -> None:
    """Two engines die in turn below the call. The others die within a second."""
    names = ("one", "two", "three", "four")
    engines = [fake_engine(n, script=Script(hang_after=0)) for n in names]
    for engine in engines:
        await world.join(engine)
    completion = world.submit("Go")
    for number in (0, 1):
        await world.settle()
        assert len(engines[number].requests) == 1
        world.lose(number)
    await world.clock.advance(0.5)
    for engine in engines:
        engine.ping_error = Unavailable("gone")
    await world.clock.advance(0.5)
    assert [len(engine.requests) for engine in engines] == [1, 1, 0, 0]
    assert world.dispatcher.fleet.views() == []
    await world.join(fake_engine("good", script=Script(text=lambda _: "ab")))
    assert await completion.output.wait() == "ab"


async def test_a_call_that_waits_for_its_last_attempt_uses_no_engine(world: World) -> None:
    """Another call runs on the only slot, and the wait counts as time in the queue."""
    names = ("one", "two", "three")
    hanging = [fake_engine(n, script=Script(hang_after=0), tasks_capacity=1) for n in names]
    for engine in hanging[:2]:
        await world.join(engine)
    completion = world.submit("Go")
    for number in (0, 1):
        await world.settle()
        world.lose(number)
    lost_at = world.clock.now()
    await world.join(hanging[2])
    await world.settle()
    assert completion.state is CompletionState.QUEUED
    assert completion.stats.attempts == 2
    other = world.submit("Other")
    await world.settle()
    assert other.state is CompletionState.RUNNING
    hanging[2].resume.set()
    await world.settle()
    assert other.state is CompletionState.DONE
    await world.clock.advance(0.5)
    assert completion.state is CompletionState.QUEUED
    await world.clock.advance(0.5)
    assert await completion.output.wait()
    assert completion.times.started == lost_at + 1.0
    assert completion.stats.attempts == 3


async def test_a_call_is_withdrawn_while_it_waits_for_its_last_attempt(world: World) -> None:
    """When it is submitted again, it continues its output, and still waits."""
    first = Script(text=lambda _: "abc", steps=3, hang_after=2)
    scripts = {"one": first, "two": Script(hang_after=0)}
    numbers = [await world.join(fake_engine(n, script=script)) for n, script in scripts.items()]
    completion = world.submit("Go", stream=True)
    for number in numbers:
        await world.settle()
        world.lose(number)
    await world.clock.advance(0.5)
    assert completion.state is CompletionState.QUEUED
    world.withdraw(completion)
    world.dispatcher.check_integrity()
    await world.join(last := fake_engine("last", script=Script(text=lambda _: "c")))
    world.dispatcher.submit(completion)
    await world.settle()
    assert not last.requests
    await world.clock.advance(0.5)
    assert await completion.output.wait() == "abc"


async def test_a_call_is_cancelled_while_it_waits_for_its_last_attempt(world: World) -> None:
    engines = [fake_engine(name, script=Script(hang_after=0)) for name in ("one", "two")]
    numbers = [await world.join(engine) for engine in engines]
    completion = world.submit("Go")
    for number in numbers:
        await world.settle()
        world.lose(number)
    await world.join(last := fake_engine("last"))
    world.dispatcher.cancel(completion, Cancelled("enough"))
    world.dispatcher.check_integrity()
    await world.clock.advance(1.0)
    assert not last.requests
    assert isinstance(await error_of(completion), Cancelled)
