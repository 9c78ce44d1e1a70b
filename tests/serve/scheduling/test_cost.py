"""What answers teach of the costs of a model and of its engines."""

import random

import pytest

from parrot.serve.scheduling.cost import CostModel, EngineSpeed, ModelCosts, Work

TRUTH = CostModel(step_s=8e-3, sequence_s=5e-5, token_s=1.6e-7, prefill_s=3.5e-5)


def answer(
    costs: ModelCosts, engine: EngineSpeed, draw: random.Random, slowness: float = 1.0
) -> None:
    """A run among others, measured with 10% of noise."""
    steps = draw.randint(20, 500)
    tasks, tokens = draw.randint(1, 60), draw.randint(500, 30_000)
    work = Work(steps, steps * tasks, steps * tokens, draw.randint(0, 20_000))
    seconds = (
        steps * TRUTH.decode_step_s(tasks, tokens) + work.num_prefilled * TRUTH.prefill_s
    ) * slowness
    costs.learn(work, seconds * draw.uniform(0.9, 1.1), engine)


def test_nothing_learnt_means_the_defaults() -> None:
    assert ModelCosts(CostModel()).at_speed(1.0) == CostModel()


def test_costs_converge_each_by_itself() -> None:
    costs, engine, draw = ModelCosts(CostModel()), EngineSpeed(), random.Random(1)
    for _ in range(200):
        answer(costs, engine, draw)
    learnt = costs.at_speed(engine.slowness)
    assert learnt.step_s == pytest.approx(TRUTH.step_s, rel=0.25)
    assert learnt.token_s == pytest.approx(TRUTH.token_s, rel=0.25)
    assert learnt.prefill_s == pytest.approx(TRUTH.prefill_s, rel=0.3)
    assert learnt.sequence_s == pytest.approx(TRUTH.sequence_s, rel=0.6)


@pytest.mark.parametrize("slowness", [1 / 8, 4.0, 50.0])
def test_few_answers_tell_how_fast_a_model_is(slowness: float) -> None:
    costs, engine, draw = ModelCosts(CostModel()), EngineSpeed(), random.Random(2)
    for _ in range(12):
        answer(costs, engine, draw, slowness)
    step_s = costs.at_speed(engine.slowness).decode_step_s(20, 10_000)
    assert step_s == pytest.approx(slowness * TRUTH.decode_step_s(20, 10_000), rel=0.25)


def test_one_engine_of_four_is_slow() -> None:
    costs, draw = ModelCosts(CostModel()), random.Random(3)
    engines = [EngineSpeed() for _ in range(4)]
    for _ in range(25):
        for i, engine in enumerate(engines):
            answer(costs, engine, draw, 1.0 if i else 4.0)
    steps = [costs.at_speed(engine.slowness).decode_step_s(20, 10_000) for engine in engines]
    assert steps[0] / steps[1] == pytest.approx(4.0, rel=0.2)
    assert steps[1] == pytest.approx(steps[3], rel=0.2)


def test_an_engine_that_becomes_slow_is_noticed() -> None:
    costs, draw = ModelCosts(CostModel()), random.Random(4)
    engines = [EngineSpeed() for _ in range(4)]
    for slowness in (1.0, 4.0):
        for _ in range(60):
            for i, engine in enumerate(engines):
                answer(costs, engine, draw, 1.0 if i else slowness)
    assert engines[0].slowness / engines[1].slowness == pytest.approx(4.0, rel=0.25)


def test_a_wild_answer_moves_little() -> None:
    costs, engine, draw = ModelCosts(CostModel()), EngineSpeed(), random.Random(5)
    for _ in range(100):
        answer(costs, engine, draw)
    before = costs.at_speed(engine.slowness).decode_step_s(20, 10_000)
    answer(costs, engine, draw, slowness=1000.0)
    assert costs.at_speed(engine.slowness).decode_step_s(20, 10_000) < 1.5 * before


def test_scales_stay_within_bounds() -> None:
    costs, engine = ModelCosts(CostModel()), EngineSpeed()
    for seconds in [1e9, 1e-9] * 50:
        costs.learn(Work(100, 100, 10_000, 100), seconds, engine)
        learnt = costs.at_speed(engine.slowness)
        assert 0 < learnt.step_s < 1e5
        assert 0 < learnt.prefill_s < 1e5
