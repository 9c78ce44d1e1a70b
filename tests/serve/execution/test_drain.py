"""Engines that are taken out of service: calls go on there, and others go elsewhere."""

import asyncio

import pytest

from parrot.protocol.engine_api import HeartbeatRequest, RuntimeInfo
from parrot.protocol.errors import NoEngine, NotFound
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from tests.serve.execution.test_dispatcher import World
from tests.support.fake_engine import Script, fake_engine


async def test_an_engine_that_drains_ends_its_calls_and_gets_no_more(world: World) -> None:
    slow = fake_engine("slow", script=Script(text=lambda _: "abc", hang_after=0))
    slow_id = await world.join(slow)
    before = world.submit("One")
    await world.settle()
    other = fake_engine("other")
    await world.join(other)
    world.dispatcher.drains.drain(slow_id, is_wanted=True)
    world.dispatcher.drains.drain(slow_id, is_wanted=True)  # again: nothing
    after = [world.submit(f"Two {n}") for n in range(3)]
    await asyncio.gather(*(completion.output.wait() for completion in after))
    assert (len(slow.requests), len(other.requests)) == (1, 3)
    assert [v.is_draining for v in world.dispatcher.fleet.views()] == [True, False]
    world.dispatcher.check_integrity()
    slow.resume.set()
    assert await before.output.wait() == "abc"
    world.dispatcher.check_integrity()

    world.dispatcher.drains.drain(slow_id, is_wanted=False)
    world.dispatcher.drains.drain(1, is_wanted=True)
    slow.script = Script()
    await world.submit("Three").output.wait()
    assert len(slow.requests) == 2
    kinds = [(event.kind.value, event.engine_name) for event in world.dispatcher.fleet.events]
    assert kinds == [
        ("engine joined", "slow"),
        ("engine joined", "other"),
        ("engine drains", "slow"),
        ("engine resumed", "slow"),
        ("engine drains", "other"),
    ]
    world.lose(1)
    world.dispatcher.check_integrity()


async def test_calls_wait_for_the_only_engine_that_drains_but_not_for_ever(world: World) -> None:
    engine = fake_engine(tasks_capacity=1)
    engine_id = await world.join(engine)
    world.dispatcher.drains.drain(engine_id, is_wanted=True)
    waits = world.submit("Go")
    await world.settle()
    assert engine.requests == []
    world.dispatcher.drains.drain(engine_id, is_wanted=False)
    assert await waits.output.wait()

    engine.script = Script(hang_after=0)
    runs, queued = world.submit("One"), world.submit("Two")
    await world.settle()
    world.dispatcher.drains.drain(engine_id, is_wanted=True)
    runtime = RuntimeInfo()
    beat = HeartbeatRequest(engine_id=engine_id, engine_name="fake", runtime_info=runtime)
    for _ in range(4):
        world.dispatcher.fleet.heartbeat(beat)
        await world.clock.advance(8.0)
    with pytest.raises(NoEngine):
        await queued.output.wait()
    world.dispatcher.check_integrity()
    engine.resume.set()
    assert await runs.output.wait()
    with pytest.raises(NotFound, match="no live engine 7"):
        world.dispatcher.drains.drain(7, is_wanted=True)


async def test_an_engine_that_drains_gets_no_call_for_what_it_has() -> None:
    few = World()
    many = few.dispatcher = Dispatcher(CoreConfig(), few.clock, few.connect)
    engines = [fake_engine(f"e{n}") for n in range(7)]
    ids = [await few.join(engine) for engine in engines]
    first = few.submit("A beginning that is worth something. " * 20)
    await first.output.wait()
    holder = next(n for n, engine in enumerate(engines) if engine.requests)
    many.drains.drain(ids[holder], is_wanted=True)
    await few.submit("?", previous=first).output.wait()
    assert len(engines[holder].requests) == 1
    await many.close()
