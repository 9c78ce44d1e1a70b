"""Think times of sessions: learning and prediction."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.serve.contexts.forecast import ThinkTimes
from parrot.serve.contexts.index import Source
from parrot.serve.graph.nodes import Completion
from tests.serve.graph.held_runner import make_graph
from tests.support.requests import made, semantic

A, B = Source("acme", "a"), Source("acme", "b")


def trained(source: Source, pauses_s: list[float], model: ThinkTimes | None = None) -> ThinkTimes:
    model = model or ThinkTimes()
    for pause_s in pauses_s:
        model.ended(1, source)
        model.continued(1, source, pause_s)
    return model


def test_the_predicted_rest_is_the_mean_pause_minus_the_elapsed_time() -> None:
    draw = random.Random(1)
    model = trained(A, [draw.uniform(20, 30) for _ in range(200)])
    assert model.expected_s(A, 0.0) == pytest.approx(25, rel=0.1)
    assert model.expected_s(A, 15.0) == pytest.approx(10, rel=0.15)
    assert model.expected_s(A, 20.0) == pytest.approx(5, rel=0.3)


def test_each_function_has_its_own_think_times() -> None:
    model = trained(B, [25.0] * 40, trained(A, [2.0] * 40))
    assert model.expected_s(A, 0.0) < 4
    assert model.expected_s(B, 0.0) > 20
    assert model.expected_s(A, 5.0) > model.expected_s(B, 24.0)  # 5 s is longer than ever.


def test_a_new_function_is_predicted_from_its_tenants_other_functions() -> None:
    model = trained(A, [3.0] * 50)
    other = Source("acme", "never seen")
    assert model.expected_s(other, 0.0) < model.expected_s(Source("rival", "never seen"), 0.0)
    assert model.expected_s(other, 0.0) == pytest.approx(3, rel=0.7)


def test_a_call_that_is_rarely_continued_is_expected_late() -> None:
    model = ThinkTimes()
    for session_id in range(50):
        model.ended(session_id, A)
        model.session_ended(session_id)
    trained(B, [3.0] * 50, model)
    assert model.expected_s(A, 0.0) > 20 * model.expected_s(B, 0.0)


def test_live_sessions_do_not_count_as_abandoned() -> None:
    model = trained(A, [3.0] * 20)
    before = model.expected_s(A, 0.0)
    for _ in range(100):
        model.ended(7, A)
    assert model.expected_s(A, 0.0) == before
    model.session_ended(7)
    assert model.expected_s(A, 0.0) > before


def test_new_think_times_replace_old_ones() -> None:
    model = trained(A, [30.0] * 1000)
    trained(A, [2.0] * 1000, model)
    assert model.expected_s(A, 0.0) < 4


@given(
    st.lists(st.floats(0, 1e5), max_size=60),
    st.lists(st.floats(0, 1e6), min_size=2, max_size=10),
)
def test_predictions_are_positive_and_the_next_use_never_moves_earlier(
    pauses_s: list[float], ages_s: list[float]
) -> None:
    """A longer elapsed time can only move the predicted end to a later time."""
    model = trained(A, pauses_s)
    ends = [age_s + model.expected_s(A, age_s) for age_s in sorted(ages_s)]
    assert all(end > age_s for end, age_s in zip(ends, sorted(ages_s), strict=True))
    for earlier, later in pairwise(ends):
        assert later >= earlier * 0.9  # 10% is the width of a bucket.


def test_unnamed_calls_share_one_function() -> None:
    """Each call would otherwise be a function of its own, and evict the histograms of others."""
    graph = make_graph()
    sources = set()
    for name in (None, None, "f"):
        response = graph.submit(semantic("t {{o}}", made("o"), func_name=name))
        [completion] = graph.calls[response.request_id].tasks
        assert isinstance(completion, Completion)
        sources.add(Source.of(completion))
    assert sources == {Source("tenant", ""), Source("tenant", "f")}
