"""Grammars (llguidance's Lark) of answers whose calls of tools cannot be malformed.

text <tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>
     '-trigger-''open'---- object, of the tool's schema --------''close-----'"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from parrot.protocol.errors import InvalidRequest
from parrot.protocol.sampling import MAX_GRAMMAR
from parrot.utils.json_schemas import exact_schema

_MAX_NAME = 100

Function = Mapping[str, Any]
"""A function as vendors describe it to a model: `name`, `parameters`, which are a JSON schema."""


@dataclass(frozen=True, slots=True)
class CallMarkup:
    """How a family of models writes calls. With a `separator`, many calls stand between `open` and
    `close`; without, each has its own, and `repeats` says whether there may be many. An empty
    `trigger`: a call is the whole answer. A call is `before`, `label`, the name, `between`,
    the arguments, `behind`."""

    trigger: str
    open: str = ""
    close: str = ""
    separator: str = ""
    repeats: bool = False
    before: str = "{"
    label: str = '"name": '
    between: str = ', "arguments": '
    behind: str = "}"
    quotes_names: bool = True


@dataclass(frozen=True, slots=True)
class CallRules:
    """The functions that an answer may call. Arguments of functions that are `strict` fit their
    schemas, and those of others as far as the schemas can be enforced. `must_call`: it is nothing
    but calls."""

    functions: Sequence[Function]
    must_call: bool
    may_call_many: bool

    @property
    def constrains(self) -> bool:
        """Whether there are answers that they forbid."""
        return self.must_call or any(function.get("strict") for function in self.functions)


def call_grammar(markup: CallMarkup, rules: CallRules, schema: Any = None) -> str:
    """The grammar of answers. `schema`: of the JSON that an answer is if it is no call; None if it
    may be any text. Raises `InvalidRequest` if it is too long, or a
    schema cannot be enforced exactly."""
    many = rules.may_call_many
    more = f"({_text(markup.separator)} call)*" if markup.separator and many else ""
    names = " | ".join(f"f{i}" for i in range(len(rules.functions)))
    lines = [
        f"body: {_text(markup.open)} call {more} {_text(markup.close)}",
        f"call: {_text(markup.before)} ({names}) {_text(markup.behind)}",
        *(_function(i, function, markup) for i, function in enumerate(rules.functions)),
    ]
    unit = f"{_text(markup.trigger)} body" if markup.trigger else "body"
    calls = f'{unit} ("\\n" {unit})*' if markup.repeats and many else unit
    if rules.must_call:
        lines.insert(0, f"start: {calls}")
    elif schema is not None:
        lines.insert(0, f"start: {calls} | json")
        lines.append(f"json: {_json(schema, 'the answer', 'response_format')}")
    elif markup.trigger:
        calls = "(head body)*" if markup.repeats else "(head body)?"
        lines[:0] = [f"start: {calls} TEXT", f"head[lazy]: TEXT {_text(markup.trigger)}"]
        lines.append("TEXT: /(.|\\n)*/")
    else:
        lines[:0] = ["start: body | TEXT?"]
        lines.append("TEXT: /[^{](.|\\n)*/")
    grammar = "\n".join(lines)
    if len(grammar.encode("utf-8", "surrogatepass")) > MAX_GRAMMAR:
        text = f"the schemas of tools whose calls are enforced have more than {MAX_GRAMMAR} bytes"
        raise InvalidRequest(text, param="tools")
    return grammar


def _function(index: int, function: Function, markup: CallMarkup) -> str:
    """A rule for the name and the arguments of a call."""
    given = function.get("parameters")
    schema: dict[str, Any] = {"type": "object"} | (given if isinstance(given, dict) else {})
    name = json.dumps(function["name"], ensure_ascii=False)
    shown = name if markup.quotes_names else function["name"]
    begin = _text(f"{markup.label}{shown}{markup.between}")
    lenient = not function.get("strict")
    return f"f{index}: {begin} {_json(schema, f'tool {name}', 'tools', lenient=lenient)}"


def _json(schema: Mapping[str, Any], whose: str, param: str, *, lenient: bool = False) -> str:
    try:
        return f"%json {json.dumps(exact_schema(schema, MAX_GRAMMAR, lenient=lenient))}"
    except ValueError as error:
        text = f"the schema of {whose[:_MAX_NAME]} cannot be enforced: {error}"
        raise InvalidRequest(text, param=param) from None


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False) if text else ""
