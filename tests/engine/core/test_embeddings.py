"""Embeddings from the engine core: each hidden state counts once, and no state is kept."""

from base64 import b64decode
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parrot.protocol.engine_api import EmbedResponse
from parrot.protocol.errors import Cancelled, EngineFailed, InvalidRequest, ModelNumerics
from tests.engine.core.reads import CHUNKS, HARNESSES, assert_exact, events
from tests.support.answer import Answer
from tests.support.checking_runner import chain
from tests.support.core_harness import Harness, piece


def expected(text: str, pooling: str = "mean") -> bytes:
    states = tuple(enumerate(chain(list(text.encode()))))
    return repr(states if pooling == "mean" else states[-1:]).encode()


def embeddings(answer: Answer) -> list[bytes]:
    assert isinstance(answer.response, EmbedResponse), answer.error
    return [b64decode(text) for text in answer.response.embeddings]


@HARNESSES
@pytest.mark.parametrize("pooling", ["mean", "last"])
@pytest.mark.parametrize("chunk", [None, 1, 3])
def test_several_texts_in_chunks_of_any_size(make: Any, pooling: Any, chunk: int | None) -> None:
    harness = make(num_blocks=20, fill_chunk_size=chunk)
    texts = ["abcdefghij", "x", "yz", "abcdefghij"]
    answer = harness.embed(*texts, pooling=pooling)
    harness.run()
    assert embeddings(answer) == [expected(text, pooling) for text in texts]
    assert answer.response.prompt_tokens == 23
    assert harness.num_free == 20
    assert not list(harness.core._tree)


@HARNESSES
def test_a_long_text_does_not_stop_decodes(make: Any) -> None:
    """Next to requests of a higher priority, the text is computed in chunks, like a prompt."""
    harness = make(num_blocks=40, scheduler={"mixed_fill_tokens": 4})
    generated = harness.generate(piece(1, "a"), length=12)
    harness.step()
    answer = harness.embed("b" * 30, priority=1)
    harness.run()
    assert generated.text == "bcdefghijklm"
    assert embeddings(answer) == [expected("b" * 30)]
    assert max(sum(len(s.token_ids) for s in plan.sequences) for plan in harness.runner.plans) == 5


@HARNESSES
def test_no_kv_is_shared_or_left(make: Any) -> None:
    """Only computed tokens have hidden states."""
    harness = make(num_blocks=20)
    harness.fill(piece(1, "abcdefgh"))
    harness.run()
    answer = harness.embed("abcdefgh")
    harness.run()
    assert embeddings(answer) == [expected("abcdefgh")]
    assert harness.core.requests.free([1]) == 8


@HARNESSES
def test_states_that_are_computed_again_count_once(make: Any) -> None:
    """A more urgent prompt preempts the text in the middle."""
    harness = make(num_blocks=4, fill_chunk_size=5)
    answer = harness.embed("abcdefghijklmn", priority=1)
    harness.step()
    harness.step()
    urgent = harness.generate(piece(1, "klmnopqrs"), length=3)
    harness.run()
    assert urgent.text == "tuv"
    assert embeddings(answer) == [expected("abcdefghijklmn")]
    starts = [s.start for plan in harness.runner.plans for s in plan.sequences if s.context_id < 0]
    assert starts != sorted(starts)


@HARNESSES
def test_after_an_abort_no_kv_or_job_is_left(make: Any) -> None:
    harness = make(num_blocks=20, fill_chunk_size=3)
    answer = harness.embed("abcdefghij", "klmn")
    harness.step()
    harness.core.requests.abort(harness.num_orders)
    harness.run()
    assert isinstance(answer.error, Cancelled)
    assert harness.num_free == 20
    assert not list(harness.core._tree)


@HARNESSES
def test_after_a_reset_no_kv_or_job_is_left(make: Any) -> None:
    harness = make(num_blocks=20, fill_chunk_size=3)
    answers = [harness.embed("abcdefghij", "klmn"), harness.fill(piece(1, "abcd"))]
    harness.step()
    harness.core.requests.reset()
    harness.run()
    assert any(isinstance(answer.error, Cancelled) for answer in answers)
    assert harness.num_free == 20
    assert not list(harness.core._tree)


@HARNESSES
def test_states_that_are_not_finite_fail_the_request(make: Any) -> None:
    harness = make(num_blocks=20)
    harness.runner._nan_token = ord("z")
    answers = [harness.embed("abcz", "abc"), harness.embed("abc")]
    harness.run()
    assert isinstance(answers[0].error, ModelNumerics)
    assert embeddings(answers[1]) == [expected("abc")]
    assert not list(harness.core._tree)


@HARNESSES
def test_a_text_that_breaks_its_step_fails_alone(make: Any) -> None:
    harness = make(num_blocks=20, fill_chunk_size=2)
    harness.runner._crash_token = ord("z")
    answers = [harness.embed("abcdefz"), harness.embed("abcdef")]
    harness.run()
    assert isinstance(answers[0].error, EngineFailed)
    assert embeddings(answers[1]) == [expected("abcdef")]
    assert harness.num_free == 20


def test_an_empty_text_is_rejected() -> None:
    harness = Harness()
    answer = harness.embed("abc", "")
    harness.run()
    assert isinstance(answer.error, InvalidRequest)
    assert harness.num_free == 16


@HARNESSES
@given(
    happening=events(st.sampled_from(["mean", "last"])),
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
        answer: Answer = harness.embed(*texts, pooling=how, priority=priority)
        return answer

    assert_exact(harness, happening, read, expected, embeddings)
