"""Reasoning before answers is parsed while the answers are generated."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parrot.gateway.answers import (
    AnswerParser,
    PlainParser,
    ReasoningDelta,
    ReasoningParser,
    TextDelta,
    WholeAnswer,
    read_answer,
    reasoning_options,
    with_reasoning,
)
from parrot.gateway.tool_calls import tool_family

TEMPLATE = "{% set content = content.split('</think>')[-1] %}"
CALL = '<tool_call>{"name": "look", "arguments": {}}</tool_call>'
PIECES = st.lists(
    st.sampled_from(
        ["<think>", "</think>", "\n", " ", "a", "ü", "<", "</", "</th", "<th", "ink>", "/"]
    ),
    max_size=9,
).map("".join)
CUTS = st.lists(st.integers(0, 60), max_size=5)


def parser(begins_inside: bool = False, answer: AnswerParser | None = None) -> AnswerParser:
    return ReasoningParser(answer or PlainParser(), begins_inside=begins_inside)


def read(text: str, begins_inside: bool = False) -> tuple[str, str]:
    answer = read_answer(parser(begins_inside), text)
    return answer.reasoning, answer.text


@pytest.mark.parametrize(
    ("text", "reasoning", "shown"),
    [
        ("<think>\nUp.\n\nYes.\n</think>\n\nLook up.", "Up.\n\nYes.", "Look up."),
        ("\n <think>Up.</think>Look </think> <think>", "Up.", "Look </think> <think>"),
        ("<think>\n\n</think>\n\nLook up.", "", "Look up."),
        ("<think>\nUp. </th", "Up. </th", ""),
        ("<thin", "", "<thin"),
        (" Look <think>up</think>", "", " Look <think>up</think>"),
        ("</think>", "", "</think>"),
        ("", "", ""),
    ],
)
def test_reasoning_is_between_tags_at_the_beginning(text: str, reasoning: str, shown: str) -> None:
    assert read(text) == (reasoning, shown)


@pytest.mark.parametrize(
    ("text", "reasoning", "shown"),
    [
        ("\nUp.\n</think>\n\nLook up.", "Up.", "Look up."),
        ("<think>\nUp.</think>Look up.", "Up.", "Look up."),
        ("Up.\n", "Up.", ""),
        ("<th", "<th", ""),
        ("</think>\nLook up.", "", "Look up."),
    ],
)
def test_the_prompt_may_have_begun_the_reasoning(text: str, reasoning: str, shown: str) -> None:
    assert read(text, begins_inside=True) == (reasoning, shown)


@given(text=PIECES, begins_inside=st.booleans(), cuts=CUTS)
@example(text="<think>a\n</th", begins_inside=False, cuts=[8])
@example(text="<think>a\n\n</think>\n\nb", begins_inside=False, cuts=[9, 12, 19])
def test_chunk_boundaries_do_not_matter_and_no_character_is_lost(
    text: str, begins_inside: bool, cuts: list[int]
) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    answer, one = WholeAnswer(), parser(begins_inside)
    for a, b in pairwise(ends):
        for event in one.feed(text[a:b]):
            answer.add(event)
    for event in one.finish():
        answer.add(event)
    assert (answer.reasoning, answer.text) == read(text, begins_inside)
    if not begins_inside and not text.lstrip().startswith("<think>"):
        assert (answer.reasoning, answer.text) == ("", text)
        return
    begun = text.lstrip()
    returned = begun.removeprefix("<think>") if begun.startswith("<think>") else text
    before, found, behind = returned.partition("</think>")
    assert answer.reasoning == before.strip("\n")
    assert answer.text == (behind.lstrip("\n") if found else "")


def test_calls_after_reasoning_but_not_in_it() -> None:
    family = tool_family("<tool_call>")
    assert family is not None
    text = f"<think>I could {CALL}</think>\n\nI look.\n{CALL}"
    answer = read_answer(parser(answer=family.make_parser([])), text)
    assert answer.reasoning == f"I could {CALL}"
    assert (answer.text, [call.name for call in answer.calls]) == ("I look.", ["look"])
    assert answer.message()["reasoning_content"] == answer.reasoning


def test_reasoning_is_returned_as_soon_as_it_cannot_be_a_tag() -> None:
    one = parser()
    assert list(one.feed("<think>\nUp.\n</")) == [ReasoningDelta("Up.")]
    assert list(one.feed("b>")) == [ReasoningDelta("\n</b>")]
    assert list(one.feed("\n</think>\n")) == []
    assert list(one.feed("\nLook")) == [TextDelta("Look")]


@pytest.mark.parametrize(
    ("template", "prompt", "found"),
    [
        (TEMPLATE, "<assistant>\n", ("Up.", "Look.")),
        (TEMPLATE, "<assistant><think>\n", ("Up.", "Look.")),
        (TEMPLATE, "<assistant><think>\n\n</think>\n\n", ("", "<think>Up.</think>Look.")),
        ("{{ content }}", "<assistant>", ("", "<think>Up.</think>Look.")),
    ],
)
def test_the_template_and_the_end_of_the_prompt_imply_reasoning(
    template: str, prompt: str, found: tuple[str, str]
) -> None:
    answer = read_answer(with_reasoning(PlainParser, template, prompt)(), "<think>Up.</think>Look.")
    assert (answer.reasoning, answer.text) == found


def test_an_effort_switches_reasoning_on_and_off() -> None:
    assert reasoning_options(None) == {}
    assert reasoning_options("none") == {"enable_thinking": False, "thinking": False}
    assert reasoning_options("low") == {"enable_thinking": True, "thinking": True}
