"""Schemas are enforced exactly. A schema with an unsupported keyword is refused, and the error
names the keyword."""

import json
from typing import Any

import pytest

from parrot.protocol.errors import InvalidRequest
from tests.engine.grammar.check_schemas import check_random
from tests.engine.grammar.test_grammar_compiler import TOKENIZER, constraint_of
from tests.support.masks import allowed


def accepts(schema: dict[str, Any], text: str) -> bool:
    constraint = constraint_of(json_schema=schema)
    ids = TOKENIZER.encode(text, add_special_tokens=False).ids
    for position, token in enumerate(ids):
        if token not in (allowed(constraint, position) or ()):
            return False
        constraint.take(position, token)
    eos = constraint.end_ids
    return constraint.is_complete or not {*eos}.isdisjoint(allowed(constraint, len(ids)) or ())


def test_whitespace_between_tokens_is_limited() -> None:
    """Otherwise, a model that repeats whitespace could fill its whole answer with it."""
    schema = {"type": "object", "properties": {"a": {"type": "array"}}}
    for text in ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [\r\n\t\t1\n  ]\n}'):
        assert accepts(schema, text), text
    for text in ('{  "a":[]}', '{\n\n"a":[]}', '{\n "a":[]\n' + " " * 33 + "}", '{"a":\t[]}'):
        assert not accepts(schema, text), text


def test_outputs_of_random_schemas_fit() -> None:
    """Checks 100 schemas. `check_schemas` checks thousands."""
    counts = check_random(100, seed=1)
    assert counts["valid"] == 100
    assert counts["outputs"] > 200


@pytest.mark.parametrize(
    ("schema", "keyword"),
    [
        ({"not": {"type": "string"}}, "not"),
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "array", "contains": {}}, "contains"),
        ({"type": "object", "propertyNames": {"maxLength": 3}}, "propertyNames"),
        ({"type": "object", "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
        ({"if": {"type": "string"}, "then": {"minLength": 1}}, "then"),
        ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf"),
        ({"type": "object", "minProperties": 2}, "minProperties"),
        ({"type": "string", "format": "json-pointer"}, "format: json-pointer"),
        ({"type": "string", "pattern": "^(?=a)"}, "look-ahead"),
        ({"type": "string", "pattern": "[a--b]"}, "pattern"),
        ({"type": "string", "pattern": "[]a]"}, "pattern"),
        ({"type": "string", "pattern": r"\Aa"}, "pattern"),
        ({"type": "string", "pattern": "(?x)a b"}, "pattern"),
        ({"patternProperties": {"^a": {}, "b$": {}}}, "patternProperty"),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "exclusiveMinimum"),
        ({"allOf": [{"minimum": 0.5}, {"exclusiveMaximum": 1}]}, "exclusiveMaximum"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
        ({"type": "string", "minLength": 5, "maxLength": 3}, "minLength"),
        ({"type": "array", "minItems": 5, "maxItems": 3}, "minItems"),
        ({"enum": []}, "enum"),
        ({"enum": ["a\0"]}, "enum"),
        ({"const": "a\x7f"}, "const"),
        ({"required": ["a"], "properties": {"a": False}, "type": "object"}, "required"),
        ({"type": "nothing"}, "type"),
        ({"$ref": "http://127.0.0.1/schema"}, "127.0.0.1"),
        ({"x-guidance": {"lenient": True}, "not": {}}, "x-guidance"),
    ],
    ids=lambda value: value if isinstance(value, str) else json.dumps(value),
)
def test_unsupported_keywords_are_refused_by_name(schema: dict[str, Any], keyword: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        constraint_of(json_schema=schema)
    assert caught.value.param == "json_schema"
    assert keyword in caught.value.message


@pytest.mark.parametrize(
    ("schema", "right", "wrong"),
    [
        (
            {"type": "object", "properties": {"a": {"type": "integer"}}},
            ['{"a": 1}', '{"b": "x"}'],
            ['{"a": "x"}', r'{"\u0061": "x"}', '{"a": 1, "a": "x"}', r'{"a": 1, "\u0061": "x"}'],
        ),
        (
            {"type": "object", "properties": {'é\n"': {"type": "integer"}}},
            [r'{"é\n\"": 1}'],
            [r'{"é\n\"": "x"}', r'{"é\n\u0022": "x"}', r'{"é\u000a\"": "x"}'],
        ),
        ({"type": "object", "required": ["a"], "minProperties": 1}, ['{"a": 1}'], ["{}"]),
        (
            {"type": "object", "patternProperties": {"^x.y$": {"type": "integer"}}},
            ['{"xay": 1}', '{"b": "x"}'],
            ['{"xay": "x"}'],
        ),
        (
            {"type": "string", "pattern": "^a.[^[]$"},
            ['"abc"'],
            ['"ab["', r'"a\nb"', r'"a\rb"', '"a\u2028b"'],
        ),
        ({"type": "string", "pattern": r"^[\s]$"}, ['" "', '"\ufeff"'], ['"\x85"', '"a"']),
        ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"'], ['"c"']),
        ({"type": "string", "pattern": "^[a[b]]$"}, ['"a]"', '"[]"'], ['"a"']),
        (
            {"type": "string", "format": "date", "pattern": "^2"},
            ['"2024-02-29"', '"2000-02-29"'],
            ['"2023-02-29"', '"2100-02-29"', '"2023-04-31"', '"1999-01-01"'],
        ),
        (
            {"format": "date-time"},
            ['"2023-12-31T23:59:59.5+01:00"', '"2023-12-31T00:00:00Z"', "3"],
            ['"2023-12-31T23:59:60Z"', '"2023-12-31 00:00:00Z"', '"2023-02-30T00:00:00Z"'],
        ),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 1}, ["1", "0.5"], ["0", "0.0"]),
        (
            {
                "$defs": {"l": {"items": {"$ref": "#/$defs/l"}, "type": "array"}},
                "$ref": "#/$defs/l",
            },
            ["[]", "[[], [[]]]"],
            ["1", "[1]"],
        ),
        ({"properties": {"pattern": {"enum": ["["]}}}, ['{"pattern": "["}'], ['{"pattern": 1}']),
        ({"enum": [{"pattern": "["}], "default": {"format": "date"}}, ['{"pattern": "["}'], ["1"]),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_supported_schemas_are_enforced(
    schema: dict[str, Any], right: list[str], wrong: list[str]
) -> None:
    assert {text: accepts(schema, text) for text in [*right, *wrong]} == (
        dict.fromkeys(right, True) | dict.fromkeys(wrong, False)
    )
