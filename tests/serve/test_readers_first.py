"""The first k of some variables: who wins, what becomes of the losers, and how it can fail."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from parrot.protocol.errors import Cancelled, EngineFailed, NotFound, QueueFull, TimedOut
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import FirstVarsRequest, SemanticCallRequest, SessionCreateRequest
from parrot.serve.config import CoreConfig, GlobalSchedulerConfig
from parrot.serve.core import ServeCore
from parrot.serve.graph.nodes import Task
from parrot.serve.readers import READ_GRACE_S, WAKE_DELAY_S
from tests.serve.serve_fakes import FakeDispatcher, made, taken, var_ids
from tests.support.manual_clock import ManualClock


class World:
    def __init__(self, **scheduler: Any) -> None:
        self.clock = ManualClock(start=1000)
        self.dispatcher = FakeDispatcher()
        config = CoreConfig(global_scheduler=GlobalSchedulerConfig(**scheduler))
        self.core = ServeCore(
            config,
            clock=self.clock,
            dispatcher=self.dispatcher,  # type: ignore[arg-type]
        )
        self.scope: dict[str, Any] = self.core.create_session(SessionCreateRequest()).model_dump()

    def call(self, *inputs: str, on_demand: bool = False) -> str:
        parameters = [taken(f"i{n}", var_id) for n, var_id in enumerate(inputs)]
        template = "t" + "".join(f"{{{{{p['name']}}}}}" for p in parameters) + "{{o}}"
        body = self.scope | {"template": template, "parameters": [*parameters, made("o")]}
        body["on_demand"] = on_demand
        return var_ids(self.core.submit_call(SemanticCallRequest.model_validate(body)))["o"]

    def first(self, ids: Sequence[str], k: int, **options: Any) -> asyncio.Task[list[str]]:
        request = FirstVarsRequest(**self.scope, var_ids=list(ids), k=k, **options)

        async def read() -> list[str]:
            return [value.var_id for value in (await self.core.first(request)).values]

        return asyncio.ensure_future(read())

    def task(self, var_id: str) -> Task:
        return next(t for t in self.dispatcher.started if t.outputs[0].id == var_id)

    async def finish(self, var_id: str) -> None:
        self.dispatcher.finish(self.task(var_id))
        await self.clock.advance(0)

    async def fail(self, var_id: str) -> None:
        self.dispatcher.fail(self.task(var_id), EngineFailed("broken"))
        await self.clock.advance(0)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    yield world
    world.core.check_integrity()
    await world.core.close()


async def test_the_first_win_in_order_and_the_losers_stop_in_the_same_turn(world: World) -> None:
    ids = [world.call() for _ in range(5)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    assert len(world.dispatcher.started) == 5
    await world.finish(ids[3])
    assert len(world.dispatcher.started) == 4
    world.dispatcher.finish(world.task(ids[1]))
    assert world.dispatcher.started == []  # before anybody else had a turn
    assert len(world.dispatcher.withdrawn) == 3
    assert await reading == [ids[3], ids[1]]


async def test_losers_that_somebody_else_wants_go_on(world: World) -> None:
    ids = [world.call() for _ in range(3)]
    after = world.call(ids[0])
    other = world.first([after], 1)
    reading = world.first(ids, 1, criteria="throughput")
    await world.clock.advance(0)
    await world.finish(ids[2])
    assert await reading == [ids[2]]
    assert [task.outputs[0].id for task in world.dispatcher.started] == [ids[0]]
    await world.finish(ids[0])
    await world.finish(after)
    assert await other == [after]


async def test_what_is_ready_wins_without_work(world: World) -> None:
    ids = [world.call() for _ in range(3)]
    for k, var_id in enumerate([ids[2], ids[0]]):
        reading = world.first([var_id], 1)
        await world.clock.advance(1 + k)
        await world.finish(var_id)
        await reading
    assert await world.first(ids, 2) == [ids[2], ids[0]]
    assert [task.outputs[0].id for task in world.dispatcher.withdrawn] == [ids[1]]
    given = world.core.create_var(*world.scope.values(), "given", "text")
    assert await world.first([*ids, given], 1) == [given]


async def test_failures_count_only_when_too_few_are_left(world: World) -> None:
    ids = [world.call() for _ in range(4)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    await world.fail(ids[0])
    await world.finish(ids[1])
    await world.fail(ids[2])
    assert not reading.done()
    await world.finish(ids[3])
    assert await reading == [ids[1], ids[3]]

    more = [world.call() for _ in range(3)]
    reading = world.first([ids[0], *more], 3)
    await world.clock.advance(0)
    await world.fail(more[1])
    with pytest.raises(EngineFailed, match="only 2 of the 3"):
        await reading
    assert world.dispatcher.started == []


async def test_losers_are_not_made_in_the_background_and_neither_is_what_needs_them(
    world: World,
) -> None:
    drafts = [world.call() for _ in range(3)]
    ratings = [world.call(draft) for draft in drafts]
    free = world.call()
    reading = world.first(drafts, 1)
    await world.clock.advance(WAKE_DELAY_S)
    await world.finish(drafts[1])
    assert await reading == [drafts[1]]
    started = {task.outputs[0].id for task in world.dispatcher.started}
    assert started == {ratings[1], free}
    await world.finish(ratings[1])
    later = [world.call(), world.call()]  # they run soon: the session was read
    await world.clock.advance(WAKE_DELAY_S)
    await world.finish(later[0])
    assert await world.first(later, 1) == [later[0]]  # decided without waiting
    assert [task.outputs[0].id for task in world.dispatcher.started] == [free]


async def test_a_race_that_is_won_at_once_leaves_no_loser_behind(world: World) -> None:
    world.dispatcher.on_start = world.dispatcher.finish  # as with results that are known
    ids = [world.call() for _ in range(3)]
    assert await world.first(ids, 1) == [ids[0]]
    assert world.dispatcher.started == []


async def test_a_cancelled_candidate_counts_as_failed(world: World) -> None:
    ids = [world.call() for _ in range(2)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    world.core.cancel_var(*world.scope.values(), ids[0])
    with pytest.raises(Cancelled):
        await reading
    assert world.dispatcher.started == []


async def test_a_read_that_goes_away_takes_its_work_along(world: World) -> None:
    ids = [world.call() for _ in range(3)]
    reading = world.first(ids, 1)
    await world.clock.advance(0)
    reading.cancel()
    await world.clock.advance(0)
    assert world.dispatcher.started == []
    assert reading.cancelled()


async def test_a_timeout_leaves_the_work_its_grace(world: World) -> None:
    ids = [world.call() for _ in range(3)]
    reading = world.first(ids, 1, timeout=5.0)
    await world.clock.advance(5.0)
    with pytest.raises(TimedOut):
        await reading
    assert len(world.dispatcher.started) == 3
    await world.clock.advance(READ_GRACE_S)
    assert world.dispatcher.started == []
    variables = [world.core.sessions.find(0).graph.variable(i) for i in ids]  # type: ignore[union-attr]
    assert all(len(variable._settled_callbacks) == 1 for variable in variables)  # the graph's


async def test_candidates_are_read_with_the_criteria_and_deadline(world: World) -> None:
    var_id = world.call()
    reading = world.first([var_id], 1, criteria="TTFT", timeout=9.0, deadline=4.0)
    await world.clock.advance(0)
    objective = world.task(var_id).objective
    assert objective is not None
    assert (objective.criteria, objective.deadline) == (PerformanceCriteria.TTFT, 1004.0)
    await world.clock.advance(4.5)
    assert not reading.done()
    await world.finish(var_id)
    assert await reading == [var_id]


async def test_unknown_variables_and_a_full_queue() -> None:
    world = World(max_queue_size=2)
    ids = [world.call() for _ in range(2)]
    with pytest.raises(NotFound):
        await world.first([ids[0], "nowhere"], 1)
    late = world.core.create_var(*world.scope.values(), "late", None)
    first = world.first(ids, 2)
    await world.clock.advance(0)
    assert len(world.dispatcher.started) == 2
    nobody_makes_it = world.first([late], 1)
    await world.clock.advance(0)
    world.core.set_var(*world.scope.values(), late, "now")
    assert await nobody_makes_it == [late]
    await world.finish(ids[0])
    idle = world.call(on_demand=True)
    await world.finish(ids[1])
    assert await first == ids
    busy = [world.first([var_id], 1) for var_id in [world.call(), world.call()]]
    await world.clock.advance(0)
    with pytest.raises(QueueFull):
        await world.first([idle, *ids], 3)
    assert await world.first([idle, *ids], 2) == ids
    await world.core.close()
    await asyncio.gather(*busy, return_exceptions=True)
