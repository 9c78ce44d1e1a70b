"""Grammars (llguidance's Lark) that allow only well-formed tool calls in an answer.

text <tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>
     '-trigger-''open'---- object, of the tool's schema --------''close-----'"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import MAX_GRAMMAR
from parrot.utils.bounded_schemas import bounded_schema
from parrot.utils.json_schemas import exact_schema

_MARKUP_TOKENS = 16  # Tokens of a call's tags. More leave less space for its arguments.
_MAX_NAME = 100  # Characters of a name in an error message.
# Keywords that can allow properties which `properties` does not name.
_OPENING = frozenset(
    {"additionalProperties", "allOf", "anyOf", "oneOf", "patternProperties", "$ref", "if"}
)

Function = Mapping[str, Any]
"""A function in the vendors' format: `name`, and `parameters`, a JSON schema."""


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """The format in which a family of models writes tool calls. A call consists of `before`,
    `label`, the name, `between`, the arguments and `behind`."""

    trigger: str  # Text that starts calls. Empty: a call is the whole answer.
    open: str = ""
    close: str = ""
    separator: str = ""  # Between calls inside one `open` and `close`. Empty: each has its own.
    repeats: bool = False  # Without a separator: an answer may have several calls.
    before: str = "{"
    label: str = '"name": '
    between: str = ', "arguments": '
    behind: str = "}"
    quotes_names: bool = True
    # The model was not trained to call tools. Only calls may follow a call, JSON has the white
    # space of `json.dumps`, and arguments have no property that their schema does not name.
    is_tight: bool = False


@dataclass(frozen=True, slots=True)
class CallRules:
    """The functions that an answer may call. Arguments of `strict` functions match their schemas.
    Other arguments match as far as llguidance can enforce their schemas."""

    functions: Sequence[Function]
    must_call: bool  # The answer consists only of calls.
    may_call_many: bool

    @property
    def constrains(self) -> bool:
        """Whether the rules exclude any answer."""
        return self.must_call or self.has_strict

    @property
    def has_strict(self) -> bool:
        return any(function.get("strict") for function in self.functions)


def call_grammar(
    markup: CallMarkup, rules: CallRules, schema: Any = None, *, max_tokens: int | None = None
) -> str:
    """The grammar of answers. `schema`: the JSON schema of an answer without calls; None: any text.
    `max_tokens`: strings, numbers, arrays and objects that have no bound receive one, so that a
    call ends within this number of tokens. None: no bounds. Raises `InvalidRequest` if the grammar
    is too long or a schema cannot be enforced exactly."""
    names = " | ".join(f"f{i}" for i in range(len(rules.functions)))
    lines = [
        _function(i, function, markup, max_tokens) for i, function in enumerate(rules.functions)
    ]
    return _grammar(markup, rules, schema, [f"named: {names}", *lines])


def loose_grammar(markup: CallMarkup, rules: CallRules, schema: Any = None) -> str:
    """A grammar that allows any JSON object as arguments, for tools whose schemas do not fit in a
    grammar. Raises `InvalidRequest` if the names alone are too long."""
    names = [json.dumps(_shown_name(function, markup)) for function in rules.functions]
    any_object = _json({"type": "object"}, "the arguments", "tools", is_tight=markup.is_tight)
    named = f"named: {_text(markup.label)} NAME {_text(markup.between)} {any_object}"
    return _grammar(markup, rules, schema, [named, f"NAME: {' | '.join(names)}"])


def _grammar(markup: CallMarkup, rules: CallRules, schema: Any, named: Sequence[str]) -> str:
    """Build the grammar. `named`: the rule `named` for a call's name and arguments, and the rules
    that it uses."""
    many = rules.may_call_many
    more = f"({_text(markup.separator)} call)*" if markup.separator and many else ""
    lines = [
        f"body: {_text(markup.open)} call {more} {_text(markup.close)}",
        f"call: {_text(markup.before)} named {_text(markup.behind)}",
        *named,
    ]
    unit = f"{_text(markup.trigger)} body" if markup.trigger else "body"
    others = f'("\\n" {unit})*' if markup.repeats and many else ""
    calls = f"{unit} {others}".rstrip()
    if rules.must_call:
        lines.insert(0, f"start: {calls}")
    elif schema is not None:
        lines.insert(0, f"start: {calls} | json")
        lines.append(f"json: {_json(schema, 'the answer', 'response_format')}")
    elif markup.trigger:
        start = "(head body)* TEXT" if markup.repeats else "(head body)? TEXT"
        if markup.is_tight:
            start = f"{f'head body {others}'.rstrip()} | TEXT"
        lines[:0] = [f"start: {start}", f"head[lazy]: TEXT {_text(markup.trigger)}"]
        lines.append("TEXT: /(.|\\n)*/")
    else:
        lines[:0] = ["start: body | TEXT?"]
        first = re.escape((markup.open + markup.before)[0])
        lines.append(f"TEXT: /[^{first}](.|\\n)*/")
    grammar = "\n".join(lines)
    if len(grammar.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR:
        text = f"the schemas of tools whose calls are enforced have more than {MAX_GRAMMAR} bytes"
        raise InvalidRequest(text, param="tools")
    return grammar


def _shown_name(function: Function, markup: CallMarkup) -> str:
    name: str = function["name"]
    return json.dumps(name, ensure_ascii=False) if markup.quotes_names else name


def _function(index: int, function: Function, markup: CallMarkup, max_tokens: int | None) -> str:
    """The grammar rule for a call of one function."""
    given = function.get("parameters")
    schema: Mapping[str, Any] = {"type": "object"} | (given if isinstance(given, dict) else {})
    if markup.is_tight:
        schema = _closed(schema)
    begin = _text(f"{markup.label}{_shown_name(function, markup)}{markup.between}")
    whose = f"tool {json.dumps(function['name'], ensure_ascii=False)}"
    lenient = not function.get("strict")
    if max_tokens is not None:
        max_tokens = max(1, max_tokens - _MARKUP_TOKENS - len(begin) // 2)
    arguments = _json(
        schema, whose, "tools", lenient=lenient, is_tight=markup.is_tight, max_tokens=max_tokens
    )
    return f"f{index}: {begin} {arguments}"


def _closed(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    """The schema, but with `additionalProperties` False if no keyword allows other properties."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not (isinstance(properties, dict) and isinstance(required, list)):
        return schema
    if not _OPENING.isdisjoint(schema) or any(name not in properties for name in required):
        return schema
    return {**schema, "additionalProperties": False}


def _json(
    schema: Mapping[str, Any],
    whose: str,
    param: str,
    *,
    lenient: bool = False,
    is_tight: bool = False,
    max_tokens: int | None = None,
) -> str:
    try:
        exact = exact_schema(schema, MAX_GRAMMAR, lenient=lenient, is_tight=is_tight)
        if max_tokens is not None:
            exact = bounded_schema(exact, max_tokens)
    except ValueError as error:
        text = f"the schema of {whose[:_MAX_NAME]} cannot be enforced: {error}"
        raise InvalidRequest(text, param=param) from None
    return f"%json {json.dumps(exact)}"


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
