"""A model's way with conversations: how it is shown one, and how its answers call tools.

Conversations that the server behind an engine renders itself, with the model's own template.

    {"tools": [...]}                        the options that the server gets
    {"role": "user"}                        then each message: what else it says, and its text
    Is it raining?
    {"role": "assistant"}
    <answer>

That is the prompt's text in ServeCore, which never gets to the model. Like a prompt's, its pieces
are the same exactly if the conversation is. So contexts, turns that continue others and results are
found by it as ever.

Answers come as text: reasoning between `<think>` and `</think>`, then what is said, then each call
as `<tool_call>{"name": ..., "arguments": ...}</tool_call>`, whatever the model's own markup is."""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import orjson

from parrot.gateway.answers import (
    AnswerParser,
    PlainParser,
    ReasoningParser,
    TaggedParser,
    with_reasoning,
)
from parrot.gateway.tool_calls import CallRules, Family, call_grammar, read_json, tool_family
from parrot.gateway.transcript import (
    Message,
    Transcript,
    render_transcript,
    with_system_first,
)
from parrot.protocol.errors import InvalidRequest, PromptTooLong, UnsupportedField
from parrot.protocol.sampling import CONSTRAINTS, SamplingConfig
from parrot.serve.graph.nodes import PieceKind
from parrot.serve.graph.variable import TokenizedText
from parrot.serve.prompts.encode import ModelTokenizer, Style, encode_prompt, require_chars
from parrot.serve.prompts.segments import Segment
from parrot.serve.prompts.templates import PLAIN_CHAT

_PART = 2048  # characters
_MAX_CHARS = 2**23  # of a prompt: no model has room for two million tokens

FindTokenizer = Callable[[str], ModelTokenizer | None]
"""The tokenizer of a model, None if its engines take text. Raises `NotFound` if it has none."""

TokenPrompt = tuple[str, TokenizedText | None]
"""A prompt's text, and its tokens where the text does not tell them."""
_FREE = dict.fromkeys(CONSTRAINTS)
Body = dict[str, Any]
"""The fields of a chat completion that say what was said, and what may be called."""
_SAID = frozenset({"content", "tool_calls", "reasoning_content"})


def transcript_of(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Transcript:
    """The prompt of plain text, or of messages that the chat template renders with `options`.
    Raises `UnsupportedField` if the model has no chat template, `PromptTooLong` for what is longer
    than any model's prompt, and `InvalidRequest`."""
    texts = [prompt] if isinstance(prompt, str) else [m.get("content") for m in prompt]
    num_chars = sum([len(text) for text in texts if isinstance(text, str)])
    if num_chars > _MAX_CHARS:
        raise PromptTooLong(f"the prompt has {num_chars} characters; the limit is {_MAX_CHARS}")
    if isinstance(prompt, str):
        ends = [(end, PieceKind.CONSTANT) for end in _part_ends(prompt)]
        return Transcript(prompt, lambda *_: ends)
    if tokenizer is None:
        return render_transcript(PLAIN_CHAT, prompt)
    if tokenizer.chat is None:
        raise UnsupportedField(f"model `{model}` has no chat template", param="model")
    special = tokenizer.encoder.special_texts
    shown = prompt if tokenizer.chat.takes_system_anywhere else with_system_first(prompt)
    return render_transcript(
        tokenizer.chat,
        shown,
        special_texts=special,
        are_as_sent=len(shown) == len(prompt),
        **options,
    )


def require_fits(prompt: str, tokenizer: ModelTokenizer | None, limit: int | None) -> None:
    """Raise `PromptTooLong` for a prompt that cannot be less than `limit` tokens (None: any)."""
    if limit is not None:
        require_chars(len(prompt), tokenizer, limit)


def _part_ends(text: str) -> Iterator[int]:
    """Where a long text is cut, so that the next prompt that begins with it shares its tokens and
    its KV. The parts have the same tokens as the whole."""
    at = text.find("\n", _PART)
    while 0 <= at < len(text) - 1:
        # Tokens of all families end behind such a newline.
        is_end = at > 0 and text[at + 1].isalnum() and not text[at - 1].isspace()
        if is_end:
            yield at + 1
        at = text.find("\n", at + 1 + is_end * _PART)
    yield len(text)


async def prompt_tokens(
    prompt: Sequence[Message] | str,
    options: Mapping[str, Any],
    model: str,
    tokenizer: ModelTokenizer | None,
) -> list[int]:
    """The ids of the prompt. Raises as `transcript_of` does, and `UnsupportedField` if the engines
    of the model take text."""
    if tokenizer is None:
        raise UnsupportedField(f"only its engines know the tokens of `{model}`", param="model")
    pieces = transcript_of(prompt, options, model, tokenizer).pieces()
    segments = [Segment(piece.kind, piece.text) for piece in pieces]
    units = await encode_prompt(segments, False, tokenizer)
    parts = [ids for ids in units if not isinstance(ids, str)]
    return list(chain.from_iterable(parts))  # not one by one in Python: there may be millions


async def prompt_of_tokens(
    ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None
) -> TokenPrompt:
    """A prompt of exactly these tokens. Its text has that of special ones, but for a first BOS
    token. Raises `UnsupportedField` if the engines of the model take text, and `InvalidRequest` for
    a token that the model has not."""
    if tokenizer is None:
        message = f"the engines of `{model}` take text: give the prompt as text"
        raise UnsupportedField(message, param="prompt")
    encoder = tokenizer.encoder
    if (largest := max(ids)) >= encoder.num_tokens:
        message = f"token id {largest} is outside of the vocabulary of {encoder.num_tokens}"
        raise InvalidRequest(message, param="prompt")
    given = tuple(ids)
    shown = given[1:] if given[0] == tokenizer.bos else given
    text = await asyncio.to_thread(encoder.decode, shown, special=True)
    usual = await encoder.encode(text, Style(special=True, first=True))
    is_usual = tokenizer.with_bos(usual) == given
    return text, None if is_usual else TokenizedText(tokenizer.tokenizer_id, given)


async def text_of_tokens(ids: Sequence[int], model: str, tokenizer: ModelTokenizer | None) -> str:
    """Their text, without that of special tokens. Raises `UnsupportedField` if the engines of the
    model take text."""
    if tokenizer is None:
        raise UnsupportedField(f"only its engines know the tokens of `{model}`", param="model")
    return await asyncio.to_thread(tokenizer.encoder.decode, ids)


def answer_parser(
    options: Mapping[str, Any], model: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers. Raises `UnsupportedField` if there are tools and it is not known
    how the model calls them."""
    tools = options.get("tools")
    if not tools:
        return PlainParser
    functions = [tool.get("function", {}) for tool in tools]
    return partial(_family(model, tokenizer).make_parser, functions)


def reasoning_parser(
    make_parser: Callable[[], AnswerParser], text: str, tokenizer: ModelTokenizer | None
) -> Callable[[], AnswerParser]:
    """Makes parsers of answers that may begin with reasoning, behind the prompt `text`."""
    chat = None if tokenizer is None else tokenizer.chat
    return make_parser if chat is None else with_reasoning(make_parser, chat.source, text)


def constrained_calls(
    samplings: Sequence[SamplingConfig],
    rules: CallRules | None,
    model: str,
    tokenizer: ModelTokenizer | None,
) -> Sequence[SamplingConfig]:
    """The samplings of answers whose calls obey the rules; what constrains them already is for
    answers that call nothing. Raises `UnsupportedField` and `InvalidRequest`."""
    if rules is None:
        return samplings
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


def served_body(
    messages: Sequence[Message], options: Mapping[str, Any], rules: CallRules | None
) -> Body:
    """The conversation as servers take it. `options` are a chat template's."""
    others = {name: value for name, value in options.items() if name != "tools"}
    body: Body = {"messages": [_served(message) for message in messages]}
    if "reasoning_effort" in others:
        body["reasoning_effort"] = others["reasoning_effort"]
    if others:
        body["chat_template_kwargs"] = others
    if rules is not None:
        strict = {function["name"] for function in rules.functions if function.get("strict")}
        body["tools"] = [_strict(tool, strict) for tool in options.get("tools", ())]
        body["tool_choice"] = _choice(rules)
        if not rules.may_call_many:
            body["parallel_tool_calls"] = False
    return body


def served_transcript(messages: Sequence[Message], body: Body) -> Transcript:
    """The stand-in for the prompt of this body."""
    begin = {name: value for name, value in body.items() if name != "messages"}
    markup, parts, ends = f"{_line(begin)}\n", list[str](), list[tuple[int, PieceKind]]()
    length = 0
    for message in (*messages, {"role": "assistant"}):
        markup += f"{_line({k: v for k, v in message.items() if k not in _SAID})}\n"
        is_answer = message.get("role") == "assistant"
        kind = PieceKind.OUTPUT if is_answer else PieceKind.VALUE
        for part, of_kind in ((markup, PieceKind.CONSTANT), (_said(message), kind)):
            if part:
                parts.append(part)
                length += len(part)
                ends.append((length, of_kind))
        markup = "\n"
    return Transcript("".join(parts), lambda start, num_known: ends)


def served_parser(rules: CallRules | None, *, may_reason: bool) -> Callable[[], AnswerParser]:
    """Makes parsers of answers."""

    def make() -> AnswerParser:
        parser: AnswerParser = PlainParser()
        if rules is not None:
            parser = TaggedParser("<tool_call>", "</tool_call>", read_json)
        return ReasoningParser(parser) if may_reason else parser

    return make


def _said(message: Message) -> str:
    """An answer as it came; of other messages, their text."""
    said: str = message.get("content") or ""
    for call in message.get("tool_calls") or ():
        function = call["function"]
        shown = _line({"name": function["name"], "arguments": function["arguments"]})
        said += f"\n<tool_call>\n{shown}\n</tool_call>"
    if reasoning := message.get("reasoning_content"):
        said = f"<think>\n{reasoning}\n</think>\n\n{said}"
    return said


def _served(message: Message) -> Message:
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [_served_call(call) for call in calls]}


def _served_call(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call["function"]
    return {**call, "function": {**function, "arguments": _line(function["arguments"])}}


def _strict(tool: Mapping[str, Any], strict: set[str]) -> Mapping[str, Any]:
    function = tool["function"]
    if function["name"] not in strict:
        return tool
    return {**tool, "function": {**function, "strict": True}}


def _choice(rules: CallRules) -> str | Mapping[str, Any]:
    if not rules.must_call:
        return "auto"
    if len(rules.functions) > 1:
        return "required"
    return {"type": "function", "function": {"name": rules.functions[0]["name"]}}


def _line(value: Any) -> str:
    return orjson.dumps(value).decode()
