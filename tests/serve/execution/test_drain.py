"""Engines that are taken out of service: calls go on there, and others go elsewhere."""

import asyncio

import pytest

from parrot.protocol.errors import NoEngine, NotFound
from tests.serve.execution.test_dispatcher import World, world  # noqa: F401 - a fixture
from tests.support.fake_engine import Script, fake_engine


async def test_an_engine_that_drains_ends_its_calls_and_gets_no_more(world: World) -> None:  # noqa: F811
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


async def test_calls_wait_for_the_only_engine_that_drains_but_not_for_ever(world: World) -> None:  # noqa: F811
    engine = fake_engine()
    engine_id = await world.join(engine)
    world.dispatcher.drains.drain(engine_id, is_wanted=True)
    waits = world.submit("Go")
    await world.settle()
    assert engine.requests == []
    world.dispatcher.drains.drain(engine_id, is_wanted=False)
    assert await waits.output.wait()
    world.dispatcher.drains.drain(engine_id, is_wanted=True)
    given_up = world.submit("Go on")
    await world.clock.advance(31.0)
    with pytest.raises(NoEngine):
        await given_up.output.wait()
    world.dispatcher.check_integrity()
    with pytest.raises(NotFound, match="no live engine 7"):
        world.dispatcher.drains.drain(7, is_wanted=True)
