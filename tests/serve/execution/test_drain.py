"""Draining and leaving engines: running calls finish there, and new calls go elsewhere."""

import asyncio

import pytest

from parrot.gateway.page.rows import EventLog
from parrot.protocol.engine_api import LeaveRequest
from parrot.protocol.errors import NoEngine, NotFound
from parrot.serve.config import CoreConfig
from parrot.serve.execution.dispatcher import Dispatcher
from tests.serve.execution.world import World
from tests.support.fake_engine import Script, fake_engine


async def test_a_draining_engine_finishes_its_calls_and_gets_no_new_ones(world: World) -> None:
    log = EventLog(world.clock)
    world.dispatcher.events.add(log.sink)
    slow = fake_engine("slow", script=Script(text=lambda _: "abc", hang_after=0))
    slow_id = await world.join(slow)
    before = world.submit("One")
    await world.settle()
    other = fake_engine("other")
    await world.join(other)
    world.dispatcher.drains.drain(slow_id, is_draining=True)
    world.dispatcher.drains.drain(slow_id, is_draining=True)  # No effect.
    after = [world.submit(f"Two {n}") for n in range(3)]
    await asyncio.gather(*(completion.output.wait() for completion in after))
    assert (len(slow.requests), len(other.requests)) == (1, 3)
    assert [v.is_draining for v in world.dispatcher.fleet.views()] == [True, False]
    world.dispatcher.check_integrity()
    slow.resume.set()
    assert await before.output.wait() == "abc"
    world.dispatcher.check_integrity()

    world.dispatcher.drains.drain(slow_id, is_draining=False)
    world.dispatcher.drains.drain(1, is_draining=True)
    slow.script = Script()
    await world.submit("Three").output.wait()
    assert len(slow.requests) == 2
    kinds = [(event.kind, event.engine_name) for event in log]
    assert kinds == [
        ("engine joined", "slow"),
        ("engine joined", "other"),
        ("engine drains", "slow"),
        ("engine resumed", "slow"),
        ("engine drains", "other"),
    ]
    world.lose(1)
    world.dispatcher.check_integrity()


async def test_calls_wait_for_the_only_engine_that_drains_until_their_grace_ends(
    world: World,
) -> None:
    engine = fake_engine(tasks_capacity=1)
    engine_id = await world.join(engine)
    world.dispatcher.drains.drain(engine_id, is_draining=True)
    waits = world.submit("Go")
    await world.settle()
    assert engine.requests == []
    world.dispatcher.drains.drain(engine_id, is_draining=False)
    assert await waits.output.wait()

    engine.script = Script(hang_after=0)
    runs, queued = world.submit("One"), world.submit("Two")
    await world.settle()
    (view,) = world.dispatcher.fleet.views()
    assert (view.num_running, view.num_queued) == (1, 1)
    assert 0 < view.needed_tokens <= view.info.tokens_capacity
    world.dispatcher.drains.drain(engine_id, is_draining=True)
    reading = asyncio.ensure_future(queued.output.wait())
    for _ in range(4):
        world.heartbeat(engine_id)
        await world.clock.advance(8.0)
    with pytest.raises(NoEngine):
        await reading
    world.dispatcher.check_integrity()
    engine.resume.set()
    assert await runs.output.wait()
    with pytest.raises(NotFound, match="no live engine 7"):
        world.dispatcher.drains.drain(7, is_draining=True)


async def test_a_draining_engine_gets_no_call_for_its_cached_prefix() -> None:
    few = World()
    many = few.dispatcher = Dispatcher(CoreConfig(), few.clock, few.connect)
    engines = [fake_engine(f"e{n}") for n in range(7)]
    ids = [await few.join(engine) for engine in engines]
    first = few.submit("A beginning that is worth something. " * 20)
    await first.output.wait()
    holder = next(n for n, engine in enumerate(engines) if engine.requests)
    many.drains.drain(ids[holder], is_draining=True)
    await few.submit("?", previous=first).output.wait()
    assert len(engines[holder].requests) == 1
    await many.close()


async def leaving(world: World, engine_id: int, timeout_s: float = 60.0) -> "asyncio.Task[int]":
    """Returns a task with the number of unfinished calls."""
    core = world.dispatcher.fleet.identity.id
    request = LeaveRequest(engine_id=engine_id, core=core, timeout_s=timeout_s)

    async def leave() -> int:
        return (await world.dispatcher.drains.leave(request)).num_calls

    task = asyncio.create_task(leave())
    await world.settle()
    return task


async def test_a_leaving_engine_finishes_its_calls_first(world: World) -> None:
    slow = fake_engine("slow", script=Script(text=lambda _: "abc", hang_after=0))
    slow_id = await world.join(slow)
    before = [world.submit(f"One {n}") for n in range(2)]
    await world.settle()
    other = fake_engine("other")
    await world.join(other)
    left, again = await leaving(world, slow_id), await leaving(world, slow_id)
    await world.submit("Two").output.wait()
    assert (len(slow.requests), len(other.requests)) == (2, 1)
    assert not left.done()
    slow.resume.set()
    assert [await left, await again] == [0, 0]
    assert [await completion.output.wait() for completion in before] == ["abc", "abc"]
    assert [view.id for view in world.dispatcher.fleet.views()] == [slow_id + 1]
    assert len(other.requests) == 1
    world.dispatcher.check_integrity()


async def test_calls_that_a_leaving_engine_does_not_finish_in_time_run_elsewhere(
    world: World,
) -> None:
    slow = fake_engine("slow", script=Script(hang_after=0))
    slow_id = await world.join(slow)
    call = world.submit("One")
    await world.settle()
    await world.join(fake_engine("other"))
    left = await leaving(world, slow_id, timeout_s=5.0)
    await world.clock.advance(4.9)
    assert not left.done()
    await world.clock.advance(0.2)
    assert await left == 1
    assert await call.output.wait()
    world.dispatcher.check_integrity()


async def test_a_call_is_not_blamed_for_engines_that_leave(world: World) -> None:
    """All engines restart one after the other while a long call runs."""
    engine_id = await world.join(fake_engine("0", script=Script(hang_after=0)))
    call = world.submit("One")
    await world.settle()
    for number in range(1, 5):
        script = Script() if number == 4 else Script(hang_after=0)
        following = await world.join(fake_engine(str(number), script=script))
        left = await leaving(world, engine_id, timeout_s=5.0)
        await world.clock.advance(5.1)
        assert await left == 1
        engine_id = following
    assert await call.output.wait()
    world.dispatcher.check_integrity()


async def test_idle_and_lost_engines_leave_at_once(
    world: World,
) -> None:
    idle_id = await world.join(fake_engine("idle"))
    assert await (await leaving(world, idle_id)) == 0
    slow_id = await world.join(fake_engine("slow", script=Script(hang_after=0)))
    world.submit("One")
    await world.settle()
    left = await leaving(world, slow_id)
    world.lose(slow_id)
    assert await left == 0
    with pytest.raises(NotFound, match=f"no live engine {slow_id}"):
        await (await leaving(world, slow_id))
    stale = LeaveRequest(engine_id=slow_id, core="another", timeout_s=1.0)
    with pytest.raises(NotFound):
        await world.dispatcher.drains.leave(stale)
    world.dispatcher.check_integrity()
