"""Prefix keys are equal exactly for equal prefixes in the same scope."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.protocol.sampling import SamplingConfig
from parrot.serve.graph.nodes import (
    CallOptions,
    Completion,
    SemanticVariable,
    TextPiece,
    TokenizedText,
    VariablePiece,
    text_digest,
)
from parrot.serve.prompts.encode import PieceKind
from parrot.serve.prompts.segments import PrefixHasher, Segment, extend_key, output_segment
from tests.support.prompts import prefix_keys, prompt_segments

TEXTS = st.sampled_from(["", "a", "b", "ab", "c", "é\u4e2d", "a" * 100])
SEGMENTS = st.builds(
    Segment,
    st.sampled_from(PieceKind),
    TEXTS,
    tokenized=st.none(),
    ends_turn=st.booleans(),
    digest=st.none(),
    parts=st.just(()),
    part_chars=st.just(0),
)
PROMPTS = st.lists(SEGMENTS, max_size=6)
HASHER = PrefixHasher(b"s" * 32)


@given(PROMPTS, PROMPTS)
def test_keys_are_equal_exactly_for_equal_prefixes(one: list[Segment], two: list[Segment]) -> None:
    keys_one = prefix_keys(HASHER, "t", False, one)
    keys_two = prefix_keys(HASHER, "t", False, two)
    assert len(keys_one) == len(one)
    for i in range(min(len(one), len(two))):
        assert (keys_one[i] == keys_two[i]) == (as_inputs(one[: i + 1]) == as_inputs(two[: i + 1]))
    assert len(set(keys_one)) == len(keys_one)


def as_inputs(prompt: list[Segment]) -> list[Segment]:
    """Return the prompt with its outputs as values of a later prompt."""
    kinds = {kind: kind for kind in PieceKind} | {PieceKind.OUTPUT: PieceKind.VALUE}
    return [segment._replace(kind=kinds[segment.kind]) for segment in prompt]


@given(PROMPTS.filter(len), st.text(max_size=5), st.text(max_size=5))
def test_keys_differ_between_scopes_chats_and_processes(
    prompt: list[Segment], scope: str, other: str
) -> None:
    keys = set(prefix_keys(HASHER, scope, False, prompt))
    assert not keys & set(prefix_keys(HASHER, scope, True, prompt))
    assert not keys & set(prefix_keys(PrefixHasher(), scope, False, prompt))
    if scope != other:
        assert not keys & set(prefix_keys(HASHER, other, False, prompt))


def test_ids_do_not_change_a_key() -> None:
    plain = Segment(PieceKind.VALUE, "x")
    tokenized = Segment(PieceKind.VALUE, "x", TokenizedText("t", (1, 2)))
    assert prefix_keys(HASHER, "t", False, [plain]) == prefix_keys(HASHER, "t", False, [tokenized])


@given(PROMPTS)
def test_a_cached_digest_does_not_change_a_key(prompt: list[Segment]) -> None:
    kept = [segment._replace(digest=text_digest(segment.text)) for segment in prompt]
    assert prefix_keys(HASHER, "t", False, kept) == prefix_keys(HASHER, "t", False, prompt)


def test_keys_depend_on_the_boundaries_of_constants() -> None:
    whole = prefix_keys(HASHER, "t", False, [Segment(PieceKind.CONSTANT, "ab")])
    parts = [Segment(PieceKind.CONSTANT, "a"), Segment(PieceKind.CONSTANT, "b")]
    assert whole[-1] != prefix_keys(HASHER, "t", False, parts)[-1]


def variable(name: str, text: str) -> SemanticVariable:
    made = SemanticVariable(name, name, 0)
    made.set(text, TokenizedText("tok", tuple(range(len(text)))))
    return made


def completion(output: str, *fill: Any, chat: bool, previous: Any = None) -> Completion:
    return Completion(
        id=0,
        request_id=0,
        session_id=0,
        options=CallOptions("f", chat=chat),
        sampling=SamplingConfig(),
        fill=fill,
        output=SemanticVariable(output, output, 0),
        previous=previous,
    )


@pytest.mark.parametrize("chat", [False, True])
def test_segments_of_a_chain(chat: bool) -> None:
    x = variable("x", "value")
    fill = (TextPiece("A "), VariablePiece(x), TextPiece(" B"))
    first = completion("y", *fill, chat=chat)
    y = first.output
    y.set("answer", TokenizedText("tok", tuple(range(6))))
    second = completion("z", TextPiece("C"), chat=chat, previous=first)
    segments = prompt_segments(second)
    assert [(s.kind.name, s.text, s.ends_turn) for s in segments] == [
        ("CONSTANT", "A ", False),
        ("VALUE", "value", False),
        ("CONSTANT", " B", chat),
        ("OUTPUT", "answer", False),
        ("CONSTANT", "C", chat),
    ]
    assert segments[3].tokenized is y.tokenized
    assert prompt_segments(first) == segments[:3]
    keys = prefix_keys(HASHER, "t", False, segments)
    assert extend_key(keys[2], output_segment("answer", None)) == keys[3]


def test_a_prompt_with_an_answer_as_input_continues_the_prompt_of_the_answer() -> None:
    """This does not hold in a chat, where markup surrounds an answer."""
    history = (TextPiece("A "), VariablePiece(variable("x", "value")))
    for chat in (False, True):
        first = completion("y", *history, chat=chat)
        first.output.set("answer")
        last = VariablePiece(variable("w", "and then?"))
        taking = completion("z", *history, VariablePiece(first.output), last, chat=chat)
        continuing = completion("z", last, chat=chat, previous=first)
        taken = prefix_keys(HASHER, "t", chat, prompt_segments(taking))
        continued = prefix_keys(HASHER, "t", chat, prompt_segments(continuing))
        assert (taken == continued) is not chat
        assert (taken[1] == continued[1]) is not chat
