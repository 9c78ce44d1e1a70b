"""The calls in what models write, each family in its own markup.

A reader gives None for whatever is not wholly calls: then it is text."""

import ast
import json
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from parrot.serve.prompts.answers import ToolCall
from parrot.serve.prompts.call_grammars import Function

_MAX_PYTHON = 2**14  # characters; a longer one is text

_DECODER = json.JSONDecoder()
_GAP = re.compile(r"[\s;]*")
_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<typed>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```\s*"
    r"|(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<bare>.*?))<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)
_CODER_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_CODER_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_CALL = re.compile(r"\s*([^\s<]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)


def read_json(text: str) -> list[ToolCall] | None:
    """A JSON object, a list of them, or some one after the other, with semicolons or not. Their
    arguments are called `arguments` or `parameters`."""
    try:
        value = orjson.loads(text)
        items = value if isinstance(value, list) else [value]
    except orjson.JSONDecodeError:
        items = _in_sequence(text)
    calls: list[ToolCall] = []
    for item in items:
        match item:
            case {"name": str(name), "arguments": dict(arguments)} | {
                "name": str(name),
                "parameters": dict(arguments),
            }:
                calls.append(ToolCall.of(name, arguments))
            case _:
                return None
    return calls or None


def _in_sequence(text: str) -> list[Any]:
    """The objects; none if there is anything else."""
    found: list[Any] = []
    end = _end_of_gap(text, 0)
    while end < len(text):
        try:
            _, stop = _DECODER.raw_decode(text, end)
            found.append(orjson.loads(text[end:stop]))
        except (ValueError, RecursionError):
            return []
        end = _end_of_gap(text, stop)
    return found


def _end_of_gap(text: str, begin: int) -> int:
    gap = _GAP.match(text, begin)
    assert gap is not None  # it may be empty
    return gap.end()


def read_deepseek(text: str) -> list[ToolCall] | None:
    calls: list[ToolCall] = []
    for found in _whole(_DEEPSEEK_CALL, text) or ():
        try:
            arguments = orjson.loads(found["fenced"] or found["bare"] or "")
        except orjson.JSONDecodeError:
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append(ToolCall.of(found["typed"] or found["name"], arguments))
    return calls or None


def read_coder(text: str, functions: Sequence[Function]) -> list[ToolCall] | None:
    """`<function=look><parameter=at>sky</parameter></function>`"""
    found = _CODER_CALL.fullmatch(text)
    return None if found is None else _tagged(found, _CODER_ARGUMENT, functions)


def read_glm(text: str, functions: Sequence[Function]) -> list[ToolCall] | None:
    """`look<arg_key>at</arg_key><arg_value>sky</arg_value>`"""
    found = _GLM_CALL.fullmatch(text)
    return None if found is None else _tagged(found, _GLM_ARGUMENT, functions)


def _tagged(
    call: re.Match[str], argument: re.Pattern[str], functions: Sequence[Function]
) -> list[ToolCall] | None:
    """`call`: the name, and the text of the arguments, which are JSON unless of type string."""
    name, text = call.groups()
    arguments: dict[str, Any] = {}
    found = _whole(argument, text)
    schemas = _properties(name, functions)
    for match in found or ():
        key, value = match.groups()
        if key in arguments:
            return None
        arguments[key] = _typed(value, schemas.get(key))
    return None if found is None else [ToolCall.of(name, arguments)]


def _properties(name: str, functions: Sequence[Function]) -> Mapping[str, Any]:
    for function in functions:
        match function:
            case {"name": str(known), "parameters": {"properties": dict(properties)}}:
                if known == name:
                    return properties
    return {}


def _typed(value: str, schema: Any) -> Any:
    match schema:
        case {"type": "string"}:
            return value
    try:
        return orjson.loads(value)
    except orjson.JSONDecodeError:
        return value


def _whole(pattern: re.Pattern[str], text: str) -> list[re.Match[str]] | None:
    """The matches of which the text wholly consists, but for white space."""
    matches: list[re.Match[str]] = []
    end = 0
    while found := pattern.match(text, end):
        matches.append(found)
        end = found.end()
    return None if text[end:].strip() else matches


def read_python(text: str) -> list[ToolCall] | None:
    """`[look(at="sky"), wait(s=3)]`; nothing in it is run."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of escapes that Python does not know
            tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_python_call(item) for item in tree.elts] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by names")
    names = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    values = [_literal(keyword.value) for keyword in node.keywords]
    return ToolCall.of(_dotted(node.func), dict(zip(names, values, strict=True)))


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Name):
        return node.id
    raise ValueError("no name")


def _literal(node: ast.expr) -> Any:
    match node:
        case ast.Name(id="true" | "false" | "null" as name):
            return orjson.loads(name)
        case ast.Constant(value=float() as value) if not math.isfinite(value):
            raise ValueError("no number")
        case ast.Constant(value=str() | bool() | int() | float() | None as value):
            return value
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() | float() as value)):
            return -value
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_literal(item) for item in items]
        case ast.Dict(keys=keys, values=values):
            names = [_literal(key) for key in keys if key is not None]
            if all(isinstance(name, str) for name in names):
                return dict(zip(names, map(_literal, values), strict=True))
    raise ValueError("no literal")
