"""Grammars of tool calls. The engine follows them, and the parsers of answers read the outputs."""

import asyncio
import json
import random
from typing import Any

import jsonschema
import pytest

from parrot.engine.grammar.constraint import Constraint
from parrot.gateway.answers import read_answer
from parrot.gateway.tool_calls import Family, tool_family
from parrot.protocol.call_grammar import CallMarkup, CallRules, call_grammar, loose_grammar
from parrot.protocol.described_tools import DESCRIBED, call_text
from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import SamplingConfig
from tests.engine.grammar.test_grammar_compiler import COMPILER, EOS, TOKENIZER
from tests.support.masks import allowed

FAMILIES = HERMES, MISTRAL, LLAMA, *_ = [
    tool_family(mark)
    for mark in (
        "<tool_call>",
        "[TOOL_CALLS]",
        '"parameters": ',
        "<｜tool▁sep｜>",
        "<｜tool▁sep｜> ```json",
        "<tool_call> <function=",
        "<tool_call> <arg_key>",
        "<|tool_calls_section_begin|> <|tool_call_argument_begin|>",
        "<start_function_call> <escape>",
        '<|tool_call> <|"|>',
        "[func_name1(params_name1=params_value1",
    )
]
LOOK = {
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["sky", "süß 😀"]}, "far": {"type": "boolean"}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "strict": True,
}
WAIT = {"name": 'wait"now"', "parameters": {"properties": {"s": {"uniqueItems": True}}}}
NO_PARAMETERS = {"name": "stop"}


def constraint_of(family: Family | CallMarkup, rules: CallRules, schema: Any = None) -> Constraint:
    markup = family if isinstance(family, CallMarkup) else family.markup
    grammar = call_grammar(markup, rules, schema)
    constraint = asyncio.run(COMPILER.constraint(SamplingConfig(grammar=grammar)))
    assert constraint is not None
    return constraint


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether the whole text is an allowed answer."""
    position = 0
    for position, token in enumerate([*TOKENIZER.encode(text).ids, EOS]):
        if constraint.is_complete and token == EOS:
            return True
        if token not in (allowed(constraint, position) or ()):
            return False
        constraint.take(position, token)
    return True


def text_of(family: Family, *calls: tuple[str, str]) -> str:
    markup = family.markup
    objects = [
        f"{markup.before}{markup.label}"
        f"{json.dumps(name) if markup.quotes_names else name}{markup.between}"
        f"{arguments}{markup.behind}"
        for name, arguments in calls
    ]
    if markup.separator:
        return f"{markup.trigger}{markup.open}{markup.separator.join(objects)}{markup.close}"
    return "\n".join(f"{markup.trigger}{markup.open}{o}{markup.close}" for o in objects)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.marks[-1])
def test_an_answer_that_must_call(family: Family) -> None:
    rules = CallRules([LOOK, WAIT, NO_PARAMETERS], must_call=True, may_call_many=True)
    right = (
        [("look", '{"at": "sky", "far": true}')],
        [(WAIT["name"], '{"s": [1, 1], "more": null}')],
        [("stop", "{}")],
    )
    for calls in right:
        text = text_of(family, *calls)
        assert accepts(constraint_of(family, rules), text), text
        (call,) = read_answer(family.make_parser([]), text).calls
        assert call.name == calls[0][0]
    wrong = ["", "I look.", text_of(family, ("look", '{"at": "sea"}')),
             text_of(family, ("look", "{}")), text_of(family, ("see", "{}"))]  # fmt: skip
    for text in wrong:
        assert not accepts(constraint_of(family, rules), text), text
    many = text_of(family, *right[0], *right[2])
    assert accepts(constraint_of(family, rules), many) == (family is not LLAMA)
    one = CallRules([LOOK, NO_PARAMETERS], must_call=True, may_call_many=False)
    assert not accepts(constraint_of(family, one), many)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.marks[-1])
def test_an_answer_that_may_call_strict_tools(family: Family) -> None:
    rules = CallRules([LOOK, NO_PARAMETERS], must_call=False, may_call_many=True)
    call = text_of(family, ("look", '{"at": "süß 😀"}'))
    for text in ("I see.", "a < b <tool", call):
        assert accepts(constraint_of(family, rules), text), text
    wrong = text_of(family, ("look", '{"at": "sea"}'))
    assert not accepts(constraint_of(family, rules), wrong)
    if family.markup.trigger:
        assert accepts(constraint_of(family, rules), f"I look.\n{call}")
        assert not accepts(constraint_of(family, rules), f"I look.\n{wrong}")
    if family.markup.repeats:
        assert accepts(constraint_of(family, rules), f"I look.\n{call}\n{call}\nSo.")


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.marks[-1])
def test_an_answer_that_is_a_call_or_json(family: Family) -> None:
    rules = CallRules([LOOK], must_call=False, may_call_many=True)
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    for text, is_right in (
        (text_of(family, ("look", '{"at": "sky"}')), True),
        ('{"n": 3}', True),
        ("I see.", False),
    ):
        assert accepts(constraint_of(family, rules, schema), text) is is_right, text


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.marks[-1])
@pytest.mark.parametrize("seed", range(5))
def test_random_outputs_are_read_as_calls(family: Family, seed: int) -> None:
    rules = CallRules([LOOK], must_call=True, may_call_many=True)
    constraint, rng, ids = constraint_of(family, rules), random.Random(seed), []
    while not constraint.is_complete and len(ids) < 2000:
        choices = allowed(constraint, len(ids)) or []
        token = EOS if EOS in choices else rng.choice(choices)
        if token == EOS:
            break
        constraint.take(len(ids), token)
        ids.append(token)
    answer = read_answer(family.make_parser([]), TOKENIZER.decode(ids))
    assert not answer.text
    for call in answer.calls:
        assert json.loads(call.arguments)["at"] in ("sky", "süß 😀")
    assert answer.calls


def test_too_many_tools_are_refused() -> None:
    tools = [{"name": f"f{i}", "parameters": {"description": "x" * 1000}} for i in range(100)]
    rules = CallRules(tools, must_call=True, may_call_many=True)
    with pytest.raises(InvalidRequest) as caught:
        call_grammar(HERMES.markup, rules)
    assert caught.value.param == "tools"


DESCRIBED_RULES = CallRules(
    [LOOK | {"strict": False}, {"name": "say", "parameters": {"properties": {"text": {}}}}],
    must_call=False,
    may_call_many=True,
)


@pytest.mark.parametrize(
    ("text", "is_right"),
    [
        ("", True),
        ("I see.", True),
        (call_text("look", {"at": "sky", "far": True}), True),
        (f"I look.\n{call_text('look', {'at': 'sky'})}", True),
        (f"{call_text('look', {'at': 'sky'})}\n{call_text('say', {'text': [1, 2.5]})}", True),
        (call_text("say", {"text": 'a "b"\n\\ süß'}), True),
        (call_text("say", {"more": 1}), False),
        (call_text("look", {"at": "sea"}), False),
        (call_text("see", {}), False),
        (call_text("look", {"at": "sky"}).replace(": ", ":"), False),
        (f"{call_text('look', {'at': 'sky'})}\nSo.", False),
        ("I <tool_call> so", False),
    ],
)
def test_calls_of_a_model_whose_prompt_describes_the_tools(text: str, is_right: bool) -> None:
    """A call has only the form in which the next prompt shows it, and only calls may follow it."""
    constraint = constraint_of(DESCRIBED, DESCRIBED_RULES)
    assert accepts(constraint, text) is is_right


def test_arguments_that_may_be_any_object() -> None:
    grammar = loose_grammar(DESCRIBED, DESCRIBED_RULES)
    for text, is_right in (
        (f"I look.\n{call_text('look', {'any': [1, {'a': None}]})}", True),
        (call_text("see", {}), False),
    ):
        constraint = asyncio.run(COMPILER.constraint(SamplingConfig(grammar=grammar)))
        assert constraint is not None
        assert accepts(constraint, text) is is_right


STRING = {"type": "string"}
FREE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": STRING,
        "tags": {"type": "array", "items": STRING},
        "count": {"type": "integer"},
        "score": {"type": "number", "minimum": 0},
        "maybe": {"anyOf": [STRING, {"type": "null"}]},
        "more": {"type": "object"},
        "any": {},
        "by_name": {"type": "object", "additionalProperties": {"type": "integer"}},
        "node": {"$ref": "#/$defs/node"},
    },
    "required": ["text", "tags", "count", "score", "maybe", "more", "any", "by_name", "node"],
    "$defs": {"node": {"type": "object", "properties": {"name": STRING, "n": {"type": "number"}}}},
}


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_a_bounded_call_ends_within_the_limit(seed: int, *, strict: bool) -> None:
    """Random tokens seldom close a string, like the output of a model that repeats itself."""
    function = {"name": "save", "parameters": FREE, "strict": strict}
    rules = CallRules([function], must_call=True, may_call_many=False)
    grammar = call_grammar(DESCRIBED, rules, max_tokens=600)
    constraint = asyncio.run(COMPILER.constraint(SamplingConfig(grammar=grammar)))
    assert constraint is not None
    rng, ids = random.Random(seed), list[int]()
    while not constraint.is_complete and len(ids) < 600:
        token = rng.choice(allowed(constraint, len(ids)) or [EOS])
        if token == EOS:
            break
        constraint.take(len(ids), token)
        ids.append(token)
    assert len(ids) < 600
    (call,) = read_answer(HERMES.make_parser([]), TOKENIZER.decode(ids)).calls
    jsonschema.validate(json.loads(call.arguments), FREE)
