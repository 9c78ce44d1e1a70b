"""How long sessions think before they go on: what is learnt from it, and what is predicted."""

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


def taught(source: Source, pauses_s: list[float], model: ThinkTimes | None = None) -> ThinkTimes:
    model = model or ThinkTimes()
    for pause_s in pauses_s:
        model.ended(1, source)
        model.continued(1, source, pause_s)
    return model


def test_the_rest_of_a_usual_pause_is_its_mean_less_what_has_passed() -> None:
    draw = random.Random(1)
    model = taught(A, [draw.uniform(20, 30) for _ in range(200)])
    assert model.expected_s(A, 0.0) == pytest.approx(25, rel=0.1)
    assert model.expected_s(A, 15.0) == pytest.approx(10, rel=0.15)
    assert model.expected_s(A, 20.0) == pytest.approx(5, rel=0.3)


def test_functions_are_told_apart() -> None:
    model = taught(B, [25.0] * 40, taught(A, [2.0] * 40))
    assert model.expected_s(A, 0.0) < 4
    assert model.expected_s(B, 0.0) > 20
    assert model.expected_s(A, 5.0) > model.expected_s(B, 24.0)  # longer than it ever took


def test_an_unknown_function_pauses_like_others_of_its_tenant() -> None:
    model = taught(A, [3.0] * 50)
    other = Source("acme", "never seen")
    assert model.expected_s(other, 0.0) < model.expected_s(Source("rival", "never seen"), 0.0)
    assert model.expected_s(other, 0.0) == pytest.approx(3, rel=0.7)


def test_what_is_never_continued_is_expected_late() -> None:
    model = ThinkTimes()
    for session_id in range(50):
        model.ended(session_id, A)
        model.session_ended(session_id)
    taught(B, [3.0] * 50, model)
    assert model.expected_s(A, 0.0) > 20 * model.expected_s(B, 0.0)


def test_an_open_session_says_nothing_yet() -> None:
    model = taught(A, [3.0] * 20)
    before = model.expected_s(A, 0.0)
    for _ in range(100):
        model.ended(7, A)
    assert model.expected_s(A, 0.0) == before
    model.session_ended(7)
    assert model.expected_s(A, 0.0) > before


def test_new_habits_replace_old_ones() -> None:
    model = taught(A, [30.0] * 1000)
    taught(A, [2.0] * 1000, model)
    assert model.expected_s(A, 0.0) < 4


@given(
    st.lists(st.floats(0, 1e5), max_size=60),
    st.lists(st.floats(0, 1e6), min_size=2, max_size=10),
)
def test_predictions_are_positive_and_the_time_of_the_next_use_never_comes_nearer(
    pauses_s: list[float], ages_s: list[float]
) -> None:
    """To have waited longer can only mean a later end."""
    model = taught(A, pauses_s)
    ends = [age_s + model.expected_s(A, age_s) for age_s in sorted(ages_s)]
    assert all(end > age_s for end, age_s in zip(ends, sorted(ages_s), strict=True))
    for earlier, later in pairwise(ends):
        assert later >= earlier * 0.9  # up to the width of a bucket


def test_calls_without_a_name_are_of_one_function() -> None:
    """Each has a name of its own, which would push out what is known of others."""
    graph = make_graph()
    sources = set()
    for name in (None, None, "f"):
        response = graph.submit(semantic("t {{o}}", made("o"), func_name=name))
        [completion] = graph.calls[response.request_id].tasks
        assert isinstance(completion, Completion)
        sources.add(Source.of(completion))
    assert sources == {Source("tenant", ""), Source("tenant", "f")}
