"""Background fills use the rest of each step and are evicted before all other KV."""

import asyncio

import pytest

from parrot.engine.config import SimConfig
from parrot.engine.core.jobs import BACKGROUND
from parrot.engine.core.scheduler import BackgroundPace
from parrot.engine.sim import SimService
from parrot.protocol.engine_api import FillRequest
from parrot.protocol.errors import OutOfMemory
from tests.support.core_harness import Harness, piece
from tests.support.manual_clock import ManualClock

STEP_S, TOKEN_S = 5e-3, 25e-6
LONG = "abcdefghijklmnopqrstuvwxyz" * 4


async def timed_step(engine: Harness) -> float:
    """Like `Harness.step`, but the step takes time. Returns the seconds of the step."""
    step = engine.core.plan()
    assert step is not None
    num_filled = sum(len(s.token_ids) for s in step.plan.sequences if len(s.token_ids) > 1)
    seconds = STEP_S + TOKEN_S * num_filled
    result = engine.core.run(step)
    await engine.clock.advance(seconds)
    engine.core.deliver(step, result)
    engine.deliver()
    engine.core.check_integrity()
    return seconds


def big(**config) -> Harness:
    return Harness(num_blocks=400, max_seq_len=1500, **config)


def test_a_background_fill_alone_runs_in_bounded_chunks():
    engine = big(scheduler={"background_chunk_size": 40})
    answer = engine.fill(piece(1, LONG), priority=BACKGROUND)
    engine.run()
    assert [plan.num_tokens for plan in engine.runner.plans] == [40, 40, 24]
    assert answer.response.filled_len == 104


@pytest.mark.parametrize(("asked", "limit"), [(0.02, 0.2), (0.1, 0.2), (0.2, 0.2), (1.0, 0.05)])
async def test_background_fills_lengthen_decode_steps_by_at_most_their_share(
    asked: float, limit: float
):
    engine = big(scheduler={"background_share": limit})
    engine.generate(piece(1, "a"), length=1000)
    await timed_step(engine)
    text = LONG * 10
    answer = engine.fill(piece(2, text), priority=BACKGROUND, background_share=asked)
    num_steps, seconds = 0, 0.0
    while not answer.has_ended:
        seconds += await timed_step(engine)
        num_steps += 1
    share = min(asked, limit)
    assert seconds <= (1 + share) * STEP_S * num_steps + 64 * TOKEN_S  # Later steps make up for it.
    # Most of the share is used.
    assert num_steps < 1.4 * len(text) * TOKEN_S / (share * STEP_S) + 5


def test_a_background_fill_never_runs_next_to_other_fills():
    engine = big(fill_chunk_size=20)
    late = engine.fill(piece(1, LONG), priority=BACKGROUND)
    ready = engine.fill(piece(2, "z" * 60), priority=5)
    while not ready.has_ended:
        engine.step()
        assert [s.context_id for s in engine.last_plan.sequences] == [2]
    engine.run()
    assert late.response.computed_tokens == len(LONG)


def test_a_background_fill_without_free_blocks_is_rejected_and_evicts_nothing():
    engine = Harness(num_blocks=8)
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    answer = engine.fill(piece(2, "z" * 24), priority=BACKGROUND)
    engine.run()
    assert isinstance(answer.error, OutOfMemory)
    assert engine.context(1).num_computed == 12


def test_background_fills_are_evicted_before_idle_contexts():
    engine = Harness(num_blocks=8, scheduler={"background_chunk_size": 4})
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    late = engine.fill(piece(2, "z" * 16), priority=BACKGROUND)
    engine.step()
    ready = engine.fill(piece(3, "bcdefghijklm"))
    engine.run()
    assert isinstance(late.error, OutOfMemory)
    assert ready.response.computed_tokens == 12
    assert engine.context(1).num_computed == 12


def test_the_context_of_a_rejected_background_fill_can_be_forked():
    engine = Harness(num_blocks=8, scheduler={"background_chunk_size": 4})
    engine.fill(piece(1, "abcdefghijkl"))
    engine.run()
    engine.fill(piece(2, "z" * 16 + "pq"), priority=BACKGROUND)
    engine.step()
    engine.fill(piece(3, "bcdefghijklm"))
    engine.run()
    answer = engine.generate(piece(4, "rs", parent=2, length=18), length=3)
    engine.run()
    assert answer.text == "tuv"


async def test_a_request_that_continues_a_background_fill_makes_it_a_normal_fill():
    engine = big()
    engine.generate(piece(1, "a"), length=100)
    await timed_step(engine)
    late = engine.fill(piece(2, LONG * 4), priority=BACKGROUND)
    await timed_step(engine)
    assert not late.has_ended
    fork = engine.generate(piece(3, "xy", parent=2, length=416), length=1)
    await timed_step(engine)
    assert late.response.computed_tokens == 416
    await timed_step(engine)
    assert fork.text == "z"


def step(pace: BackgroundPace, elapsed_s: float, num_tokens: int, share: float) -> None:
    pace.record_plan(num_tokens)
    pace.record_steps([elapsed_s], num_tokens, share)


def num_pauses(pace: BackgroundPace, share: float) -> int:
    count = 0
    while not pace.num_tokens(1):
        step(pace, 5e-3, 0, share)
        count += 1
    return count


def test_steps_are_launched_ahead_while_background_fills_pause():
    pace = BackgroundPace(512)
    assert pace.num_tokens(0) == 512
    assert pace.num_tokens(1) == 0  # No step time is known yet.
    step(pace, 5e-3, 0, 0.02)
    assert pace.num_tokens(1) == 32
    step(pace, 5.8e-3, 32, 0.02)
    assert 6 <= num_pauses(pace, 0.02) <= 8


def test_background_chunks_grow_while_they_cost_little():
    pace = BackgroundPace(256)
    step(pace, 5e-3, 0, 0.2)
    for num_tokens in (32, 64, 128, 256, 256):
        assert pace.num_tokens(1) == num_tokens
        step(pace, 5.1e-3, num_tokens, 0.2)
        assert pace.num_tokens(1) == 0  # The pause measures steps without background tokens.
        assert num_pauses(pace, 0.2) == 1
    step(pace, 9.9e-3, 256, 0.2)
    assert num_pauses(pace, 0.2) == 3
    assert pace.num_tokens(1) == 128


def test_no_second_chunk_is_planned_while_one_is_in_flight():
    pace = BackgroundPace(512)
    step(pace, 5e-3, 0, 0.2)
    pace.record_plan(pace.num_tokens(1))
    assert pace.num_tokens(1) == 0


def test_shorter_steps_are_not_credited_to_background_fills():
    """Steps become shorter when most jobs have finished. Background fills must not get more tokens
    for that."""
    pace = BackgroundPace(256)
    step(pace, 20e-3, 0, 0.2)
    seconds = num_steps = 0
    while num_steps < 200:
        num_tokens = pace.num_tokens(1)
        elapsed_s = 5e-3 + 25e-6 * num_tokens
        step(pace, elapsed_s, num_tokens, 0.2)
        seconds += elapsed_s
        num_steps += 1
    assert seconds <= 1.25 * 5e-3 * num_steps


async def test_the_api_supports_background_fills():
    clock = ManualClock()
    service = SimService(SimConfig(), clock)
    await service.start()
    request = FillRequest(context_id=1, token_ids=[65] * 600, background=True)
    answer = asyncio.create_task(service.fill(request))
    for _ in range(4):
        await clock.advance(0.02)  # The wait is longer than one chunk.
    assert (await answer).computed_tokens == 600
    assert service.runtime_info().num_steps == 3
    await service.close()
