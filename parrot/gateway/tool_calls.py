"""How families of models call tools, told from their chat templates.

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

A reader finds the calls in what models write, each family in its own markup; None for whatever is
not wholly calls: then it is text. Grammars (llguidance's Lark) make answers whose calls cannot be
malformed:

text <tool_call>\\n{"name": "look", "arguments": {"at": "sky"}}\\n</tool_call>
     '-trigger-''open'---- object, of the tool's schema --------''close-----'"""

import ast
import json
import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import orjson

from parrot.gateway.answers import (
    AnswerParser,
    ParsedToolCall,
    PlainParser,
    ReasoningParser,
    TaggedParser,
    WholeParser,
)
from parrot.protocol.errors import InvalidRequest, UnsupportedField
from parrot.protocol.sampling import CONSTRAINTS, MAX_GRAMMAR, SamplingConfig
from parrot.serve.prompts.encode import ModelTokenizer
from parrot.utils.json_schemas import exact_schema

_FREE = dict.fromkeys(CONSTRAINTS)

_MAX_NAME = 100

Function = Mapping[str, Any]
"""A function as vendors describe it to a model: `name`, `parameters`, which are a JSON schema."""
_MAX_PYTHON = 2**14  # characters; a longer one is text
_MAX_DEPTH = 64
_DECODER = json.JSONDecoder()
_GAP = re.compile(r"[\s;]*")
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


def read_json(text: str) -> list[ParsedToolCall] | None:
    """A JSON object, a list of them, or some one after the other, with semicolons or not. Their
    arguments are called `arguments` or `parameters`."""
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
    """Calls keep the ids that the model gives them, since it is shown them again."""
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
    """`call:look{at:<quote>sky<quote>,n:[1,{far:true}]}`. Values without quotes are JSON, or text
    if the function wants some."""
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
    """With JSON in place of what has no quotes."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_plain(one) for one in value]
    return _typed(str(value), None) if isinstance(value, _Bare) else value


class _GemmaReader:
    """Reads values one after the other; `at` is the place behind the last one."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self.at = 0

    def value(self, depth: int = 0) -> Any:
        """Raises `ValueError` if there is none."""
        if depth > _MAX_DEPTH:
            raise ValueError("it is too deep")
        if self._takes("{"):
            fields = list(self._items("}", lambda: self._field(depth + 1)))
            found = dict(fields)
            if len(found) < len(fields):
                raise ValueError("a key is there twice")
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
    """The matches of which the text wholly consists, but for white space."""
    matches: list[re.Match[str]] = []
    end = 0
    while found := pattern.match(text, end):
        matches.append(found)
        end = found.end()
    return None if text[end:].strip() else matches


def read_python(text: str) -> list[ParsedToolCall] | None:
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


def _python_call(node: ast.expr) -> ParsedToolCall:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError("no call by names")
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
    """`marks`: texts that are all in their chat templates. `make_parser` takes the functions that
    may be called. `markup` None: their calls cannot be enforced."""

    marks: tuple[str, ...]
    make_parser: Callable[[Sequence[Function]], AnswerParser]
    markup: CallMarkup | None = None


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


def _gemma(begin: str, end: str, quote: str) -> "Family":
    def make_parser(functions: Sequence[Function]) -> AnswerParser:
        return TaggedParser(begin, end, partial(read_gemma, quote=quote, functions=functions))

    return Family((begin, quote), make_parser)


_FAMILIES = (
    Family((_NAMED, "```json"), _deepseek, _FENCED),
    Family((_NAMED,), _deepseek, _DEEPSEEK),
    Family(
        ("<tool_call>", "<function="),
        lambda functions: TaggedParser(*_TAGS, partial(read_coder, functions=functions)),
    ),
    Family(
        ("<tool_call>", "<arg_key>"),
        lambda functions: TaggedParser(*_TAGS, partial(read_glm, functions=functions)),
    ),
    Family(
        ("<tool_call>",),
        lambda functions: TaggedParser(*_TAGS, read_json),
        CallMarkup("<tool_call>", "\n", "\n</tool_call>", repeats=True),
    ),
    Family(
        ("[TOOL_CALLS]",),
        # Where the tag is a special token, it is not in the text of an answer.
        lambda functions: WholeParser("[", read_json, TaggedParser("[TOOL_CALLS]", "", read_json)),
        CallMarkup("[TOOL_CALLS]", "[", "]", separator=", "),
    ),
    Family(
        ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        lambda functions: TaggedParser(*_KIMI_TAGS, read_kimi),
    ),
    _gemma("<start_function_call>", "<end_function_call>", "<escape>"),
    _gemma("<|tool_call>", "<tool_call|>", '<|"|>'),
    Family(
        ("[func_name1(params_name1=params_value1",),
        lambda functions: WholeParser("[", read_python, PlainParser()),
    ),
    Family(
        ('"parameters": ',),
        lambda functions: WholeParser("{", read_json, PlainParser()),
        CallMarkup("", between=', "parameters": '),
    ),
)


def tool_family(template: str) -> Family | None:
    """The family of models with this chat template; None if it shows no tools in a form that is
    known."""
    if "[ARGS]" in template:  # Mistral's later form, of special tokens that answers do not have
        return None
    families = (f for f in _FAMILIES if all(mark in template for mark in f.marks))
    return next(families, None)


def answer_parser(
    tools: Sequence[Mapping[str, Any]], model: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers that may call the tools. Raises `UnsupportedField` if it is not
    known how the model calls them."""
    functions = [tool.get("function", {}) for tool in tools]
    return partial(_family(model, tokenizer).make_parser, functions)


def constrained_calls(
    samplings: Sequence[SamplingConfig],
    rules: CallRules,
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Sequence[SamplingConfig]:
    """The samplings of answers whose calls obey the rules; what constrains them already is for
    answers that call nothing. Raises `UnsupportedField` and `InvalidRequest`."""
    return [_constrained(sampling, rules, model, tokenizer) for sampling in samplings]


def _constrained(
    sampling: SamplingConfig, rules: CallRules, model: str, tokenizer: ModelTokenizer | None
) -> SamplingConfig:
    if not rules.constrains and sampling.json_schema is None:
        return sampling
    if sampling.constraint not in (None, "json_schema") and not rules.must_call:
        raise UnsupportedField(
            f"an answer with `{sampling.constraint}` cannot call strict tools", param="tools"
        )
    schema = sampling.json_schema
    if isinstance(schema, str):
        raise UnsupportedField("with tools a schema must be an object", param="response_format")
    markup = _family(model, tokenizer).markup
    if markup is None:
        raise UnsupportedField(f"calls of tools by `{model}` cannot be enforced", param="tools")
    grammar = call_grammar(markup, rules, schema)
    return sampling.model_copy(update=_FREE | {"grammar": grammar})


def _family(model: str, tokenizer: ModelTokenizer | None) -> Family:
    chat = None if tokenizer is None else tokenizer.chat
    family = None if chat is None else tool_family(chat.source)
    if family is None:
        raise UnsupportedField(f"it is not known how `{model}` calls tools", param="tools")
    return family


def served_parser(rules: CallRules | None, *, may_reason: bool) -> Callable[[], AnswerParser]:
    """Makes parsers of answers."""

    def make() -> AnswerParser:
        parser: AnswerParser = PlainParser()
        if rules is not None:
            parser = TaggedParser("<tool_call>", "</tool_call>", read_json)
        return ReasoningParser(parser) if may_reason else parser

    return make
