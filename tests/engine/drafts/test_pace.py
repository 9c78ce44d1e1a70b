"""Drafts are as long as they pay."""

from hypothesis import given
from hypothesis import strategies as st

from parrot.engine.drafts.pace import Acceptance, Candidate, StepFacts, share_out
from parrot.protocol.engine_api import StepCosts

COSTS = StepCosts(step_s=4e-3, sequence_s=2e-5, token_s=0.0, prefill_s=2e-5)
CANDIDATES = st.lists(
    st.builds(Candidate, st.integers(0, 40), st.floats(0.0, 1.0)), min_size=1, max_size=20
)


def facts(num_sequences: int, max_tokens: int = 200, turnaround_s: float = 3e-4) -> StepFacts:
    return StepFacts(num_sequences, 4e-3 + num_sequences * 2e-5, turnaround_s, max_tokens)


def test_a_sure_draft_is_taken_whole():
    assert share_out([Candidate(32, 0.99)], facts(1), COSTS) == [32]


def test_an_unlikely_one_is_not_worth_the_wait():
    assert share_out([Candidate(32, 0.04)], facts(1), COSTS) == [0]


def test_drafts_are_shorter_in_larger_batches():
    alone = share_out([Candidate(32, 0.7)], facts(1), COSTS)[0]
    among = share_out([Candidate(32, 0.7)] * 64, facts(64, 1000), COSTS)[0]
    assert 0 < among < alone


def test_one_draft_does_not_hold_up_many_sequences():
    candidates = [Candidate(4, 0.9)] + [Candidate(0, 0.9)] * 63
    assert share_out(candidates, facts(64), COSTS) == [0] * 64


@given(CANDIDATES, st.integers(0, 100))
def test_lengths_are_within_their_limits(candidates, max_tokens):
    lengths = share_out(candidates, facts(len(candidates), max_tokens), COSTS)
    assert sum(lengths) <= max_tokens
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
