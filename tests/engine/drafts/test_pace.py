"""Drafts are as long as they pay."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.drafts.pace import Acceptance, Candidate, DraftCosts, share_out

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.floats(0.0, 1.0)), min_size=1, max_size=20
)


def costs(num_sequences: int = 1, sizes: tuple[int, ...] = SIZES) -> DraftCosts:
    costs = DraftCosts(sizes, 4e-3 + num_sequences * 2e-5, 3e-4)
    costs.token_s = 2e-5
    return costs


def test_a_sure_draft_is_as_long_as_it_may_be():
    assert share_out([Candidate(32, 0.999)], 1, costs()) == [32]
    assert share_out([Candidate(32, 0.999)], 1, costs(sizes=(8, 16))) == [15]


def test_an_unlikely_one_is_not_worth_the_wait():
    assert share_out([Candidate(32, 0.04)], 1, costs()) == [0]


def test_drafts_are_shorter_in_larger_batches():
    alone = share_out([Candidate(32, 0.7)], 1, costs())[0]
    among = share_out([Candidate(32, 0.7)] * 64, 64, costs(64))[0]
    assert 0 < among < alone


def test_one_draft_does_not_hold_up_many_sequences():
    candidates = [Candidate(4, 0.9)] + [Candidate(0, 0.9)] * 63
    assert share_out(candidates, 64, costs(64)) == [0] * 64


def test_what_a_size_was_measured_to_cost_counts():
    known = costs(16)
    assert sum(share_out([Candidate(8, 0.8)] * 16, 16, known)) > 48
    for _ in range(50):
        known.stepped(20e-3, 16, 80, 0)  # beyond 64 tokens, this device is slow
    assert 0 < sum(share_out([Candidate(8, 0.8)] * 16, 16, known)) <= 48


def test_steps_without_drafts_say_what_is_plain():
    known = costs()
    for _ in range(100):
        known.stepped(9e-3, 4, 0, 100)  # 2 ms of it are a prompt's
    assert known.plain_s == pytest.approx(7e-3, rel=0.01)


@given(CANDIDATES, st.sampled_from([1, 8, 64]))
def test_lengths_are_within_their_limits(candidates, size):
    lengths = share_out(candidates, len(candidates), costs(sizes=(size,)))
    assert sum(lengths) <= max(0, size - len(candidates))
    assert all(0 <= n <= c.length for n, c in zip(lengths, candidates, strict=True))


def test_acceptance_follows_what_happens_and_recovers():
    acceptance = Acceptance()
    first = acceptance.rate
    for _ in range(20):
        acceptance.count(8, 0)
    assert acceptance.rate < 0.1
    low = acceptance.rate
    acceptance.skip(200)
    assert low < acceptance.rate < first
    for _ in range(20):
        acceptance.count(8, 8)
    assert acceptance.rate > 0.95
