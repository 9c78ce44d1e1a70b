"""Reads of the first k of several variables: the winners, the losers, and failures."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from parrot.protocol.errors import Cancelled, EngineFailed, NotFound, QueueFull, TimedOut
from parrot.protocol.fields import PerformanceCriteria
from parrot.protocol.public import FirstVarsRequest, SemanticCallRequest
from parrot.serve.readers import READ_GRACE_S, WAKE_DELAY_S
from tests.support.held_world import HeldWorld
from tests.support.requests import made, var_ids


class World(HeldWorld):
    """A world with calls `f0`, `f1` and so on, which are named by the ids of their outputs."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.names: dict[str, str] = {}

    def submit(self, *inputs: str, on_demand: bool = False) -> str:
        name = f"f{len(self.names)}"
        var_id = self.call(name, *inputs, on_demand=on_demand)
        self.names[var_id] = name
        return var_id

    def first(self, ids: Sequence[str], k: int, **options: Any) -> asyncio.Task[list[str]]:
        request = FirstVarsRequest(**self.scope, var_ids=list(ids), k=k, **options)

        async def read() -> list[str]:
            return [value.var_id for value in (await self.core.first(request)).values]

        return asyncio.ensure_future(read())

    @property
    def started(self) -> list[str]:
        """Return the outputs of the calls on the engine."""
        ids = {name: var_id for var_id, name in self.names.items()}
        return [ids[name] for name in self.running]

    async def made(self, var_id: str) -> None:
        await self.finish(self.names[var_id])

    async def broke(self, var_id: str) -> None:
        await self.fail(self.names[var_id])


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = await World.open()
    yield world
    await world.close()


async def test_the_first_win_in_order_and_the_losers_stop_in_the_same_turn(world: World) -> None:
    ids = [world.submit() for _ in range(5)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    assert len(world.started) == 5
    await world.made(ids[3])
    assert len(world.started) == 4
    await world.made(ids[1])
    assert world.started == []
    assert len(world.engine.aborted_names) == 3
    assert await reading == [ids[3], ids[1]]


async def test_losers_with_another_reader_continue(world: World) -> None:
    ids = [world.submit() for _ in range(3)]
    after = world.submit(ids[0])
    other = world.first([after], 1)
    reading = world.first(ids, 1, criteria="throughput")
    await world.clock.advance(0)
    await world.made(ids[2])
    assert await reading == [ids[2]]
    assert world.started == [ids[0]]
    await world.made(ids[0])
    await world.made(after)
    assert await other == [after]


async def test_ready_variables_win_without_work(world: World) -> None:
    ids = [world.submit() for _ in range(3)]
    for k, var_id in enumerate([ids[2], ids[0]]):
        reading = world.first([var_id], 1)
        await world.clock.advance(1 + k)
        await world.made(var_id)
        await reading
    assert await world.first(ids, 2) == [ids[2], ids[0]]
    assert world.engine.aborted_names == [world.names[ids[1]]]
    given = world.core.create_var(*world.scope.values(), "given", "text")
    assert await world.first([*ids, given], 1) == [given]


async def test_failures_count_only_when_too_few_are_left(world: World) -> None:
    ids = [world.submit() for _ in range(4)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    await world.broke(ids[0])
    await world.made(ids[1])
    await world.broke(ids[2])
    assert not reading.done()
    await world.made(ids[3])
    assert await reading == [ids[1], ids[3]]

    more = [world.submit() for _ in range(3)]
    reading = world.first([ids[0], *more], 3)
    await world.clock.advance(0)
    await world.broke(more[1])
    with pytest.raises(EngineFailed, match="only 2 of the 3"):
        await reading
    assert world.started == []


async def test_losers_and_their_dependents_do_not_run_in_the_background(
    world: World,
) -> None:
    drafts = [world.submit() for _ in range(3)]
    ratings = [world.submit(draft) for draft in drafts]
    free = world.submit()
    reading = world.first(drafts, 1)
    await world.clock.advance(WAKE_DELAY_S)
    await world.made(drafts[1])
    assert await reading == [drafts[1]]
    started = set(world.started)
    assert started == {ratings[1], free}
    await world.made(ratings[1])
    later = [world.submit(), world.submit()]  # start soon, because the session had a reader
    await world.clock.advance(WAKE_DELAY_S)
    await world.made(later[0])
    assert await world.first(later, 1) == [later[0]]  # decided without waiting
    assert world.started == [free]


async def test_a_race_of_a_blocked_program_starts_its_other_calls_after_the_candidates(
    world: World,
) -> None:
    other = world.submit()
    drafts = [world.submit() for _ in range(2)]
    reading = world.first(drafts, 1, blocked=True)
    await world.clock.advance(0)
    assert world.started == [*drafts, other]
    await world.made(drafts[0])
    await reading
    await world.made(other)


async def test_a_race_that_is_won_at_once_stops_all_losers() -> None:
    world = await World.open(global_scheduler={"reuse_results": True})
    same = {"template": "same {{o}}", "parameters": [made("o", temperature=0)]}
    known = SemanticCallRequest.model_validate(world.scope | same)
    first = var_ids(world.core.submit_call(known))["o"]
    reading = world.read(first)
    await world.settle()
    world.engine.held[0].name = "known"
    await world.finish("known")
    await reading
    ids = [var_ids(world.core.submit_call(known))["o"], world.submit(), world.submit()]
    assert await world.first(ids, 1) == [ids[0]]
    assert world.started == []
    await world.close()


async def test_a_cancelled_candidate_counts_as_failed(world: World) -> None:
    ids = [world.submit() for _ in range(2)]
    reading = world.first(ids, 2)
    await world.clock.advance(0)
    world.core.cancel_var(*world.scope.values(), ids[0])
    with pytest.raises(Cancelled):
        await reading
    assert world.started == []


async def test_a_cancelled_read_cancels_its_work(world: World) -> None:
    ids = [world.submit() for _ in range(3)]
    reading = world.first(ids, 1)
    await world.clock.advance(0)
    reading.cancel()
    await world.clock.advance(0)
    assert world.started == []
    assert reading.cancelled()


async def test_after_a_timeout_the_work_has_a_grace_period(world: World) -> None:
    ids = [world.submit() for _ in range(3)]
    reading = world.first(ids, 1, timeout=5.0)
    await world.clock.advance(5.0)
    with pytest.raises(TimedOut):
        await reading
    assert len(world.started) == 3
    await world.clock.advance(READ_GRACE_S)
    assert world.started == []
    variables = [world.core.sessions.find(0).graph.variable(i) for i in ids]  # type: ignore[union-attr]
    assert all(len(variable._settled_callbacks) == 1 for variable in variables)  # the graph's


async def test_candidates_are_read_with_the_criteria_and_deadline() -> None:
    world = await World.open(tasks_capacity=1)
    busy, patient, urgent = [world.submit() for _ in range(3)]
    readings = [world.first([busy], 1)]
    await world.settle()
    readings += [
        world.first([patient], 1),
        world.first([urgent], 1, criteria="TTFT", timeout=9.0, deadline=1.5),
    ]
    await world.settle()
    (call,) = [
        c for c in world.core.session_info(*world.scope.values()).calls if urgent in c.outputs
    ]
    assert call.criteria == PerformanceCriteria.TTFT
    await world.made(busy)
    assert world.started == [urgent]
    await world.clock.advance(4.5)
    assert not readings[2].done()
    await world.made(urgent)
    assert await readings[2] == [urgent]
    await world.made(patient)
    await world.close()


async def test_unknown_variables_and_a_full_queue() -> None:
    world = await World.open(tasks_capacity=2, global_scheduler={"max_queue_size": 2})
    ids = [world.submit() for _ in range(2)]
    with pytest.raises(NotFound):
        await world.first([ids[0], "nowhere"], 1)
    late = world.core.create_var(*world.scope.values(), "late", None)
    first = world.first(ids, 2)
    await world.clock.advance(0)
    assert len(world.started) == 2
    nobody_makes_it = world.first([late], 1)
    await world.clock.advance(0)
    world.core.set_var(*world.scope.values(), late, "now")
    assert await nobody_makes_it == [late]
    await world.made(ids[0])
    idle = world.submit(on_demand=True)
    await world.made(ids[1])
    assert await first == ids
    others, busy = [world.submit() for _ in range(4)], []
    for pair in (others[:2], others[2:]):  # two run, and two are queued
        busy += [world.first([var_id], 1) for var_id in pair]
        await world.clock.advance(0)
    with pytest.raises(QueueFull):
        await world.first([idle, *ids], 3)
    assert await world.first([idle, *ids], 2) == ids
    await world.core.close()
    await asyncio.gather(*busy, return_exceptions=True)
