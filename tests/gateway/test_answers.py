"""Tool calls in answers are parsed while the answers are generated."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from parrot.gateway.answers import (
    AnswerParser,
    FirstCallParser,
    ParsedToolCall,
    PlainParser,
    TaggedParser,
    WholeAnswer,
    read_answer,
)
from parrot.gateway.tool_calls import read_cut, read_json, tool_family

HERMES, LLAMA, MISTRAL = "<tool_call>", '{"name": f, "parameters": args}', "[TOOL_CALLS]"
DEEPSEEK, FENCED = "<｜tool▁sep｜>", "<｜tool▁sep｜>...```json"
CODER, GLM = "<tool_call><function=name>", "<tool_call>name<arg_key>"
PYTHON = "[func_name1(params_name1=params_value1)]"
FUNCTION_GEMMA, GEMMA = "<start_function_call>call:x{y:<escape>", '<|tool_call>call:x{y:<|"|>'
KIMI = "<|tool_calls_section_begin|>...<|tool_call_argument_begin|>"
TEMPLATES = [HERMES, LLAMA, MISTRAL, DEEPSEEK, FENCED, CODER, GLM, PYTHON]
TEMPLATES += [FUNCTION_GEMMA, GEMMA, KIMI]
FUNCTIONS = [
    {
        "name": "look",
        "parameters": {"properties": {"at": {"type": "string"}, "n": {"type": "integer"}}},
    }
]
CALL = '{"name": "look", "arguments": {"at": "sky"}}'
PIECES = st.lists(
    st.sampled_from(
        [
            *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", CALL, "{", "}", "\n", " ", "<tool"),
            *("a", "ü", "[", "]", '[look(at="sky")]', "look", "<arg_key>at</arg_key>", "\\"),
            "<arg_value>sky</arg_value>",
            "<function=look><parameter=at>sky</parameter></function>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sky"}<｜tool▁call▁end｜>',
            "<｜tool▁call▁begin｜>",
            *("<start_function_call>", "<end_function_call>", "<escape>", "<|tool_call>", ","),
            *("<tool_call|>", '<|"|>', "call:look{at:<escape>sky<escape>}", ":", "call:look{"),
            'call:look{at:<|"|>sky<|"|>}',
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_end|>"),
            '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "sky"}'
            "<|tool_call_end|>",
        ]
    ),
    max_size=8,
).map("".join)


def parser(template: str) -> Callable[[], AnswerParser]:
    family = tool_family(template)
    assert family is not None
    return lambda: family.make_parser(FUNCTIONS)


def said(answer: WholeAnswer) -> tuple[str, list[tuple[str, str]]]:
    return answer.text, [(call.name, call.arguments) for call in answer.calls]


def streamed(parser: AnswerParser, chunks: Sequence[str]) -> WholeAnswer:
    answer = WholeAnswer()
    for chunk in chunks:
        for event in parser.feed(chunk):
            answer.add(event)
    for event in parser.finish():
        answer.add(event)
    return answer


def test_calls_between_tags() -> None:
    text = f"I look.\n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>\n{CALL}\n</tool_call>"
    answer = read_answer(parser(HERMES)(), text)
    assert said(answer) == ("I look.", [("look", '{"at":"sky"}')] * 2)
    assert len({call.id for call in answer.calls}) == 2


def test_an_answer_that_consists_of_a_call() -> None:
    call = '{"name": "look", "parameters": {"at": "sky"}}'
    assert said(read_answer(parser(LLAMA)(), f"\n{call}")) == ("", [("look", '{"at":"sky"}')])
    assert said(read_answer(parser(LLAMA)(), f"So: {call}")) == (f"So: {call}", [])
    assert said(read_answer(parser(LLAMA)(), '{"a": 1}')) == ('{"a": 1}', [])


def test_a_list_of_calls_after_a_tag() -> None:
    answer = read_answer(parser(MISTRAL)(), f"[TOOL_CALLS] [{CALL}, {CALL}]")
    assert said(answer) == ("", [("look", '{"at":"sky"}')] * 2)


def test_a_list_of_calls_whose_tag_is_a_special_token() -> None:
    answer = read_answer(parser(MISTRAL)(), f" [{CALL}]")
    assert said(answer) == ("", [("look", '{"at":"sky"}')])
    assert said(read_answer(parser(MISTRAL)(), "[1] is a list")) == ("[1] is a list", [])


def test_calls_with_semicolons_between() -> None:
    call = '{"name": "look", "parameters": {"at": "};{"}}'
    answer = read_answer(parser(LLAMA)(), f"{call}; {call}")
    assert said(answer) == ("", [("look", '{"at":"};{"}')] * 2)


SKY = '{"at":"sky"}'
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
FENCED_CALL = (
    "<｜tool▁call▁begin｜>function<｜tool▁sep｜>look\n"
    '```json\n{"at": "sky"}\n```<｜tool▁call▁end｜>'
)
KIMI_CALL = (
    '<|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"at": "sky"}<|tool_call_end|>'
)
BARE_CALL = '<｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sky"}<｜tool▁call▁end｜>'


@pytest.mark.parametrize(
    ("template", "text", "shown", "calls"),
    [
        (FENCED, f"So.{BEGIN}{FENCED_CALL}\n{FENCED_CALL}{END}", "So.", [SKY, SKY]),
        (DEEPSEEK, f"{BEGIN}{BARE_CALL}{BARE_CALL}{END}", "", [SKY, SKY]),
        (DEEPSEEK, f"{BEGIN}{BARE_CALL}", "", [SKY]),
        (
            CODER,
            "I look.\n<tool_call>\n<function=look>\n<parameter=at>\nsky\n</parameter>\n"
            "</function>\n</tool_call>",
            "I look.",
            [SKY],
        ),
        (
            CODER,
            "<tool_call><function=look><parameter=at>\n 7\n\n</parameter>\n"
            "<parameter=n>7</parameter><parameter=x>[1]</parameter>"
            "<parameter=y>a < b</parameter></function></tool_call>",
            "",
            ['{"at":" 7\\n","n":7,"x":[1],"y":"a < b"}'],
        ),
        (CODER, "<tool_call><function=look></function></tool_call>", "", ["{}"]),
        (
            GLM,
            "<tool_call>look\n<arg_key>at</arg_key>\n<arg_value>sky</arg_value>\n</tool_call>",
            "",
            [SKY],
        ),
        (GLM, "<tool_call>look</tool_call>", "", ["{}"]),
        (
            FUNCTION_GEMMA,
            "So.<start_function_call>call:look{at:<escape>sky<escape>}<end_function_call>\n"
            "<start_function_call>call:look{n:3,x:[1.5,true,<escape>a,b]}<escape>],y:{k:null}}",
            "So.",
            [SKY, '{"n":3,"x":[1.5,true,"a,b]}"],"y":{"k":null}}'],
        ),
        (FUNCTION_GEMMA, "<start_function_call>call:look{}<end_function_call>", "", ["{}"]),
        (
            GEMMA,
            '<|tool_call>call:look{at: 10:30 , n: -2,<|"|>a b<|"|>:<|"|>"{}"<|"|>, x:[], y:[[{}]]}'
            "<tool_call|>",
            "",
            ['{"at":"10:30","n":-2,"a b":"\\"{}\\"","x":[],"y":[[{}]]}'],
        ),
        (GEMMA, '<|tool_call>call:look{at:<|"|>7<|"|>}<tool_call|>', "", ['{"at":"7"}']),
        (GEMMA, "<|tool_call>call:look{at:7}<tool_call|>", "", ['{"at":"7"}']),
        (
            KIMI,
            f"Hm.\n<|tool_calls_section_begin|>\n{KIMI_CALL}\n{KIMI_CALL.replace(':0', ':1')}"
            "<|tool_calls_section_end|>",
            "Hm.",
            [SKY, SKY],
        ),
        (KIMI, f"<|tool_calls_section_begin|>{KIMI_CALL}", "", [SKY]),
        (PYTHON, "[look(at=\"sky\"), look(at='sky')]", "", [SKY, SKY]),
        (
            PYTHON,
            '[look(n=-1, x=[1.5, None, True, false], y={"k": "\\d"})]',
            "",
            ['{"n":-1,"x":[1.5,null,true,false],"y":{"k":"\\\\d"}}'],
        ),
    ],
)
def test_calls_of_each_family(template: str, text: str, shown: str, calls: list[str]) -> None:
    found = [("look", arguments) for arguments in calls]
    assert said(read_answer(parser(template)(), text)) == (shown, found)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (PYTHON, "[look('sky')]"),
        (PYTHON, "[look(at=__import__('os'))]"),
        (PYTHON, "[look(at=1e999)]"),
        (PYTHON, "[look(**{'at': 1})]"),
        (PYTHON, "[look(at=x), 3]"),
        (PYTHON, "[" * 10_000),
        (PYTHON, "[look(at='" + "x" * 20_000 + "')]"),
        (CODER, "<tool_call><function=look><parameter=at>a</parameter>b</function></tool_call>"),
        (CODER, f"<tool_call>{'<parameter=a>1</parameter>' * 2}</tool_call>"),
        (
            CODER,
            f"<tool_call><function=f>{'<parameter=a>1</parameter>' * 2}</function></tool_call>",
        ),
        (GLM, "<tool_call>look <arg_key>at</arg_key></tool_call>"),
        (GLM, "<tool_call></tool_call>"),
        (DEEPSEEK, f"{BEGIN}{END}"),
        (DEEPSEEK, f"{BEGIN}{BARE_CALL}so{END}"),
        (DEEPSEEK, f"{BEGIN}{BARE_CALL.replace('sky', 'sky}')}}}{END}"),
        (LLAMA, '{"name": "look"}; {"a": 1}'),
        *(
            (GEMMA, f"<|tool_call>{inner}<tool_call|>")
            for inner in (
                *("", "look{}", "call:look", "call:look{", "call:look{}}", "call:look{a}"),
                *("call:look{a:}", "call:look{a:1,}", "call:look{a:1,a:2}", "call:look{a:[1}"),
                *('call:look{a:<|"|>x}', 'call:look{a:x<|"|>y<|"|>}', "call:look{a:1 b:{}}"),
                "call:look{a:" + "[" * 30_000 + "]" * 30_000 + "}",
                "call:look{" + "a:{" * 300 + "}" * 301,
            )
        ),
        (KIMI, "<|tool_calls_section_begin|><|tool_calls_section_end|>"),
        (KIMI, f"<|tool_calls_section_begin|>{KIMI_CALL}so<|tool_calls_section_end|>"),
        (KIMI, f"<|tool_calls_section_begin|>{KIMI_CALL.replace(':0', '')}"),
        (KIMI, f"<|tool_calls_section_begin|>{KIMI_CALL.replace('}', '')}"),
    ],
)
def test_text_that_resembles_a_call_is_text(template: str, text: str) -> None:
    assert said(read_answer(parser(template)(), text)) == (text, [])


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "no json",
        "[]",
        "3",
        f'{{"name": "f", "arguments": {{"a": {"[" * 400 + "]" * 400}}}}}',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": "x"}',
    ],
)
def test_invalid_calls_are_text(inner: str) -> None:
    for text in (f"<tool_call>{inner}</tool_call>", f"So \n<tool_call>{inner}</tool_call> there"):
        assert said(read_answer(parser(HERMES)(), text)) == (text, [])


def test_calls_of_kimi_keep_their_ids() -> None:
    """Kimi's chat template shows the ids again. A repeated id is replaced by a new one."""
    calls = [KIMI_CALL, KIMI_CALL.replace(":0", ":1"), KIMI_CALL]
    text = f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"
    ids = [call.id for call in read_answer(parser(KIMI)(), text).calls]
    assert ids[:2] == ["functions.look:0", "functions.look:1"]
    assert ids[2].startswith("call_")


def test_only_the_first_call() -> None:
    text = f"<tool_call>{CALL}</tool_call>" * 3 + "done"
    answer = read_answer(FirstCallParser(parser(HERMES)()), text)
    assert (len(answer.calls), answer.text) == (1, "done")


def test_text_is_returned_as_soon_as_it_cannot_be_a_call() -> None:
    one = parser(HERMES)()
    assert list(one.feed("Hello <tool")) == [("Hello",)]
    assert list(one.feed("box")) == [(" <toolbox",)]


@given(
    template=st.sampled_from(TEMPLATES),
    text=PIECES,
    cuts=st.lists(st.integers(0, 200), max_size=5),
)
def test_chunk_boundaries_do_not_matter(template: str, text: str, cuts: list[int]) -> None:
    ends = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    chunks = [text[a:b] for a, b in pairwise(ends)]
    whole = said(read_answer(parser(template)(), text))
    assert said(streamed(parser(template)(), chunks)) == whole


def test_white_space_after_a_call_is_markup() -> None:
    call = f"<tool_call>{CALL}</tool_call>"
    for chunks in ([f"{call} \n a"], [call, " ", "\n a"], [call, " ", "\n"]):
        answer = streamed(parser(HERMES)(), chunks)
        assert answer.text == "a" * ("a" in chunks[-1][-1])


# The quotation marks of another template are ordinary characters.
ARGUMENTS = [{"at": f"{mark}sky{mark}"} for mark in ("", "<escape>", '<|"|>')]


@given(template=st.sampled_from(TEMPLATES), text=PIECES)
@example(template=GEMMA, text="<|tool_call>call:look{at:<escape>sky<escape>}")
def test_no_character_is_lost(template: str, text: str) -> None:
    """Except white space and tags around calls."""
    answer = read_answer(parser(template)(), text)
    if not answer.calls:
        assert answer.text == text
    for call in answer.calls:
        assert json.loads(call.arguments) in ({}, *ARGUMENTS)


def test_answers_without_tools_are_text() -> None:
    assert said(read_answer(PlainParser(), f"<tool_call>{CALL}</tool_call>"))[1] == []


def test_the_message_of_an_answer() -> None:
    call = ParsedToolCall("look", '{"at":"sky"}', "call_1")
    function = {"name": "look", "arguments": {"at": "sky"}}
    assert WholeAnswer("Hm", [call]).message() == {
        "role": "assistant",
        "content": "Hm",
        "tool_calls": [{"id": "call_1", "type": "function", "function": function}],
    }


def test_templates_without_tools() -> None:
    assert tool_family("{% for m in messages %}{{ m.content }}{% endfor %}") is None


@pytest.mark.parametrize(
    ("inner", "arguments"),
    [
        ('{"name": "look", "arguments": {"at": "sk', '{"at": "sk'),
        ('\n{"name": "look", "arguments": {', "{"),
        ('{"name": "look", "argum', None),
        (f"{CALL}\n</tool", '{"at":"sky"}'),
    ],
)
def test_a_call_that_is_cut_by_the_limit(inner: str, arguments: str | None) -> None:
    text = f"I look.\n<tool_call>{inner}"
    answer = read_answer(TaggedParser("<tool_call>", "</tool_call>", read_json, read_cut), text)
    if arguments is None:
        assert answer.text == text
        assert not answer.calls
        return
    (call,) = answer.calls
    assert (answer.text, call.name, call.arguments) == ("I look.", "look", arguments)
    assert call.is_cut is (inner[-1] != "l")
