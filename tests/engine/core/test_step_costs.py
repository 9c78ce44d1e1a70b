"""Engines estimate the costs of their steps."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.core.steps import StepCostFit
from parrot.protocol.engine_api import StepCosts

TRUE = StepCosts(step_s=6.6e-3, sequence_s=5e-5, token_s=1.9e-7, prefill_s=4e-5)


def scaled(costs: StepCosts, factor: float) -> StepCosts:
    return StepCosts(**{name: factor * cost for name, cost in costs.model_dump().items()})


def run(fit: StepCostFit, costs: StepCosts, num_steps: int, *, wild: float = 0.0) -> None:
    """Record steps of all sizes. The fraction `wild` of these steps takes 20 times as long as
    expected."""
    draw = random.Random(1)
    for _ in range(num_steps):
        num_sequences = draw.randint(1, 64)
        num_tokens = num_sequences * draw.randint(200, 2000)
        num_prompt = draw.choice([0] * 9 + [draw.randint(100, 2000)])
        seconds = costs.decode_step_s(num_sequences, num_tokens) + num_prompt * costs.prefill_s
        seconds *= draw.gauss(1, 0.03) * (20 if draw.random() < wild else 1)
        fit.observe(
            seconds,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt,
        )


def values(costs: StepCosts | None) -> list[float]:
    """The fitted costs, without the cost of loads from CPU memory."""
    assert costs is not None
    return list(costs.model_dump(exclude={"host_token_s"}).values())


@pytest.mark.parametrize("slowness", [0.2, 1.0, 300.0])
def test_each_cost_converges_despite_outliers(slowness: float) -> None:
    fit = StepCostFit()
    run(fit, scaled(TRUE, slowness), 2000, wild=0.01)
    assert values(fit.costs()) == pytest.approx(values(scaled(TRUE, slowness)), rel=0.1)


def test_one_step_determines_the_common_scale() -> None:
    fit = StepCostFit()
    assert fit.costs() is None
    usual = StepCosts()
    seconds = 50 * usual.decode_step_s(1, 16)
    fit.observe(seconds, num_sequences=1, num_tokens=16, num_prompt_tokens=0)
    assert values(fit.costs()) == pytest.approx(values(scaled(usual, 50)), rel=0.01)


def test_an_engine_that_becomes_slow_is_noticed() -> None:
    fit = StepCostFit()
    run(fit, TRUE, 3000)
    run(fit, scaled(TRUE, 3), 10_000)
    assert values(fit.costs()) == pytest.approx(values(scaled(TRUE, 3)), rel=0.1)


def test_costs_without_observations_stay_near_the_common_scale() -> None:
    """Steps of one sequence without prompts cannot separate the costs."""
    fit = StepCostFit()
    for _ in range(1000):
        fit.observe(0.02, num_sequences=1, num_tokens=100, num_prompt_tokens=0)
    costs, usual = fit.costs(), StepCosts()
    assert costs is not None
    assert costs.decode_step_s(1, 100) == pytest.approx(0.02, rel=0.01)
    scale = 0.02 / usual.decode_step_s(1, 100)
    assert costs.prefill_s == pytest.approx(scale * usual.prefill_s, rel=0.01)


@given(
    st.lists(
        st.tuples(
            st.floats(1e-7, 1e4), st.integers(1, 512), st.integers(1, 10**6), st.integers(0, 10**5)
        ),
        min_size=1,
        max_size=60,
    )
)
def test_costs_are_positive_and_no_larger_than_the_observed_times(
    steps: list[tuple[float, int, int, int]],
) -> None:
    fit = StepCostFit()
    for seconds, num_sequences, num_tokens, num_prompt in steps:
        fit.observe(
            seconds,
            num_sequences=num_sequences,
            num_tokens=num_tokens,
            num_prompt_tokens=num_prompt,
        )
    costs = fit.costs()
    assert all(cost > 0 for cost in values(costs))
    assert costs is not None
    assert costs.step_s <= 64 * max(seconds for seconds, *_ in steps)
