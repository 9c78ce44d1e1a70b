"""What may be spent ahead follows what was for nothing."""

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


def test_it_is_careful_until_something_was_used():
    budget = Budget(prior=1.0)
    assert budget.share == pytest.approx(0.02)
    assert shares(budget, [False] * 20) == pytest.approx([0.02] * 20)
    assert Budget(prior=0.1).share == pytest.approx(0.2)


def test_it_takes_ten_that_are_used_to_be_bold():
    found = shares(Budget(prior=1.0), [True] * 20)
    assert found == sorted(found)
    assert found[3] < 0.1
    assert found[11] == 0.2


def test_it_takes_few_that_are_wasted_to_be_careful_again():
    budget = Budget(prior=1.0)
    shares(budget, [True] * 50)
    after = shares(budget, [False] * 16)
    assert after[1] < 0.1
    assert after[3] < 0.05
    assert after[15] < 0.024


@given(st.floats(0.05, 1.0), st.lists(st.tuples(st.integers(0, 10**6), st.booleans())))
def test_it_stays_between_its_bounds(prior: float, outcomes: list[tuple[int, bool]]):
    budget = Budget(prior)
    for num_tokens, is_used in outcomes:
        budget.add(num_tokens, is_used=is_used)
        assert 0.0199 < budget.share <= 0.2
