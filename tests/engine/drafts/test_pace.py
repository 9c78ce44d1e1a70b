"""Drafts have the length that gives the most tokens per second."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.drafts.pace import Acceptance, Candidate, DraftCosts, choose_draft_lengths

SIZES = (2, 4, 8, 16, 32, 64, 128, 256)
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.floats(0.0, 1.0)), min_size=1, max_size=20
)


def costs(num_sequences: int = 1, sizes: tuple[int, ...] = SIZES) -> DraftCosts:
    costs = DraftCosts(sizes, 4e-3 + num_sequences * 2e-5, 3e-4)
    costs.token_s = 2e-5
    return costs


def test_a_certain_draft_has_the_maximum_length():
    assert choose_draft_lengths([Candidate(32, 0.999)], 1, costs()) == [32]
    assert choose_draft_lengths([Candidate(32, 0.999)], 1, costs(sizes=(8, 16))) == [15]


def test_an_unlikely_draft_is_not_used():
    assert choose_draft_lengths([Candidate(32, 0.04)], 1, costs()) == [0]


def test_drafts_are_shorter_in_larger_batches():
    alone = choose_draft_lengths([Candidate(32, 0.7)], 1, costs())[0]
    among = choose_draft_lengths([Candidate(32, 0.7)] * 64, 64, costs(64))[0]
    assert 0 < among < alone


def test_drafts_that_exceed_the_next_size_use_a_larger_one():
    candidates = [Candidate(32, 0.99)] * 4 + [Candidate(0, 0.9)] * 2
    assert sum(choose_draft_lengths(candidates, 6, costs(6))) > 100


def test_one_draft_does_not_hold_up_many_sequences():
    candidates = [Candidate(4, 0.9)] + [Candidate(0, 0.9)] * 63
    assert choose_draft_lengths(candidates, 64, costs(64)) == [0] * 64


def test_the_measured_cost_of_a_size_is_used():
    known = costs(16)
    assert sum(choose_draft_lengths([Candidate(8, 0.8)] * 16, 16, known)) > 48
    for _ in range(50):
        known.record_step(20e-3, 16, 80, 0)  # Above 64 tokens this device is slow.
    assert 0 < sum(choose_draft_lengths([Candidate(8, 0.8)] * 16, 16, known)) <= 48


def test_steps_without_drafts_update_plain_s():
    known = costs()
    for _ in range(100):
        known.record_step(9e-3, 4, 0, 100)  # The prompt takes 2 of these 9 ms.
    assert known.plain_s == pytest.approx(7e-3, rel=0.01)


@given(CANDIDATES, st.sampled_from([1, 8, 64]))
def test_lengths_are_within_their_limits(candidates, size):
    lengths = choose_draft_lengths(candidates, len(candidates), costs(sizes=(size,)))
    assert sum(lengths) <= max(0, size - len(candidates))
    assert all(0 <= n <= c.length for n, c in zip(lengths, candidates, strict=True))


def test_acceptance_counts_all_tokens_drafted_or_not():
    acceptance = Acceptance(Acceptance())
    first = acceptance.rate(3)
    for _ in range(20):
        acceptance.count(3, 0, True)
    assert acceptance.rate(3) < 0.1
    for _ in range(20):
        acceptance.count(3, 4, False)
    assert acceptance.rate(3) > 0.9 > first


def test_matches_of_different_lengths_have_their_own_rates():
    acceptance = Acceptance()
    short, middle, long = (acceptance.rate(n) for n in (2, 8, 16))
    assert short < middle < long
    acceptance.count(6, 30, True)  # By class: 2, 8, 20 and the miss.
    assert acceptance.rate(7) > short
    assert acceptance.rate(15) > middle
    assert acceptance.rate(90) < long
    before = acceptance.rate(3)
    acceptance.count(12, 2, True)
    assert acceptance.rate(3) == before


def test_a_sequence_starts_with_the_shared_rates():
    shared = Acceptance()
    for _ in range(30):
        Acceptance(shared).count(3, 5, False)
    assert Acceptance(shared).rate(3) == pytest.approx(shared.rate(3))
    assert shared.rate(3) > 0.9
    own = Acceptance(shared)
    own.count(3, 0, True)
    assert own.rate(3) < shared.rate(3) < 1


def test_steps_with_prompts_do_not_change_plain_s():
    known = costs()
    for _ in range(20):
        known.record_step(5e-3, 4, 0, 0)
        known.record_step(90e-3, 4, 0, 2000)
        known.record_step(90e-3, 4, 8, 2000)
    assert known.plain_s == pytest.approx(5e-3)
    assert known.added_s(12, 8) < 1e-3


def test_one_long_step_has_little_effect():
    known = costs()
    for _ in range(20):
        known.record_step(4e-3, 1, 0, 0)
    known.record_step(1.0, 1, 0, 0)
    known.record_step(1.0, 1, 7, 0)
    known.record_turnaround(1.0, has_drafts=False)
    assert known.plain_s < 5e-3
    assert known.added_s(8, 7) < 4e-3
    assert known.turnaround_s < 5e-3
    bad = known.added_s(8, 7)
    for _ in range(20_000):
        known.record_step(4e-3, 1, 0, 0)
    assert known.added_s(8, 7) < 0.3 * bad


def test_the_gpu_waits_for_the_cpu_before_and_after_drafts():
    candidates = [Candidate(1, 0.5)]
    known = costs()
    assert choose_draft_lengths(candidates, 1, known, 1) == [1]
    assert choose_draft_lengths(candidates, 1, known, 4) == [0]


def test_the_turnaround_with_drafts_is_measured_separately():
    candidates = [Candidate(1, 0.5)]
    known = costs()
    before = known.wait_s
    for _ in range(30):
        known.record_turnaround(2.4e-3, has_drafts=True)
    assert known.turnaround_s == 3e-4
    assert before < known.wait_s < 2e-3  # The factor is limited.
    assert choose_draft_lengths(candidates, 1, known) == [0]
    for _ in range(60):
        known.record_turnaround(1e-4, has_drafts=False)
    assert choose_draft_lengths(candidates, 1, known) == [1]
