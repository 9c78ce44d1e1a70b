"""Readers of calls that no engine can run now."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from parrot.protocol.errors import NoEngine, SessionGone
from parrot.protocol.public import FirstVarsRequest
from parrot.serve.graph.nodes import CompletionState
from tests.support.held_world import HeldWorld

GRACE_S = 10.0


@pytest.fixture
async def world() -> AsyncIterator[HeldWorld]:
    world = await HeldWorld.open(tasks_capacity=0, no_engine_timeout=GRACE_S)
    yield world
    await world.close()


def state(world: HeldWorld, var_id: str) -> CompletionState:
    session = world.core.sessions.find(world.scope["session_id"])
    assert session is not None
    producer = session.graph.variable(var_id).producer
    assert producer is not None
    return producer.state


async def test_readers_of_all_consumers_are_rejected_and_the_value_may_still_come(
    world: HeldWorld,
) -> None:
    first = world.call("first")
    last = world.call("last", first)
    readings = [world.read(first), world.read(last)]
    await world.clock.advance(GRACE_S - 1)
    assert not any(reading.done() for reading in readings)
    await world.clock.advance(1)
    for reading in readings:
        with pytest.raises(NoEngine):
            await reading
    assert state(world, first) is CompletionState.IDLE
    reading = world.read(last)
    await world.join()
    await world.settle()
    await world.finish("first")
    await world.finish("last")
    assert await reading


async def test_a_call_without_a_reader_becomes_idle_and_its_session_expires(
    world: HeldWorld,
) -> None:
    """Otherwise a session would live as long as its engine is absent."""
    var_id = world.call("out", output_criteria="latency")
    assert state(world, var_id) is CompletionState.QUEUED
    await world.clock.advance(GRACE_S)
    assert state(world, var_id) is CompletionState.IDLE
    assert world.core.num_queued == 0
    await world.clock.advance(60)
    with pytest.raises(SessionGone, match="expired"):
        world.variable()


async def test_a_race_continues_while_enough_candidates_can_run(world: HeldWorld) -> None:
    absent = [world.call(name, models=["elsewhere"]) for name in ("a", "b")]
    await world.join()
    here = world.call("here")
    race, pair = (
        asyncio.ensure_future(
            world.core.first(
                FirstVarsRequest.model_validate(world.scope | {"var_ids": [*absent, here], "k": k})
            )
        )
        for k in (1, 2)
    )
    await world.settle()
    await world.clock.advance(GRACE_S)
    with pytest.raises(NoEngine):
        await pair
    assert not race.done()
    await world.finish("here")
    assert [value.var_id for value in (await race).values] == [here]


async def test_a_stream_is_rejected_after_its_first_text(world: HeldWorld) -> None:
    var_id = world.call("out")
    stream = world.core.stream(world.request(), var_id)
    reading = asyncio.ensure_future(anext(stream))
    await world.clock.advance(GRACE_S)
    with pytest.raises(NoEngine):
        await reading
    await stream.aclose()
