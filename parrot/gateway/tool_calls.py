"""The tool call formats of model families, which are recognized by their chat templates.

| family | a call |
|---|---|
| Hermes, Qwen | `<tool_call>{"name": "look", "arguments": {"at": "sky"}}</tool_call>` |
| Qwen3-Coder | `<tool_call><function=look><parameter=at>sky</parameter></function></tool_call>` |
| GLM | `<tool_call>look<arg_key>at</arg_key><arg_value>sky</arg_value></tool_call>` |
| Mistral | `[TOOL_CALLS] [{"name": "look", "arguments": {"at": "sky"}}]` |
| DeepSeek | `<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>look<｜tool▁sep｜>{"at": "sky"}...` |
| Llama 3 | `{"name": "look", "parameters": {"at": "sky"}}` |
| Llama 3, 4, Gemma 3, pythonic | `[look(at="sky")]` |
| FunctionGemma | `<start_function_call>call:look{at:<escape>sky<escape>}<end_function_call>` |
| Gemma 4 | `<|tool_call>call:look{at:<|"|>sky<|"|>}<tool_call|>` |
| Kimi K2 | `<|tool_calls_section_begin|><|tool_call_begin|>functions.look:0...{"at": "sky"}...` |

A reader returns the calls in a model's output, in its family's markup. It returns None if the
output is not only calls. Then the output is text.

A model whose template matches no family receives its tools as text, and calls them in Hermes' form:
see `described_messages`. A grammar constrains all its answers that may call tools. Other models are
constrained only if the request's rules need it. Families whose own form is not JSON then call in
JSON between their own tags."""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from parrot.gateway.answers import (
    AnswerParser,
    ParsedToolCall,
    PlainParser,
    Read,
    ReasoningParser,
    TaggedParser,
    WholeParser,
)
from parrot.protocol.call_grammar import (
    CallMarkup,
    CallRules,
    Function,
    call_grammar,
    loose_grammar,
)
from parrot.protocol.described_tools import DESCRIBED
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.sampling import CONSTRAINTS, SamplingConfig
from parrot.serve.prompts.encode import ModelTokenizer

_FREE = dict.fromkeys(CONSTRAINTS)

_MAX_PYTHON = 2**14  # Characters of a pythonic call. A longer one is text.
_MAX_DEPTH = 64  # Nesting levels of a Gemma call's arguments. A deeper one is text.
_DECODER = json.JSONDecoder()
_GAP = re.compile(r"[\s;]*")
_CUT_CALL = re.compile(r'\s*\{"name": ("(?:[^"\\]|\\.)*"), "arguments": (\{.*)', re.DOTALL)
_DEEPSEEK_CALL = re.compile(
    r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>(?P<typed>[^\n<]+)\n```json\n(?P<fenced>.*?)\n```\s*"
    r"|(?P<name>[^\n<]+)<｜tool▁sep｜>(?P<bare>.*?))<｜tool▁call▁end｜>\s*",
    re.DOTALL,
)
_KIMI_CALL = re.compile(
    r"\s*<\|tool_call_begin\|>\s*(?P<id>(?:[^\s<]*\.)?(?P<name>[^\s<.]+):\d+)\s*"
    r"<\|tool_call_argument_begin\|>(?P<arguments>.*?)<\|tool_call_end\|>\s*",
    re.DOTALL,
)
_GEMMA_CALL = re.compile(r"\s*call:([^\s{}]+)(\{.*\})\s*", re.DOTALL)
_GEMMA_KEY = re.compile(r"[^,:{}\[\]]+")
_GEMMA_BARE = re.compile(r"[^,{}\[\]]+")
_WHITE = re.compile(r"\s*")
_CODER_CALL = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
_CODER_ARGUMENT = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>\s*", re.DOTALL)
_GLM_CALL = re.compile(r"\s*([^\s<]+)\s*((?:<arg_key>.*)?)", re.DOTALL)
_GLM_ARGUMENT = re.compile(
    r"\s*<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>\s*", re.DOTALL
)
_TAGS = "<tool_call>", "</tool_call>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _NAMED, _CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
_KIMI_TAGS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def read_json(text: str) -> list[ParsedToolCall] | None:
    """Reads a JSON object, a list of them, or several in sequence, with or without semicolons. The
    arguments are in the field `arguments` or `parameters`."""
    try:
        value = orjson.loads(text)
        items = value if isinstance(value, list) else [value]
    except orjson.JSONDecodeError:
        items = _in_sequence(text)
    calls: list[ParsedToolCall] = []
    for item in items:
        match item:
            case {"name": str(name), "arguments": dict(arguments)} | {
                "name": str(name),
                "parameters": dict(arguments),
            }:
                calls.append(ParsedToolCall.of(name, arguments))
            case _:
                return None
    return calls or None


def _in_sequence(text: str) -> list[Any]:
    """The JSON objects in the text; empty if the text contains anything else."""
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


def read_cut(text: str) -> list[ParsedToolCall] | None:
    """Reads a call in the form that the grammar of described tools enforces, but which ends after
    its name."""
    found = _CUT_CALL.fullmatch(text)
    if found is None:
        return None
    name, arguments = orjson.loads(found[1]), found[2]
    try:
        value, end = _DECODER.raw_decode(arguments)
    except (ValueError, RecursionError):
        return [ParsedToolCall.cut(name, arguments)]
    # The arguments are complete if only a part of the closing text is missing.
    is_whole = f"}}\n{_TAGS[1]}".startswith(arguments[end:])
    return [ParsedToolCall.of(name, value)] if is_whole else None


def read_deepseek(text: str) -> list[ParsedToolCall] | None:
    calls: list[ParsedToolCall] = []
    for found in _whole(_DEEPSEEK_CALL, text) or ():
        try:
            arguments = orjson.loads(found["fenced"] or found["bare"] or "")
        except orjson.JSONDecodeError:
            return None
        if not isinstance(arguments, dict):
            return None
        calls.append(ParsedToolCall.of(found["typed"] or found["name"], arguments))
    return calls or None


def read_kimi(text: str) -> list[ParsedToolCall] | None:
    """Reads calls and keeps the ids that the model wrote, because later prompts show them again."""
    calls: list[ParsedToolCall] = []
    for found in _whole(_KIMI_CALL, text) or ():
        try:
            arguments = orjson.loads(found["arguments"])
        except orjson.JSONDecodeError:
            return None
        if not isinstance(arguments, dict):
            return None
        call = ParsedToolCall.of(found["name"], arguments)
        is_new = all(found["id"] != other.id for other in calls)
        calls.append(replace(call, id=found["id"]) if is_new else call)
    return calls or None


def read_gemma(text: str, quote: str, functions: Sequence[Function]) -> list[ParsedToolCall] | None:
    """`call:look{at:<quote>sky<quote>,n:[1,{far:true}]}`. A value without quotes is JSON, or text
    if the function's schema has a string."""
    found = _GEMMA_CALL.fullmatch(text)
    if found is None:
        return None
    reader = _GemmaReader(found[2], quote)
    try:
        arguments = reader.value()
    except ValueError:
        return None
    if reader.at < len(found[2]) or not isinstance(arguments, dict):
        return None
    schemas = _properties(found[1], functions)
    typed = {
        key: _typed(str(value), schemas.get(key)) if isinstance(value, _Bare) else _plain(value)
        for key, value in arguments.items()
    }
    return [ParsedToolCall.of(found[1], typed)]


class _Bare(str):
    """A value without quotes."""


def _plain(value: Any) -> Any:
    """The value with unquoted values parsed as JSON."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _typed(str(value), None) if isinstance(value, _Bare) else value


class _GemmaReader:
    """Reads values in sequence; `at` is the position after the last one."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.at = 0

    def value(self, depth: int = 0) -> Any:
        """The next value. Raises `ValueError` if there is none."""
        if depth > _MAX_DEPTH:
            raise ValueError("it is nested too deeply")
        if self._takes("{"):
            fields = list(self._items("}", lambda: self._field(depth + 1)))
            found = dict(fields)
            if len(found) < len(fields):
                raise ValueError("a key occurs twice")
            return found
        if self._takes("["):
            return list(self._items("]", lambda: self.value(depth + 1)))
        return self._string(_GEMMA_BARE)

    def _items(self, end: str, read: Callable[[], Any]) -> Iterator[Any]:
        if self._takes(end):
            return
        yield read()
        while not self._takes(end):
            self._require(",")
            yield read()

    def _field(self, depth: int) -> tuple[str, Any]:
        key = self._string(_GEMMA_KEY)
        self._require(":")
        return str(key), self.value(depth)

    def _string(self, bare: re.Pattern[str]) -> str:
        if self._takes(self._quote):
            begin, end = self.at, self._text.find(self._quote, self.at)
            if end < 0:
                raise ValueError("a quote is not closed")
            self.at = end + len(self._quote)
            return self._text[begin:end]
        found = bare.match(self._text, self.at)
        text = "" if found is None else found[0].strip()
        if found is None or not text or self._quote in text:
            raise ValueError("a value is missing")
        self.at = found.end()
        return _Bare(text)

    def _takes(self, text: str) -> bool:
        white = _WHITE.match(self._text, self.at)
        assert white is not None  # it may be empty
        if not self._text.startswith(text, white.end()):
            return False
        self.at = white.end() + len(text)
        return True

    def _require(self, text: str) -> None:
        if not self._takes(text):
            raise ValueError(f"{text} is missing")


def read_coder(text: str, functions: Sequence[Function]) -> list[ParsedToolCall] | None:
    """`<function=look><parameter=at>sky</parameter></function>`"""
    found = _CODER_CALL.fullmatch(text)
    return None if found is None else _tagged(found, _CODER_ARGUMENT, functions)


def read_glm(text: str, functions: Sequence[Function]) -> list[ParsedToolCall] | None:
    """`look<arg_key>at</arg_key><arg_value>sky</arg_value>`"""
    found = _GLM_CALL.fullmatch(text)
    return None if found is None else _tagged(found, _GLM_ARGUMENT, functions)


def _tagged(
    call: re.Match[str], argument: re.Pattern[str], functions: Sequence[Function]
) -> list[ParsedToolCall] | None:
    """`call` has the function's name and the arguments' text. An argument is JSON, unless its type
    is string."""
    name, text = call.groups()
    arguments: dict[str, Any] = {}
    found = _whole(argument, text)
    schemas = _properties(name, functions)
    for match in found or ():
        key, value = match.groups()
        if key in arguments:
            return None
        arguments[key] = _typed(value, schemas.get(key))
    return None if found is None else [ParsedToolCall.of(name, arguments)]


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
    """The matches, if the text consists only of matches and white space."""
    matches: list[re.Match[str]] = []
    end = 0
    while found := pattern.match(text, end):
        matches.append(found)
        end = found.end()
    return None if text[end:].strip() else matches


def read_python(text: str) -> list[ParsedToolCall] | None:
    """`[look(at="sky"), wait(s=3)]`. The text is parsed, and not executed."""
    if len(text) > _MAX_PYTHON:
        return None
    try:
        with warnings.catch_warnings(action="ignore"):  # of invalid escape sequences
            tree = ast.parse(text.strip(), mode="eval").body
        if not isinstance(tree, ast.List):
            return None
        return [_python_call(item) for item in tree.elts] or None
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None


def _python_call(node: ast.expr) -> ParsedToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("not a call with keyword arguments")
    names = [keyword.arg for keyword in node.keywords if keyword.arg is not None]
    values = [_literal(keyword.value) for keyword in node.keywords]
    return ParsedToolCall.of(_dotted(node.func), dict(zip(names, values, strict=True)))


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


class Family(NamedTuple):
    """The tool format of a model family."""

    marks: tuple[str, ...]  # strings that the family's chat templates all contain
    make_parser: Callable[[Sequence[Function]], AnswerParser]  # gets the callable functions
    markup: CallMarkup


def _or_json(read: Read) -> Read:
    """Reads a call in the family's own form, or in JSON, which its grammar generates."""
    return lambda text: read_json(text) if text.lstrip().startswith("{") else read(text)


_DEEPSEEK = CallMarkup(
    _BEGIN,
    close=_END,
    separator="\n",
    before=_CALL,
    label="",
    between=_NAMED,
    behind=_CALLED,
    quotes_names=False,
)
_FENCED = replace(
    _DEEPSEEK,
    before=f"{_CALL}function{_NAMED}",
    between="\n```json\n",
    behind=f"\n```{_CALLED}",
)


def _deepseek(functions: Sequence[Function]) -> AnswerParser:
    return TaggedParser(_BEGIN, _END, read_deepseek)


def _gemma(begin: str, end: str, quote: str) -> Family:
    def make_parser(functions: Sequence[Function]) -> AnswerParser:
        read = _or_json(partial(read_gemma, quote=quote, functions=functions))
        return TaggedParser(begin, end, read)

    return Family((begin, quote), make_parser, CallMarkup(begin, close=end, repeats=True))


_HERMES = CallMarkup(_TAGS[0], "\n", f"\n{_TAGS[1]}", repeats=True)
_KIMI = CallMarkup(
    _KIMI_TAGS[0],
    close=_KIMI_TAGS[1],
    separator="\n",
    before="<|tool_call_begin|>",
    label="functions.",
    between=":0<|tool_call_argument_begin|>",
    behind="<|tool_call_end|>",
    quotes_names=False,
)
_FAMILIES = (
    Family((_NAMED, "```json"), _deepseek, _FENCED),
    Family((_NAMED,), _deepseek, _DEEPSEEK),
    Family(
        ("<tool_call>", "<function="),
        lambda functions: TaggedParser(*_TAGS, _or_json(partial(read_coder, functions=functions))),
        _HERMES,
    ),
    Family(
        ("<tool_call>", "<arg_key>"),
        lambda functions: TaggedParser(*_TAGS, _or_json(partial(read_glm, functions=functions))),
        _HERMES,
    ),
    Family(("<tool_call>",), lambda functions: TaggedParser(*_TAGS, read_json), _HERMES),
    Family(
        ("[TOOL_CALLS]",),
        # If the tag is a special token, the answer's text does not contain it.
        lambda functions: WholeParser("[", read_json, TaggedParser("[TOOL_CALLS]", "", read_json)),
        CallMarkup("[TOOL_CALLS]", "[", "]", separator=", "),
    ),
    Family(
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        lambda functions: TaggedParser(*_KIMI_TAGS, read_kimi),
        _KIMI,
    ),
    _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    Family(
        ("[func_name1(params_name1=params_value1",),
        lambda functions: WholeParser(
            "[", lambda text: read_python(text) or read_json(text), PlainParser()
        ),
        CallMarkup("", "[", "]", separator=", "),
    ),
    Family(
        ('"parameters": ',),
        lambda functions: WholeParser("{", read_json, PlainParser()),
        CallMarkup("", between=', "parameters": '),
    ),
)
_DESCRIBED = Family((), lambda functions: TaggedParser(*_TAGS, read_json, read_cut), DESCRIBED)
"""For models whose template has no tool format."""


def tool_family(template: str) -> Family | None:
    """The family of models with this chat template; None if the template shows no tools or has an
    unknown format."""
    if "[ARGS]" in template:  # Mistral's newer form has special tokens, which answers do not show.
        return None
    families = (f for f in _FAMILIES if all(mark in template for mark in f.marks))
    return next(families, None)


def are_described(tokenizer: ModelTokenizer) -> bool:
    """Whether tools are described to the model as text, because its template has no tool format."""
    return tokenizer.chat is not None and tool_family(tokenizer.chat.source) is None


def answer_parser(
    tools: Sequence[Mapping[str, Any]], model: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers for answers that may call the tools. Raises `UnsupportedField` for a model
    without a chat template."""
    functions = [tool.get("function", {}) for tool in tools]
    return partial(_family(model, tokenizer).make_parser, functions)


def constrained_calls(
    samplings: Sequence[SamplingConfig],
    rules: CallRules,
    model: str,
    tokenizer: ModelTokenizer | None,
    room: int,
) -> Sequence[SamplingConfig]:
    """The samplings, with grammars that make calls obey the rules. An existing constraint applies
    to answers without calls. `room`: tokens that the engines can generate after the prompt. Raises
    `UnsupportedField` and `InvalidRequest`."""
    family = _family(model, tokenizer)
    return [_constrained(sampling, rules, family, room) for sampling in samplings]


def _constrained(
    sampling: SamplingConfig, rules: CallRules, family: Family, room: int
) -> SamplingConfig:
    is_described = family is _DESCRIBED
    if not (rules.constrains or is_described) and sampling.json_schema is None:
        return sampling
    if sampling.constraint not in (None, "json_schema") and not rules.must_call:
        if not rules.constrains:
            return sampling  # The constraint excludes calls.
        raise UnsupportedField(
            f"an answer with `{sampling.constraint}` cannot call strict tools", param="tools"
        )
    schema = sampling.json_schema
    if isinstance(schema, str):
        raise UnsupportedField("with `tools`, a schema must be an object", param="response_format")
    try:
        if is_described and rules.must_call:
            grammar = _one_call(rules, min(sampling.max_gen_length, room))
        else:
            grammar = call_grammar(family.markup, rules, schema)
    except InvalidRequest:
        if rules.constrains or not is_described:
            raise
        grammar = loose_grammar(family.markup, rules, schema)
    return sampling.model_copy(update=_FREE | {"grammar": grammar})


def _one_call(rules: CallRules, max_tokens: int) -> str:
    """The grammar of one call that ends within `max_tokens`. A model without tool training repeats
    a call, and does not end a string. Raises `InvalidRequest`."""
    one = replace(rules, may_call_many=False)
    try:
        return call_grammar(DESCRIBED, one, max_tokens=max_tokens)
    except InvalidRequest:  # The bounds may make the grammar too long.
        return call_grammar(DESCRIBED, one)


def _family(model: str, tokenizer: ModelTokenizer | None) -> Family:
    if tokenizer is None:
        raise no_tools(model, "its engines take plain text")
    if tokenizer.chat is None:
        raise no_tools(model, "it has no chat template")
    return tool_family(tokenizer.chat.source) or _DESCRIBED


def no_tools(model: str, reason: str) -> UnsupportedField:
    """The error for tools that the model does not support."""
    text = (
        f"Model `{model}` does not support tool calling: {reason}. Use a model whose chat template "
        "has a tool format, such as Qwen3, Llama 3.1 or Mistral, or an engine of type `builtin`. "
        "See docs/api.md"
    )
    return UnsupportedField(text, param="tools")


def served_parser(rules: CallRules | None, *, may_reason: bool) -> Callable[[], AnswerParser]:
    """Makes parsers for answers of a server that renders messages itself."""

    def make() -> AnswerParser:
        parser: AnswerParser = PlainParser()
        if rules is not None:
            parser = TaggedParser("<tool_call>", "</tool_call>", read_json)
        return ReasoningParser(parser) if may_reason else parser

    return make
