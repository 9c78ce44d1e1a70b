"""The budget of prefetches follows the fraction of wasted tokens."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.serve.execution.prefetch import Budget

TOKENS = 8192


def shares(budget: Budget, outcomes: list[bool]) -> list[float]:
    found = []
    for is_used in outcomes:
        budget.add(TOKENS, is_used=is_used)
        found.append(budget.share)
    return found


def test_the_share_is_small_before_any_use():
    budget = Budget(prior=1.0)
    assert budget.share == pytest.approx(0.02)
    assert shares(budget, [False] * 20) == pytest.approx([0.02] * 20)
    assert Budget(prior=0.1).share == pytest.approx(0.2)


def test_ten_used_fills_raise_the_share_to_its_limit():
    found = shares(Budget(prior=1.0), [True] * 20)
    assert found == sorted(found)
    assert found[3] < 0.1
    assert found[11] == 0.2


def test_a_few_wasted_fills_lower_the_share_again():
    budget = Budget(prior=1.0)
    shares(budget, [True] * 50)
    after = shares(budget, [False] * 16)
    assert after[1] < 0.1
    assert after[3] < 0.05
    assert after[15] < 0.024


@given(st.floats(0.05, 1.0), st.lists(st.tuples(st.integers(0, 10**6), st.booleans())))
def test_the_share_stays_within_its_limits(prior: float, outcomes: list[tuple[int, bool]]):
    budget = Budget(prior)
    for num_tokens, is_used in outcomes:
        budget.add(num_tokens, is_used=is_used)
        assert 0.0199 < budget.share <= 0.2
