"""Log probabilities of prompts from the engine core: one row per token, and no state is kept."""

from collections.abc import Sequence
from math import isfinite
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import ScoreResponse
from parrot.protocol.errors import EngineFailed, InvalidRequest, ModelNumerics
from parrot.protocol.sampling import Logprobs
from tests.engine.core.reads import CHUNKS, HARNESSES, assert_exact, events
from tests.support.answer import Answer
from tests.support.checking_runner import chain
from tests.support.core_harness import Harness, piece


def expected(text: str, num_top: int = 0) -> Logprobs:
    ids = list(text.encode())
    found = Logprobs(1 + num_top)
    found.add([ids[0], *[-1] * num_top], [0.0] * (1 + num_top))
    for before, token in zip(chain(ids), ids[1:], strict=False):
        number = -(before % 997)
        found.add([token, *range(num_top)], [number - i for i in range(1 + num_top)])
    return found


def scores(answer: Answer) -> list[Logprobs]:
    assert isinstance(answer.response, ScoreResponse), answer.error
    return answer.response.logprobs


@HARNESSES
@pytest.mark.parametrize("num_top", [0, 3])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_several_texts_in_chunks_of_any_size(make: Any, num_top: int, chunk: int | None) -> None:
    harness = make(num_blocks=20, fill_chunk_size=chunk)
    texts = ["abcdefghij", "x", "yz", "abcdefghij"]
    answer = harness.score(*texts, num_top=num_top)
    harness.run()
    assert scores(answer) == [expected(text, num_top) for text in texts]
    assert answer.response.prompt_tokens == 23
    assert harness.num_free == 20
    assert not list(harness.core._tree)


@HARNESSES
def test_a_long_text_does_not_stop_decodes(make: Any) -> None:
    harness = make(num_blocks=40, scheduler={"mixed_fill_tokens": 4})
    generated = harness.generate(piece(1, "a"), length=12)
    harness.step()
    answer = harness.score("b" * 30, priority=1)
    harness.run()
    assert generated.text == "bcdefghijklm"
    assert scores(answer) == [expected("b" * 30)]
    assert max(sum(len(s.token_ids) for s in plan.sequences) for plan in harness.runner.plans) == 5


@HARNESSES
def test_rows_that_are_computed_again_are_returned_once(make: Any) -> None:
    """A more urgent prompt preempts the text in the middle."""
    harness = make(num_blocks=4, fill_chunk_size=5)
    answer = harness.score("abcdefghijklmn", priority=1, num_top=1)
    harness.step()
    harness.step()
    urgent = harness.generate(piece(1, "klmnopqrs"), length=3)
    harness.run()
    assert urgent.text == "tuv"
    assert scores(answer) == [expected("abcdefghijklmn", 1)]
    starts = [s.start for plan in harness.runner.plans for s in plan.sequences if s.context_id < 0]
    assert starts != sorted(starts)


@HARNESSES
def test_log_probabilities_that_are_not_finite_fail_the_request(make: Any) -> None:
    harness = make(num_blocks=20)
    harness.runner._nan_token = ord("z")
    answers = [harness.score("abczz", "abc"), harness.score("abc"), harness.score("abcz")]
    harness.run()
    assert isinstance(answers[0].error, ModelNumerics)
    assert scores(answers[1]) == [expected("abc")]
    assert all(isfinite(value) for value in scores(answers[2])[0].values), (
        "the last token has no target"
    )
    assert not list(harness.core._tree)


@HARNESSES
def test_a_text_that_breaks_its_step_fails_alone(make: Any) -> None:
    harness = make(num_blocks=20, fill_chunk_size=2)
    harness.runner._crash_token = ord("z")
    answers = [harness.score("abcdefz"), harness.score("abcdef"), harness.embed("ab")]
    harness.run()
    assert isinstance(answers[0].error, EngineFailed)
    assert scores(answers[1]) == [expected("abcdef")]
    assert answers[2].response is not None
    assert harness.num_free == 20


def test_invalid_requests_are_rejected() -> None:
    harness = Harness()
    answers = [harness.score("abc", ""), harness.score("abc", num_top=5000)]
    harness.run()
    assert all(isinstance(answer.error, InvalidRequest) for answer in answers)
    assert harness.num_free == 16


@HARNESSES
@given(
    happening=events(st.integers(0, 2)),
    num_blocks=st.integers(4, 12),
    chunk=CHUNKS,
)
@settings(max_examples=60)
def test_answers_are_exact_under_load(
    make: Any, happening: Any, num_blocks: int, chunk: int | None
) -> None:
    """Answers are exact with too little memory and concurrent requests."""
    harness = make(num_blocks=num_blocks, fill_chunk_size=chunk)

    def read(texts: Sequence[str], how: Any, priority: int) -> Answer:
        answer: Answer = harness.score(*texts, num_top=how, priority=priority)
        return answer

    assert_exact(harness, happening, read, expected, scores)
