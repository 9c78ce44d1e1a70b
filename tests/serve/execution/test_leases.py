"""When an engine that is shared is asked for the next heartbeat at once."""

import asyncio

import pytest

from parrot.protocol.engine_api import HeartbeatRequest, Lease, LeaseUse, RuntimeInfo
from parrot.protocol.errors import Unavailable
from tests.serve.execution.test_dispatcher import World
from tests.support.fake_engine import FakeEngine, Script, fake_engine

LOOK_S = 0.01  # more than until the next look


class SharedEngine(FakeEngine):
    """One of which the ServeCore has a part. Its calls end when it is told to `resume`."""

    num_asked = 0
    number = 0
    error: Unavailable | None = None

    async def beat(self) -> None:
        self.num_asked += 1
        if self.error is not None:
            raise self.error


@pytest.fixture
async def engine(world: World) -> SharedEngine:
    made = fake_engine("shared", script=Script(hang_after=0))
    info = made.info.model_copy(update={"is_leased": True})
    engine = SharedEngine(info, made.tokenizer_response, made.script)
    assert await world.join(engine) == 0
    return engine


async def lease(
    world: World, engine: SharedEngine, calls: int, tokens: int = 10_000, *, is_wanted: bool = False
) -> LeaseUse:
    engine.number += 1
    given = Lease(number=engine.number, tokens=tokens, calls=calls, is_wanted=is_wanted)
    request = HeartbeatRequest(
        engine_id=0, engine_name="shared", runtime_info=RuntimeInfo(), lease=given
    )
    use = world.dispatcher.fleet.heartbeat(request).lease_use
    assert use is not None
    await passed(world)
    return use


async def passed(world: World) -> None:
    await world.settle()
    await world.clock.advance(LOOK_S)
    await world.settle()


async def end_all(world: World, engine: SharedEngine) -> None:
    engine.script = Script()
    engine.resume.set()
    await passed(world)


async def test_it_is_asked_once_when_more_is_wanted_than_there_is(
    world: World, engine: SharedEngine
) -> None:
    await lease(world, engine, 2)
    world.submit("a")
    world.submit("b")
    await passed(world)
    assert engine.num_asked == 0
    world.submit("c")
    await passed(world)
    assert engine.num_asked == 1
    world.submit("d")
    await passed(world)
    assert engine.num_asked == 1, "no heartbeat has come since"
    assert (await lease(world, engine, 3)).wanted_calls == 4
    assert engine.num_asked == 1, "it has just been told"
    assert (await lease(world, engine, 4)).wanted_calls == 4
    world.submit("e" * 5000)
    await passed(world)
    assert engine.num_asked == 2
    assert len(engine.requests) == 4


async def test_it_is_asked_when_less_is_used_if_others_wait_for_that(
    world: World, engine: SharedEngine
) -> None:
    await lease(world, engine, 4)
    for text in "abc":
        world.submit(text)
    await passed(world)
    assert (await lease(world, engine, 2, is_wanted=True)).calls == 3
    assert engine.num_asked == 0
    await end_all(world, engine)
    assert engine.num_asked == 1
    use = await lease(world, engine, 2, is_wanted=True)
    assert (use.calls, use.wanted_calls) == (2, 0)
    assert engine.num_asked == 1


async def test_what_nobody_waits_for_is_told_by_the_next_heartbeat(
    world: World, engine: SharedEngine
) -> None:
    await lease(world, engine, 4)
    world.submit("a")
    await passed(world)
    await lease(world, engine, 2)
    await end_all(world, engine)
    assert engine.num_asked == 0


async def test_kept_contexts_make_room_when_their_call_has_ended(
    world: World, engine: SharedEngine
) -> None:
    await lease(world, engine, 4)
    world.submit("a" * 3000)
    await passed(world)
    assert (await lease(world, engine, 4, tokens=100, is_wanted=True)).tokens > 3000
    await end_all(world, engine)
    assert engine.num_asked == 1
    assert engine.freed
    assert (await lease(world, engine, 4, tokens=100, is_wanted=True)).tokens == 100


async def test_an_engine_that_does_not_answer_sends_its_heartbeats_in_their_time(
    world: World, engine: SharedEngine
) -> None:
    engine.error = Unavailable("nobody there")
    await lease(world, engine, 1)
    world.submit("a")
    world.submit("b")
    await passed(world)
    await asyncio.sleep(0)
    assert engine.num_asked == 1
    await lease(world, engine, 2)
    world.submit("c")
    await passed(world)
    assert engine.num_asked == 2


async def test_of_an_engine_that_is_lost_nothing_is_asked(
    world: World, engine: SharedEngine
) -> None:
    await lease(world, engine, 1)
    world.lose(0)
    world.submit("a")
    world.submit("b")
    await passed(world)
    assert engine.num_asked == 0
