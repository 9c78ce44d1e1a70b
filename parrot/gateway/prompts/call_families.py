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
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

from parrot.gateway.prompts.answers import AnswerParser, PlainParser, TaggedParser, WholeParser
from parrot.gateway.prompts.call_grammars import CallMarkup, Function
from parrot.gateway.prompts.call_readers import (
    read_coder,
    read_deepseek,
    read_gemma,
    read_glm,
    read_json,
    read_kimi,
    read_python,
)


class Family(NamedTuple):
    """`marks`: texts that are all in their chat templates. `make_parser` takes the functions that
    may be called. `markup` None: their calls cannot be enforced."""

    marks: tuple[str, ...]
    make_parser: Callable[[Sequence[Function]], AnswerParser]
    markup: CallMarkup | None = None


_TAGS = "<tool_call>", "</tool_call>"
_BEGIN, _END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_CALL, _NAMED, _CALLED = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"
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


_KIMI_TAGS = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
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
