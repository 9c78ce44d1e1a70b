"""The last ten minutes of the service, with a real dispatcher on virtual time."""

import asyncio

import pytest

from parrot.gateway.page.series import RecentSeries
from parrot.gateway.page.visitors import Visitor
from tests.serve.execution.test_result_cache import World
from tests.support.fake_engine import Script

OPERATOR = Visitor(tenant=None, sees_values=False)


async def test_a_step_counts_finished_calls_and_those_running_at_its_end() -> None:
    world = World(tasks=1)
    engine = await world.join()
    series = RecentSeries(world.core, epoch=1000.0)
    recording = asyncio.create_task(series.run())
    program = world.program()
    assert series.rows(OPERATOR) == {}
    for question in ("one", "two"):
        read = program.read(program.call(question, reuse=False))
        await world.settle()
        await read
    calls = program.infos()
    engine.script = Script(hang_after=0)
    reads = [program.read(program.call(f"later {n}")) for n in range(3)]
    await world.settle()
    await world.clock.advance(10.0)
    (step,) = series.rows(OPERATOR).values()
    tokens = sum(call.output_tokens for call in calls)
    prompt = sum(call.cached_tokens + call.computed_tokens for call in calls)
    assert tokens > 0
    assert step["tokens_s"] == pytest.approx(tokens / 10)
    assert step["cached"] == pytest.approx(
        sum(call.cached_tokens for call in calls) / prompt, abs=1e-3
    )
    assert (step["running"], step["queued"]) == (1, 2)
    assert step["at"] == pytest.approx(1000.0 + world.clock.now())
    assert step["engines"] == {"e0": {"tokens_s": step["tokens_s"], "step_ms": None}}
    await world.clock.advance(10.0)
    first, second = series.rows(OPERATOR).values()
    assert first == step
    assert (second["tokens_s"], second["cached"], second["first_token_s"]) == (0.0, None, None)
    engine.resume.set()
    await world.clock.advance(1.0)
    await asyncio.gather(*reads)
    recording.cancel()
    await asyncio.wait([recording])
    await world.core.close()


async def test_60_steps_are_kept() -> None:
    world = World()
    series = RecentSeries(world.core, epoch=0.0)
    for _ in range(75):
        series.record()
    assert list(series.rows(OPERATOR)) == [f"step:{n}" for n in range(16, 76)]
    await world.core.close()


async def test_tenants_see_no_load_of_the_service() -> None:
    world = World()
    series = RecentSeries(world.core, epoch=0.0)
    series.record()
    assert len(series.rows(OPERATOR)) == 1
    assert series.rows(Visitor("somebody", sees_values=True)) == {}
    await world.core.close()


@pytest.mark.parametrize(
    ("counts", "median"),
    [
        ({}, None),
        ({8: 4}, 0.175),  # between 0.1 and 0.25 seconds
        ({0: 1, 8: 3}, 0.15),
        ({22: 9}, 2560.0),  # above all bounds
    ],
)
async def test_the_median_time_to_the_first_token(
    counts: dict[int, int], median: float | None
) -> None:
    world = World()
    await world.join()
    series = RecentSeries(world.core, epoch=0.0)
    metrics = world.core._metrics
    times = [0.0005, 0.003, *[0.0] * 6, 0.2, *[0.0] * 13, 3000.0]
    engine = metrics._engine(("e0", "m"))
    for place, count in counts.items():
        engine.observe("time_to_first_token_seconds", [times[place]] * count)
    series.record()
    (step,) = series.rows(OPERATOR).values()
    assert step["first_token_s"] == (None if median is None else pytest.approx(median))
    await world.core.close()
